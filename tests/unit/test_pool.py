"""The pool's bounds, what it says about what it dropped, and its way through the journal."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from makers import make_entry, make_group, make_identity, make_signed, make_verdict
from searches import searching

from sapo.bus.base import Limits
from sapo.bus.memory import MemoryBus
from sapo.core.config.load import PoolConfig
from sapo.core.errors import Refused
from sapo.core.shares import Shares
from sapo.core.types import Received, Recipe
from sapo.peers.pool import PLACE_BYTES, SEEN_PER_GROUP, Entry, Pool, places_of
from sapo.peers.quotas import Quotas


def filled(config: PoolConfig, *entries: Entry) -> Pool:
    pool = Pool(config)
    for entry in entries:
        pool.add(entry)
    return pool


def config(**changes: float) -> PoolConfig:
    return PoolConfig.model_validate({"max_groups": 4, "max_age_s": 100, "max_peer_share": 1} | changes)


def remembered(pool: Pool, group_id: str) -> str | None:
    """Digest of a group's content, if the pool remembers it."""
    met = pool.seen.get(group_id)
    return None if met is None else met.content_sha256


def test_entries_stay_in_the_order_they_came() -> None:
    entries = [make_entry(position=i, at=1000.0 - i) for i in (3, 1, 2)]
    pool = filled(config(), *entries)
    assert pool.entries() == tuple(entries)
    assert len(pool) == 3
    assert entries[0].group_id in pool


def test_adding_twice_keeps_the_first_with_its_verdict() -> None:
    judged = make_entry(scores=[1.0, 0.0])
    pool = filled(config(), judged, make_entry())
    (entry,) = pool.entries()
    assert entry.verdict == make_verdict([1.0, 0.0])


def test_two_peers_answers_to_one_question_stay_two_groups() -> None:
    recipe = Recipe.make("chain_sum", {}, seed=7)
    pool = filled(config(), make_entry("a", recipe=recipe), make_entry("b", recipe=recipe))
    assert [entry.group.node for entry in pool.entries()] == ["a", "b"]
    assert [len(entry.group.completions) for entry in pool.entries()] == [2, 2]


def test_the_oldest_go_first_when_there_are_too_many() -> None:
    entries = [make_entry(f"p{i}", position=i, at=1000.0 + age) for i, age in enumerate([5, 1, 4, 2, 3, 6])]
    pool = filled(config(), *entries)
    assert pool.evict(1010.0) == {"number": 2}
    assert [entry.received.timestamp for entry in pool.entries()] == [1005.0, 1004.0, 1003.0, 1006.0]


def test_what_is_too_old_goes_whatever_the_number() -> None:
    pool = filled(config(), make_entry(position=0, at=899.0), make_entry(position=1, at=900.0))
    assert pool.evict(1000.0) == {"age": 1}
    assert [entry.received.timestamp for entry in pool.entries()] == [900.0]


def test_a_loud_peer_loses_its_oldest_before_anyone_else_loses_a_place() -> None:
    quiet = make_entry("quiet", at=1000.0)
    loud = [make_entry("loud", position=i, at=1001.0 + i) for i in range(5)]
    pool = filled(config(max_peer_share=0.5), quiet, *loud)
    assert pool.evict(1010.0) == {"peer_share": 3}
    assert pool.entries() == (quiet, *loud[3:])


def test_a_peer_is_its_key_whatever_it_calls_itself() -> None:
    loud = [make_entry("loud", position=i, node=f"name{i}") for i in range(5)]
    pool = filled(config(max_peer_share=0.5), *loud)
    assert pool.evict(1000.0) == {"peer_share": 3}


def test_every_peer_may_hold_at_least_one_group() -> None:
    pool = filled(config(max_peer_share=0.01), make_entry("a"), make_entry("b"))
    assert pool.evict(1000.0) == {}
    assert len(pool) == 2


def test_the_bound_holds_after_evicting_and_filling_again() -> None:
    pool = Pool(config(max_groups=3))
    for wave in range(4):
        for i in range(7):
            pool.add(make_entry(f"p{i}", round=wave, position=i, at=1000.0 + wave))
        pool.evict(1000.0 + wave)
        assert len(pool) == 3
        pool.remove([pool.entries()[0].group_id])
        assert len(pool) == 2


def test_a_flood_leaves_room_for_others_in_what_a_round_reads() -> None:
    bus = MemoryBus()
    bus.publish([make_signed("flooder", position=i) for i in range(20)])
    bus.publish([make_signed(f"p{i}", position=i) for i in range(6)])
    keys = {one.signed.key for one in bus.poll({}, Limits(), random.Random(0)).received}

    def polled(share: float) -> Sequence[Received]:
        quotas = Quotas(config(max_groups=8, max_peer_share=share), keys)
        return bus.poll({}, quotas.limits(), random.Random(0)).received

    read = polled(0.5)
    assert Counter(received.signed.key for received in read).most_common(1)[0][1] == 20
    assert len(read) == 20 + 4
    assert len(polled(1)) == 8


def stays(pool: Pool, floods: int, rounds: int) -> Counter[str]:
    """Rounds in which each author had a place: 40 authors in turn publish one group, the flooder several."""
    found: Counter[str] = Counter()
    for turn in range(rounds):
        for i in range(4):
            quiet = (4 * turn + i) % 40
            pool.add(make_entry(f"p{quiet}", round=turn, position=i, at=1000.0 + turn))
        for i in range(floods):
            pool.add(make_entry("flooder", round=turn, position=10 + i, at=1000.0 + turn))
        pool.evict(1000.0 + turn)
        found.update({entry.group.node for entry in pool.entries()})
    return found


def test_in_a_full_pool_a_flood_has_no_more_places_than_others_have_and_each_keeps_its_newest() -> None:
    pool = Pool(config(max_groups=16, max_age_s=1000, max_peer_share=0.5))
    for round in range(5):
        for author, many in {"p0": 2, "p1": 2, "p2": 2, "flooder": 20}.items():
            for i in range(many):
                pool.add(make_entry(author, round, i, at=1000.0 + round + i / 100))
        pool.evict(1005.0)
    rounds: dict[str, list[int]] = {}
    for entry in pool.entries():
        rounds.setdefault(entry.group.node, []).append(entry.group.round)
    assert rounds == {"flooder": [4] * 4} | {f"p{n}": [3, 3, 4, 4] for n in range(3)}


def test_a_restart_lets_no_burst_of_a_flooder_in() -> None:
    limits = config(max_groups=8, max_age_s=10_000)
    pool = Pool(limits)
    stays(pool, floods=4, rounds=20)
    back = Pool.restore(limits, [entry.to_row() for entry in pool.entries()])
    for i in range(20):
        back.add(make_entry("flooder", round=99, position=i, at=1019.0))
    back.evict(1019.0)
    assert sum(entry.group.node == "flooder" for entry in back.entries()) <= 1


PEERS = ["a", "b", "c"]
ARRIVALS = st.lists(
    st.tuples(st.sampled_from(PEERS), st.integers(0, 30), st.integers(900, 1000)),
    max_size=25,
    unique_by=lambda arrival: arrival[:2],
)
ENTRIES = {(peer, place): make_entry(peer, position=place) for peer in PEERS for place in range(31)}


def arrived(peer: str, place: int, at: float) -> Entry:
    known = ENTRIES[peer, place]
    received = known.received.model_copy(update={"timestamp": float(at)})
    return Entry(received=received, group=known.group, received_at=float(at))


@searching(150)
@given(ARRIVALS, st.integers(1, 9), st.floats(0.05, 1.0), st.integers(1, 90), st.randoms())
def test_the_bounds_hold_and_nothing_goes_without_need(
    arrivals: list[tuple[str, int, int]], most: int, share: float, age: int, shuffled: object
) -> None:
    limits = PoolConfig(max_groups=most, max_age_s=age, max_peer_share=share)
    entries = [arrived(*arrival) for arrival in arrivals]
    pool = filled(limits, *entries)
    counts = pool.evict(1000.0)
    kept = pool.entries()
    peers = Counter(entry.group.key for entry in kept)
    each = max(1, int(most * share + 1e-9))
    assert len(kept) <= most
    assert all(entry.age(1000.0) <= age for entry in kept)
    assert max(peers.values(), default=0) <= each
    assert len(kept) + sum(counts.values()) == len(entries)
    fresh = Counter(entry.group.key for entry in entries if entry.age(1000.0) <= age)
    assert len(kept) == min(most, sum(min(each, count) for count in fresh.values()))
    assert pool.evict(1000.0) == {}
    shuffled.shuffle(entries)  # type: ignore[attr-defined]
    other = filled(limits, *entries)
    other.evict(1000.0)
    assert {entry.group_id for entry in other.entries()} == {entry.group_id for entry in kept}


def test_what_age_took_is_described_by_length_and_task() -> None:
    gcd = Recipe.make("gcd", {}, seed=1)
    pool = filled(
        config(),
        make_entry(position=0, at=1.0, texts=("x" * 10, "x" * 30)),
        make_entry(position=1, at=1.0, texts=("x" * 40, "x" * 40), recipe=gcd),
        make_entry(position=2, at=1000.0, texts=("x", "xxx")),
    )
    pool.refuse(Refused("stale", "", make_group(position=3, texts=("x" * 60, "x" * 60), recipe=gcd)))
    pool.evict(1000.0)
    metrics = pool.metrics(1000.0)
    assert metrics["pool/evicted/age"] == 2
    assert metrics["pool/stale/chars"] == 40
    assert metrics["pool/stale/task/gcd"] == 2
    assert metrics["pool/stale/task/chain_sum"] == 1
    assert metrics["pool/chars"] == 2


def test_what_left_the_pool_is_known_when_it_comes_again() -> None:
    used = make_entry(position=1)
    pool = filled(config(), used)
    pool.remove([used.group_id, "unknown"])
    assert len(pool) == 0
    assert remembered(pool, used.group_id) == used.received.signed.content_sha256


def test_the_memory_of_what_left_is_bounded() -> None:
    pool = Pool(config(max_groups=1))
    for i in range(SEEN_PER_GROUP + 5):
        pool.add(make_entry(position=i))
        pool.evict(1000.0)
    assert len(pool.seen) <= SEEN_PER_GROUP


def test_the_journal_gives_back_the_same_pool() -> None:
    entries = [make_entry("a", position=0, at=5.0), make_entry("b", position=1, at=6.0, scores=[0.25, None])]
    rows = [entry.to_row() for entry in filled(config(), *entries).entries()]
    assert [row.group_id for row in rows] == [entry.group_id for entry in entries]
    back = Pool.restore(config(), rows)
    assert back.entries() == tuple(entries)
    assert remembered(back, entries[0].group_id) == entries[0].received.signed.content_sha256


def test_a_pool_that_was_restored_knows_and_evicts_what_it_would_have_without_the_restart() -> None:
    limits = config(max_groups=6, max_age_s=10_000)
    pool, met = Pool(limits), []
    for round in range(12):
        came = [make_entry(name, round=round, position=round, at=1000.0 + round) for name in PEERS]
        came += [make_entry("flooder", round=round, position=i, at=1000.0 + round) for i in range(4)]
        for entry in came:
            pool.add(entry)
        pool.evict(1000.0 + round)
        met += [
            pool.met(entry.group, entry.received.signed.content_sha256, entry.received.timestamp)
            for entry in came
        ]
    back = Pool.restore(limits, [entry.to_row() for entry in pool.entries()], met[-pool.memory :])
    copy = make_entry("other", recipe=came[0].group.recipe).group
    for one in (pool, back):
        assert len(one.seen) == len(met)
        assert remembered(one, met[0].group_id) == met[0].content_sha256
        twin = one.seen.alike(copy)
        assert twin is not None
        assert twin.group_id == came[0].group_id
        for i in range(5):
            one.add(make_entry(f"p{i}", round=20, position=i, at=1020.0))
            one.add(make_entry("flooder", round=20, position=i, at=1020.0))
        one.evict(1020.0)
    assert back.entries() == pool.entries()


# -- newcomers -------------------------------------------------------------------------------------------

KNOWN = frozenset(make_identity(name).key for name in ("k0", "k1"))
OPEN = Shares(newcomers=0.25, known=KNOWN.__contains__)


def crowded(strangers: int, each: int, known: int) -> Pool:
    """16 places, 4 of them for newcomers: many of those with `each` groups, k0 and k1 with `known` each."""
    pool = Pool(config(max_groups=16), OPEN)
    for i in range(known):
        pool.add(make_entry("k0", position=i, at=900.0 + i))
        pool.add(make_entry("k1", position=i, at=900.0 + i))
    for i in range(strangers):
        for j in range(each):
            pool.add(make_entry(f"s{i}", position=j, at=950.0 + j))
    return pool


def holders(pool: Pool) -> Counter[str]:
    return Counter(entry.group.node for entry in pool.entries())


def test_newcomers_take_no_more_than_their_share_from_known_authors_and_those_no_more_than_the_rest() -> None:
    pool = crowded(strangers=200, each=1, known=9)
    assert pool.evict(1000.0) == {"newcomers": 196, "number": 6}
    found = holders(pool)
    assert (found["k0"], found["k1"]) == (6, 6)
    quiet = crowded(strangers=1, each=1, known=8)
    assert quiet.evict(1000.0) == {"number": 1}
    assert holders(quiet)["s0"] == 1


def test_two_thousand_identities_are_dealt_places_like_any_other_newcomer() -> None:
    pool = Pool(config(max_groups=16, max_age_s=10_000), OPEN)
    rounds: Counter[str] = Counter()
    for turn in range(100):
        for i in range(20):  # one group each, and never again
            pool.add(make_entry(f"sybil{20 * turn + i}", at=1000.0 + turn))
        for i in range(8):
            pool.add(make_entry("honest", round=turn, position=i, at=1000.0 + turn))
            pool.add(make_entry("k0", round=turn, position=i, at=1000.0 + turn))
        pool.evict(1000.0 + turn)
        found = holders(pool)
        rounds.update(honest=found["honest"], known=found["k0"])
        assert sum(found.values()) - found["k0"] <= 4
    assert rounds["known"] == 100 * 12 - 4  # of the first round there are but eight
    assert rounds["honest"] > 0


def test_who_lied_is_a_newcomer_in_the_pool_at_once() -> None:
    known = set(KNOWN)
    pool = Pool(config(max_groups=16), replace(OPEN, known=lambda key: key in known))
    for i in range(8):
        pool.add(make_entry("k0", position=i, at=990.0 + i))
    assert pool.evict(1000.0) == {}
    known.clear()
    assert pool.evict(1000.0) == {"newcomers": 4}


def test_newcomers_found_sound_before_keep_half_of_the_newcomers_places() -> None:
    rising = make_identity("r0").key
    pool = Pool(config(max_groups=16), replace(OPEN, on_probation=lambda key: key == rising))
    for round in range(5):
        for i in range(3):
            pool.add(make_entry("r0", round, i, at=900.0 + round))
        for i in range(50):
            pool.add(make_entry(f"s{round}-{i}", round, i, at=900.0 + round))
        pool.evict(1000.0)
        assert holders(pool)["r0"] == 2
        assert len(pool) == 4


def test_a_large_group_takes_as_many_places_as_its_bytes_ask_for() -> None:
    long = ("x" * (2 * PLACE_BYTES), "y")
    pool = Pool(config(max_groups=8), replace(OPEN, author=0.5))
    for position in range(3):
        pool.add(make_entry("k0", position=position, at=900.0 + position, texts=long))
    for position in range(5):
        pool.add(make_entry("k1", position=position, at=900.0 + position))
    assert places_of(make_entry(texts=long).received) == 3
    assert pool.evict(1000.0) == {"peer_share": 3}
    assert holders(pool) == {"k0": 1, "k1": 4}
