"""A node's own groups come back from the bus; those of another holder of its key are told from them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from makers import INCARNATION, finish_round, make_group, make_received, make_signed

from sapo.core.errors import Refused
from sapo.peers.resend_guard import KeyCloneDetector
from sapo.store.journal.journal import Journal

FORMER, OTHER = "f" * 16, "e" * 16


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """Of a node that has begun round 1, and has finished round 0 with one group."""
    with Journal(tmp_path / "journal.sqlite", incarnation=INCARNATION) as journal:
        finish_round(journal, "peer", 0, made=[make_signed()])
        journal.commit_groups(1, [make_signed(round=1)], [])
        yield journal


@pytest.fixture
def own(journal: Journal) -> KeyCloneDetector:
    return KeyCloneDetector(journal, [FORMER, INCARNATION])


def echo(own: KeyCloneDetector, at: float) -> None:
    own.note(Refused("own_echo"), make_received(at=at))


def test_what_the_journal_holds_is_its_own(own: KeyCloneDetector) -> None:
    assert own.may_be_own(make_group(), 5.0)
    assert own.may_be_own(make_group(round=1), 5.0)


def test_a_group_of_this_incarnation_that_is_in_no_journal_is_anothers(own: KeyCloneDetector) -> None:
    assert not own.may_be_own(make_group(position=1), 5.0)
    assert not own.may_be_own(make_group(round=1, position=7), 5.0)


def test_a_round_that_this_node_has_not_reached_is_anothers(own: KeyCloneDetector) -> None:
    assert not own.may_be_own(make_group(round=2), 5.0)


def test_an_own_place_with_another_content_is_anothers(own: KeyCloneDetector) -> None:
    assert not own.may_be_own(make_group(texts=("7", "8")), 5.0)


def test_former_incarnations_are_the_nodes_own_whenever_they_are_sent_again(own: KeyCloneDetector) -> None:
    echo(own, 10.0)
    assert own.may_be_own(make_group(incarnation=FORMER, round=900), 20.0)


def test_another_incarnation_that_publishes_beside_this_one_is_anothers(own: KeyCloneDetector) -> None:
    assert own.may_be_own(make_group(incarnation=OTHER), 5.0)
    echo(own, 10.0)
    assert own.may_be_own(make_group(incarnation=OTHER), 9.0)
    assert not own.may_be_own(make_group(incarnation=OTHER), 11.0)


def test_only_the_first_own_group_that_comes_back_says_when_this_incarnation_began(
    own: KeyCloneDetector,
) -> None:
    own.note(Refused("own_echo"), make_received(at=1.0, incarnation=OTHER))
    assert own.may_be_own(make_group(incarnation=OTHER), 5.0)
    echo(own, 10.0)
    echo(own, 20.0)
    assert not own.may_be_own(make_group(incarnation=OTHER), 15.0)
