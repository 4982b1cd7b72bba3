"""Thousands of hostile messages through the whole way in: no crash, nothing invalid is taken, nothing honest
is lost, memory stays flat. `make soak` sends 200,000."""

import random
import re
from pathlib import Path

import psutil
import pytest
from searches import SEED
from trial import (
    Archive,
    Grounds,
    KafkaCarrier,
    Outcome,
    SqliteCarrier,
    grown,
    make_grounds,
    real_messages,
    served,
    trial,
)

DOCS = Path(__file__).parents[2] / "docs"
GROWTH = 96 * 2**20
"""Bytes that the process may grow by after its first fifth, whatever the count."""


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Grounds:
    return make_grounds(tmp_path_factory.mktemp("fuzz"))


def fuzz(grounds: Grounds, name: str, folder: Path, count: int) -> Outcome:
    """A node reads the embedded bus, onto which others write."""
    carrier = SqliteCarrier(folder / "bus.sqlite")
    with trial(grounds, carrier, name) as one:
        one.round(real_messages(grounds))
        for messages in served(grounds, name, count, SEED, one.rules.control):
            one.round(messages)
            carrier.forget()
    print(one.outcome.told())
    return one.outcome


def documented() -> set[str]:
    """Reasons that docs/admission.md tells of."""
    return set(re.findall(r"`([a-z_]+)`", (DOCS / "admission.md").read_text(encoding="utf-8")))


def check(outcome: Outcome) -> None:
    assert outcome.sent["fresh"] > 0
    fresh = sum(count for origin, count in outcome.accepted.items() if origin.split()[-1] == "fresh")
    assert fresh >= outcome.sent["fresh"]
    assert outcome.used > 0
    assert outcome.refused.keys() <= documented()
    assert outcome.grown() < GROWTH


def test_thousands_of_hostile_messages_change_nothing(grounds: Grounds, tmp_path: Path) -> None:
    check(fuzz(grounds, "n0", tmp_path, 4000))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_hostile_messages_change_nothing(tmp_path: Path) -> None:
    # a swarm of its own: the other's nodes have met the first thousands
    check(fuzz(make_grounds(tmp_path / "swarm"), "n0", tmp_path, 200_000))


def test_hostile_batches_of_a_broker_change_nothing(
    grounds: Grounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = KafkaCarrier(monkeypatch)
    with trial(grounds, carrier, "n3") as one:
        one.round(real_messages(grounds), counted=False)
        for messages in served(grounds, "n3", 1000, SEED, one.rules.control):
            one.round(messages, counted=False)
            (position,) = one.node.journal.positions().values()
            assert position == carrier.end
            carrier.forget()
    check(one.outcome)


def archive(grounds: Grounds, folder: Path, count: int) -> list[int]:
    """The archive reads what nodes read; returns the process's size after each of its runs."""
    carrier, rng, rss = SqliteCarrier(folder / "bus.sqlite"), random.Random(SEED), []
    keeper = Archive(grounds, carrier, folder / "history")
    waiting = real_messages(grounds)
    carrier.put(waiting, rng)
    for messages in served(grounds, "n0", count, SEED):
        carrier.put(messages, rng)
        waiting += messages
        if len(waiting) >= 1000:
            keeper.take(waiting)
            carrier.forget()
            waiting = []
            rss.append(psutil.Process().memory_info().rss)
    assert keeper.groups > count / 10
    return rss


def test_the_archive_keeps_what_is_valid_and_can_give_back_what_was_signed(
    grounds: Grounds, tmp_path: Path
) -> None:
    archive(grounds, tmp_path, 1000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_archive_of_fifty_thousand_hostile_messages_is_in_order(grounds: Grounds, tmp_path: Path) -> None:
    rss = archive(grounds, tmp_path, 50_000)
    print([size // 2**20 for size in rss])
    assert grown(rss) < 2 * GROWTH
