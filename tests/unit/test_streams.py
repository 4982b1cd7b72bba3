"""Old signed groups that are sent again, and keys that two nodes sign with, are told from honest lateness."""

import random
from collections.abc import Iterable

import pytest
from makers import make_group

from sapo.core.errors import Refused
from sapo.core.shares import Shares
from sapo.core.types import Group
from sapo.peers.resend_guard import AUTHORS, LATE, LIVES, PLACES, WINDOW, ResendGuard

LATER, THIRD = "1" * 16, "2" * 16


def at(round: int) -> float:
    """When the bus stamped a round that came without delay."""
    return 1000.0 + round


def group(round: int, position: int = 0, author: str = "peer", **changes: object) -> Group:
    """A group whose author's clock is the bus's."""
    return make_group(author, round, position, **({"created_at": at(round)} | changes))


def heard(groups: Iterable[tuple[Group, float]], streams: ResendGuard | None = None) -> ResendGuard:
    """A memory that took all of these groups."""
    streams = ResendGuard() if streams is None else streams
    for one, stamp in groups:
        streams.check(one, stamp)
        streams.note(one, stamp)
    return streams


def refusal(streams: ResendGuard, one: Group, stamp: float) -> str:
    with pytest.raises(Refused) as refused:
        streams.check(one, stamp)
    assert refused.value.group is one
    return refused.value.code


def test_a_group_that_is_sent_again_is_a_replay_however_much_was_met_since() -> None:
    streams = heard((group(round, place), at(round)) for round in range(3 * WINDOW) for place in range(2))
    newest = 3 * WINDOW - 1
    for round in (newest, newest - WINDOW + 1, newest - WINDOW, newest // 2, 0):
        assert refusal(streams, group(round), at(newest) + 60.0) == "replayed"


def test_partitions_that_lag_in_any_order_lose_nothing() -> None:
    rng = random.Random(3)
    partitions = [[(group(r, place), at(r)) for r in range(4 * WINDOW)] for place in range(3)]
    rng.shuffle(partitions)
    heard(one for partition in partitions for one in partition)


def test_a_silo_that_publishes_hours_of_rounds_at_once_loses_nothing() -> None:
    rounds = [group(round, created_at=at(round)) for round in range(4 * WINDOW)]
    heard([(one, 9e6 + place * 0.01) for place, one in enumerate(rounds)])


def test_partitions_whose_clocks_differ_by_seconds_lose_nothing_of_what_is_published_at_once() -> None:
    streams = heard((group(round, 0), 9e6 + round / 1000) for round in range(2 * WINDOW))
    heard(((group(round, 1), 9e6 + 4.0 + round / 1000) for round in range(2 * WINDOW)), streams)


def test_groups_that_waited_for_a_partition_that_was_away_are_taken_late() -> None:
    streams = heard((group(round, 0), at(round)) for round in range(LATE + 1))
    heard([(group(round, 1), at(LATE) + 600.0 + round / 100) for round in range(LATE + 1)], streams)


def test_places_beyond_those_the_window_tells_apart_are_left_to_the_ids() -> None:
    streams = heard([(group(0, PLACES), at(0)), (group(0, 2**30), at(0))])
    streams.check(group(0, PLACES), at(1))


def test_an_author_whose_journal_was_lost_goes_on_under_a_new_incarnation() -> None:
    old = [(group(round), at(round)) for round in range(10)]
    new = [(group(round, incarnation=LATER, created_at=at(20 + round)), at(20 + round)) for round in range(5)]
    late = [(group(10), at(30))]
    heard(old + new + late)


def test_the_older_of_two_nodes_with_one_key_is_refused_and_the_newer_is_not() -> None:
    streams = heard([(group(0), at(0)), (group(0, incarnation=LATER, created_at=at(5)), at(5))])
    assert refusal(streams, group(100, created_at=at(100)), at(100)) == "key_reuse"
    streams.check(group(1, incarnation=LATER, created_at=at(101)), at(101))


@pytest.mark.parametrize("known", [True, False])
def test_who_sends_an_earlier_life_again_harms_nobody_but_the_replay(known: bool) -> None:
    old, new = group(3), [group(round, incarnation=LATER, created_at=at(900 + round)) for round in range(300)]
    streams = heard([(group(0), at(0))] if known else [])
    heard([(one, one.created_at) for one in new[:200]], streams)
    assert refusal(streams, old, at(2000)) == "replayed"
    heard([(one, at(2100) + one.round) for one in new[200:]], streams)


def test_an_unknown_earlier_life_that_comes_first_does_not_silence_the_living_one() -> None:
    streams = heard([(group(3), at(2000))])
    new = [group(round, incarnation=LATER, created_at=at(900 + round)) for round in range(300)]
    heard([(one, at(2100) + one.round) for one in new], streams)


def test_a_restart_forgets_nothing() -> None:
    rng, streams, kept = random.Random(5), ResendGuard(), dict[str, str]()
    for round in range(400):
        one = group(round, rng.randrange(40), f"p{rng.randrange(5)}", incarnation=rng.choice([LATER, THIRD]))
        try:
            streams.check(one, at(round))
        except Refused:
            continue
        streams.note(one, at(round))
        for key, content in streams.changed().items():
            assert content is not None
            kept[key] = content
    again = ResendGuard(kept)
    assert again._authors == streams._authors


def test_incarnations_of_one_author_are_bounded_and_the_latest_stay() -> None:
    lives = [
        (group(0, incarnation=f"{life:016x}", created_at=at(1000 * life)), at(1000 * life))
        for life in range(3 * LIVES)
    ]
    streams = heard(lives)
    (known,) = streams._authors.values()
    assert sorted(known) == [f"{life:016x}" for life in range(2 * LIVES, 3 * LIVES)]


def test_a_flood_of_authors_pushes_out_newcomers_and_is_bounded() -> None:
    victim = group(0, author="victim")
    streams = ResendGuard(shares=Shares(newcomers=0.25, known=lambda key: key == victim.key))
    heard([(victim, at(0))], streams)
    for number in range(AUTHORS + 100):
        streams.note(victim.model_copy(update={"key": f"{number:064x}"}), at(1 + number))
    assert len(streams) <= AUTHORS
    assert refusal(streams, victim, at(10_000)) == "replayed"
    changed = streams.changed()
    assert changed[f"{0:064x}"] is None
    assert len([key for key, content in changed.items() if content is not None]) == len(streams)


def test_a_life_that_was_over_when_the_next_began_does_not_make_that_one_reused_for_its_fast_clock() -> None:
    ahead = group(50, created_at=at(50) + 3600)
    successor = group(0, incarnation=LATER, created_at=at(70))
    streams = heard([(ahead, at(50)), (successor, at(70))])
    for round in (100, 3000, 9000):
        heard([(group(round, incarnation=LATER), at(round))], streams)
