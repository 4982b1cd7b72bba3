"""Who is known, whose records are looked at, and whose groups are verified: fair shares of a node's time."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import make_identity, make_received, make_signed
from scipy.stats import chisquare

from sapo.bus.base import Positions
from sapo.bus.memory import MemoryBus
from sapo.core.config.load import PoolConfig
from sapo.core.types import Group, Received, SignedGroup
from sapo.peers import quotas
from sapo.peers.pool import Entry, Verdict
from sapo.peers.quotas import CREDIT_S, FLOOR_S, LOOKS, PASSING, Quotas
from sapo.store.journal.rows import PeerRow


def config(**changes: float) -> PoolConfig:
    shares = {"max_peer_share": 0.5, "newcomer_share": 0.25, "verify_share": 0.5}
    values = {"max_groups": 16, "newcomer_groups": 3, **shares}
    return PoolConfig.model_validate(values | changes)


def sound(known: Quotas, key: str, count: int, seconds: float = 0.0) -> None:
    for _ in range(count):
        known.judged(key, seconds, True)


def with_known(*keys: str, **changes: float) -> Quotas:
    return Quotas(config(**changes), keys)


# -- standing --------------------------------------------------------------------------------------------


def test_an_author_is_known_once_enough_groups_were_found_sound() -> None:
    known = Quotas(config())
    for _ in range(2):
        known.judged("a", 0.0, True)
        known.judged("a", 0.0, False)
    assert not known.known("a")
    known.judged("a", 0.0, True)
    assert known.known("a")
    assert known.known_keys() == {"a"}


def test_newcomers_pay_in_full_for_being_learned_from_once_anybody_is_known() -> None:
    known = Quotas(config())
    assert not known.pays_in_full("a")
    sound(known, "b", 3)
    assert (known.pays_in_full("a"), known.pays_in_full("b")) == (True, False)
    assert known.may_teach("a")
    known.charge("c", CREDIT_S / 2)
    assert (known.may_teach("a"), known.may_teach("b")) == (False, True)
    assert not Quotas(config(), rows=known.changed(), timed=False).pays_in_full("a")


def test_members_are_known_from_the_start() -> None:
    assert with_known("a").known("a")
    assert with_known("a").known_keys() == {"a"}


@pytest.mark.parametrize("known", [with_known("a"), Quotas(config())])
def test_a_proven_lie_makes_a_newcomer_who_takes_nine_times_as_long_to_become_known(known: Quotas) -> None:
    sound(known, "a", 3)
    known.fault("a", "question_mismatch")
    assert not known.known("a")
    sound(known, "a", 9 * 3 - 1)
    assert not known.known("a")
    sound(known, "a", 1)
    assert known.known("a")


def test_newcomers_come_and_go_in_bounded_memory_and_push_out_nobody_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MEMORY", 8)
    known = Quotas(config())
    sound(known, "old", 3)
    sound(known, "back", 2)
    for i in range(20):
        known.judged(f"s{i}", 0.001, True)
        known.judged("back", 0.001, False)
    assert known.known("old")
    sound(known, "back", 1)
    assert known.known("back")
    assert known.metrics()["peers/newcomers"] == 7
    assert len(known.changed()) == 10  # nine authors and the newcomers' common account
    assert known.gone() == [f"s{i}" for i in range(13)]
    assert known.gone() == known.changed() == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("judged"), st.sampled_from("abcdef"), st.floats(0, 3), st.booleans()),
        st.tuples(st.just("fault"), st.sampled_from("abcdef")),
        st.tuples(st.just("earn"), st.floats(0, 20)),
    ),
    max_size=40,
)


def play(known: Quotas, steps: Sequence[tuple[object, ...]]) -> None:
    for name, *values in steps:
        if name == "judged":
            key, seconds, is_sound = values
            known.judged(str(key), float(str(seconds)), bool(is_sound))
        elif name == "fault":
            known.fault(str(values[0]), "equivocation")
        else:
            known.earn(float(str(values[0])))


@given(STEPS, STEPS)
def test_what_the_journal_kept_goes_on_like_what_was_never_stopped(
    before: list[tuple[object, ...]], after: list[tuple[object, ...]]
) -> None:
    whole = Quotas(config(), ["a"])
    kept: dict[str, PeerRow] = {}
    for step in before:
        play(whole, [step])
        kept |= {row.key: row for row in whole.changed()}
        for key in whole.gone():
            del kept[key]
    back = Quotas(config(), ["a"], kept.values())
    play(whole, after)
    play(back, after)
    assert whole.changed() == back.changed()
    assert whole.known_keys() == back.known_keys()
    assert [whole.may_verify(key) for key in "abcdefg"] == [back.may_verify(key) for key in "abcdefg"]


# -- what is looked at -----------------------------------------------------------------------------------

K0, K1 = (make_identity(name).key for name in ("k0", "k1"))


def forged(received: Received) -> Received:
    signed = received.signed.model_copy(update={"signature": "00" * 64})
    return received.model_copy(update={"signed": signed})


def entry_of(received: Received) -> Entry:
    return Entry(received, Group.model_validate_json(received.signed.payload), 0.0)


def really(received: Received) -> Entry | None:
    """Admits what is not forged."""
    return None if received.signed.signature == "00" * 64 else entry_of(received)


def of(name: str, count: int) -> list[Received]:
    return [make_received(name, position=i) for i in range(count)]


def names(came: Sequence[Entry]) -> Counter[str]:
    known = {make_identity(name).key: name for name in ("k0", "k1", "s0", "s1", "s2", "s3", "loud")}
    return Counter(known.get(one.group.key, "other") for one in came)


def test_where_all_have_room_the_order_of_the_bus_stays() -> None:
    records = [*of("k0", 8), *of("s0", 4), *of("k1", 8)]
    came, rest = with_known(K0, K1).screen(records, random.Random(0), really)
    assert ([one.received for one in came], rest) == (records, [])


def test_who_forges_a_known_key_takes_none_of_its_room() -> None:
    records = [*(forged(make_received("k0", position=i)) for i in range(100)), *of("k0", 6), *of("k1", 6)]
    came, _ = with_known(K0, K1).screen(records, random.Random(0), really)
    assert names(came) == {"k0": 6, "k1": 6}


def test_a_flood_of_forgeries_costs_no_more_looks_than_a_round_has() -> None:
    records = [forged(one) for one in of("k0", 600) + of("s0", 600)]
    for name in ("k1", "s1"):
        records += of(name, 2)
    known = with_known(K0, K1, max_groups=8)
    came, _ = known.screen(records, random.Random(0), really)
    assert names(came) == {"k1": 2, "s1": 2}
    assert known.metrics()["peers/looked"] <= (1 + 0.25) * LOOKS * 8 < len(records)


def test_who_forges_a_known_key_takes_none_of_its_looks() -> None:
    records = [*[forged(make_received("k0"))] * (14 * LOOKS), *of("k0", 4), *of("k1", 4)]
    came, _ = with_known(K0, K1, max_peer_share=0.25).screen(records, random.Random(0), really)
    assert names(came) == {"k0": 4, "k1": 4}


@pytest.mark.parametrize(("author", "looked"), [(None, 4), ("s0", 3), ("spent", 4), ("k0", 4)])
def test_newcomers_groups_that_wait_in_the_pool_have_their_places_while_they_can_be_verified(
    author: str | None, looked: int
) -> None:
    known = with_known(K0)
    known.charge(make_identity("spent").key, 0.4)
    one = None if author is None else make_received(author)
    waiting = [entry_of(one)] if one is not None else []
    arrived = [one for name in ("s0", "s1", "s2", "s3") for one in of(name, 4)]
    came, _ = known.screen(arrived, random.Random(0), really, waiting=waiting)
    assert len(came) == looked


def test_looks_at_newcomers_end_when_half_of_their_time_is_spent() -> None:
    known = with_known(K0)

    def look(received: Received) -> Entry:
        known.charge(received.signed.key, 0.1)
        return entry_of(received)

    records = [*of("s0", 1), *of("s1", 1), *of("s2", 1), *of("s3", 1), *of("k0", 3)]
    came, rest = known.screen(records, random.Random(0), look)
    assert names(came)["k0"] == 3
    assert len(came) - 3 == CREDIT_S / 2 // 0.1 + 1 == 3
    assert len(rest) == 1
    assert left(known) > 0


def test_of_records_that_do_not_stay_four_take_a_place() -> None:
    records = [make_received(f"s{i}", position=j) for i in range(60) for j in range(2)]
    useless = Verdict(reason="uninformative")
    came, _ = with_known(K0).screen(
        records, random.Random(0), lambda one: replace(entry_of(one), verdict=useless)
    )
    places = len(with_known(K0).screen(records, random.Random(0), really)[0])
    assert len(came) == PASSING * (places - 1) + 1, "the last needs room for one that stays"


def test_newcomers_who_are_too_many_have_equal_chances_wherever_they_stand_on_the_bus() -> None:
    records = [make_received(f"s{i}", position=j) for i in range(12) for j in range(1 + 5 * (i == 3))]
    counts: Counter[str] = Counter()
    for seed in range(600):
        came, _ = Quotas(config()).screen(records, random.Random(seed), really)
        assert len(came) == 4
        counts.update({one.group.key for one in came})
    assert chisquare(list(counts.values())).pvalue > 0.001
    assert len(counts) == 12


FLOOD = [make_signed("other", position=i, texts=("x" * 4000, f"{i}")) for i in range(20)]
REAL = [make_signed("k0", position=i) for i in range(3)]
SENT_AGAIN = [make_signed("k0", position=9 + i, texts=("x" * 4000, f"{i}")) for i in range(20)]


@pytest.mark.parametrize(
    "flood",
    [
        [one.model_copy(update={"key": K0}) for one in FLOOD],
        [one.model_copy(update={"key": K0, "signature": "0" * 128}) for one in FLOOD],
        SENT_AGAIN,
    ],
)
def test_what_others_send_in_a_known_name_uses_up_none_of_its_part_of_a_poll(
    flood: Sequence[SignedGroup],
) -> None:
    bus, held = MemoryBus(), {one.content_sha256 for one in SENT_AGAIN}
    bus.publish([*flood, *REAL])
    limits = with_known(K0, poll_bytes=40_000).limits(held.__contains__)
    read: set[str] = set()
    at: Positions = {}
    while at != bus.end_positions():
        found = bus.poll(at, limits, random.Random(0))
        read |= {one.signed.group_id for one in found.received}
        at = found.positions
    assert {one.group_id for one in REAL} <= read, "what is passed over is never read again"


def test_newcomers_signatures_are_not_checked_where_their_part_of_a_poll_is_used_up() -> None:
    bus, asked = MemoryBus(), list[str]()
    bus.publish([*(make_signed(f"s{i}", texts=("x" * 4000, f"{i}")) for i in range(20)), *FLOOD, *REAL])

    def proven(signed: SignedGroup) -> bool:
        asked.append(signed.key)
        return True

    limits = replace(with_known(K0, poll_bytes=40_000).limits(), proven=proven)
    found = bus.poll({}, limits, random.Random(0))
    assert {one.group_id for one in REAL} <= {one.signed.group_id for one in found.received}
    assert found.passed > 30
    assert not asked


def left(known: Quotas) -> float:
    """Seconds that newcomers together have left."""
    return known.metrics()["peers/credit/newcomers"]


# -- verification time -----------------------------------------------------------------------------------


def balances(known: Quotas) -> dict[str, float]:
    return {row.key: row.balance_s for row in known.changed()}


def test_what_one_does_not_need_flows_to_the_others() -> None:
    known = with_known("a", "b", "c")
    for key, debt in (("a", 9.0), ("b", 9.0), ("c", 0.0)):
        known.judged(key, debt, True)
    before = balances(known)
    known.earn(1.2)  # 0.6 s: the newcomers' account is full, so all of it is for these three
    first = balances(known)
    assert [first[key] - before[key] for key in "abc"] == pytest.approx([0.6 / 3] * 3)
    for _ in range(3):
        known.earn(1.2)
    full = balances(known)
    known.earn(1.2)
    last = balances(known)
    assert "c" not in last
    assert [last[key] - full[key] for key in "ab"] == pytest.approx([0.3] * 2)


def test_no_known_author_gets_more_than_their_share_of_what_is_earned() -> None:
    known = with_known("a")
    known.judged("a", 100.0, True)
    before = balances(known)["a"]
    for _ in range(10):
        known.earn(1.2)
    assert balances(known)["a"] - before == pytest.approx(10 * 0.3)


def test_a_clock_that_stands_still_earns_a_little() -> None:
    known = Quotas(config())
    known.judged("a", CREDIT_S + FLOOR_S / 8, False)
    assert not known.may_verify("b")
    known.earn(0.0)
    assert known.may_verify("b")


def test_of_a_known_author_one_group_is_verified_at_a_time() -> None:
    known = with_known("a", "b")
    assert known.may_verify("a", ["b"])
    assert not known.may_verify("a", ["b", "a"])
    assert Quotas(config(), ["a"], timed=False).may_verify("a", ["a"])


ROUNDS = st.lists(
    st.tuples(st.floats(0, 20), st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3)), max_size=12)),
    min_size=1,
    max_size=30,
)


@given(ROUNDS)
def test_newcomers_never_spend_more_than_their_share_a_credit_and_one_group(
    rounds: list[tuple[float, list[tuple[int, float]]]],
) -> None:
    """Whoever asks, in whatever order, with as many names as they like: the bound of the module."""
    known = Quotas(config(newcomer_groups=10_000))
    earned = spent = last = 0.0
    for own, groups in rounds:
        earned += max(FLOOR_S, known.config.verify_share * own)
        known.earn(own)
        for name, cost in groups:
            if known.may_verify(f"s{name}"):
                known.judged(f"s{name}", cost, True)
                spent, last = spent + cost, cost
    assert spent <= known.config.newcomer_share * earned + CREDIT_S + last + 1e-6


@given(ROUNDS, st.lists(st.floats(0, 1), min_size=30, max_size=30))
def test_no_known_author_waits_because_of_what_others_spend(
    rounds: list[tuple[float, list[tuple[int, float]]]], shares: list[float]
) -> None:
    """`honest` spends up to an even share of what known authors get, three more known ones what they can."""
    known = with_known("honest", "k0", "k1", "k2")
    for key in ("honest", "k0", "k1", "k2"):
        known.judged(key, 0.0, True)
    for (own, groups), share in zip(rounds, shares, strict=False):
        known.earn(own)
        for name, cost in groups:
            key = f"k{name}" if name < 3 else f"s{name}"
            if known.may_verify(key):
                known.judged(key, cost, True)
        assert known.may_verify("honest")
        earned = max(FLOOR_S, known.config.verify_share * own)
        even = (1 - known.config.newcomer_share) * earned / (4 + len(known.known_keys() - {"honest"}))
        known.judged("honest", min(0.5, share * even), True)


@given(ROUNDS)
def test_what_is_spent_in_all_stays_within_what_is_earned(
    rounds: list[tuple[float, list[tuple[int, float]]]],
) -> None:
    known = with_known(*(f"s{i}" for i in range(15)), newcomer_groups=10_000)
    earned = spent = 0.0
    debts: dict[str, float] = {}
    for own, groups in rounds:
        earned += max(FLOOR_S, known.config.verify_share * own)
        known.earn(own)
        for name, cost in groups:
            if known.may_verify(f"s{name}"):
                known.judged(f"s{name}", cost, True)
                spent += cost
                debts[f"s{name}" if name < 15 else ""] = cost
    begun = CREDIT_S + 15 * known.config.max_peer_share * CREDIT_S
    assert spent <= earned + begun + sum(debts.values()) + 1e-6


def test_a_proven_lie_ends_the_rise() -> None:
    known = Quotas(config())
    sound(known, "a", 1)
    known.fault("a", "question_mismatch")
    assert not known.on_probation("a")
