"""What every bus promises. `check_bus` holds another one to it."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from sapo.bus.base import PASSED, Bus, Gap, Limits, Poll
from sapo.core.errors import Unavailable
from sapo.core.shares import Shares
from sapo.core.types import Received, SignedGroup
from sapo.peers.announcements import is_announcement, read
from sapo.peers.signing import unseal
from sapo.testing.samples import make_announcement, make_signed

EVERYTHING = Limits(max_bytes=10**9, max_groups=10**6)


class Service(Protocol):
    """A bus that clients connect to, without records at first."""

    lasting: bool
    """Whether records outlive the client that published them: a bus inside a process is gone with it."""

    @property
    def now(self) -> float:
        """The clock that stamps records, in seconds. One that cannot be set ignores what it is set to."""

    @now.setter
    def now(self, value: float) -> None: ...

    def connect(self) -> Bus:
        """Another client."""

    def trim(self, keep: int) -> None:
        """Delete all but the newest `keep` records of each partition, as retention does."""


def groups(count: int, author: str = "peer") -> list[SignedGroup]:
    return [make_signed(author, position=position) for position in range(count)]


def poll(bus: Bus, positions: Mapping[str, int], limits: Limits = EVERYTHING, seed: int = 0) -> Poll:
    return bus.poll(positions, limits, random.Random(seed))


def polls(bus: Bus, limits: Limits) -> Iterator[Poll]:
    """Everything, poll by poll."""
    positions: Mapping[str, int] = {}
    for seed in range(10_000):
        found = poll(bus, positions, limits, seed)
        if not found.received:
            return
        yield found
        positions = found.positions
    raise AssertionError("polling made no progress")


def place(received: Received) -> tuple[str, int]:
    partition, _, offset = received.bus_position.rpartition(":")
    return partition, int(offset)


def by_partition(received: Sequence[Received]) -> dict[str, list[Received]]:
    result: dict[str, list[Received]] = {}
    for one in received:
        result.setdefault(place(one)[0], []).append(one)
    return result


def ids(received: Sequence[Received]) -> set[str]:
    return {one.signed.group_id for one in received}


def an_empty_bus_returns_at_once_with_nothing(service: Service, bus: Bus) -> None:
    found = poll(bus, {})
    assert (found.received, found.gaps, found.malformed) == ((), (), ())
    assert poll(bus, found.positions).received == ()
    assert set(bus.end_positions().values()) == {0}


def publishing_nothing_is_harmless(service: Service, bus: Bus) -> None:
    bus.publish([])
    assert poll(bus, {}).received == ()


def what_is_published_arrives_byte_for_byte(service: Service, bus: Bus) -> None:
    sent = groups(20)
    bus.publish(sent)
    got = {one.signed.group_id: one.signed for one in poll(bus, {}).received}
    assert got == {one.group_id: one for one in sent}
    assert all(unseal(one).group_id == one.group_id for one in got.values())


def an_announcement_is_carried_as_groups_are(service: Service, bus: Bus) -> None:
    sent = make_announcement("peer")
    bus.publish([sent, *groups(3)])
    found = [one for one in poll(bus, {}).received if is_announcement(one)]
    assert [one.signed for one in found] == [sent]
    assert read(sent, "s").key == sent.key


def within_a_partition_records_come_in_the_order_they_were_published(service: Service, bus: Bus) -> None:
    sent = groups(30)
    bus.publish(sent[:11])
    bus.publish(sent[11:])
    order = {one.group_id: number for number, one in enumerate(sent)}
    for records in by_partition(poll(bus, {}).received).values():
        numbers = [order[one.signed.group_id] for one in records]
        assert numbers == sorted(numbers)


def offsets_are_contiguous_from_zero_and_end_at_the_end_positions(service: Service, bus: Bus) -> None:
    bus.publish(groups(30))
    records = by_partition(poll(bus, {}).received)
    for ones in records.values():
        assert [place(one)[1] for one in ones] == list(range(len(ones)))
    assert {p: len(ones) for p, ones in records.items()} == dict(bus.end_positions())


def the_bus_stamps_records_with_its_own_clock(service: Service, bus: Bus) -> None:
    service.now = 2000.0
    before = service.now
    bus.publish([make_signed(created_at=5.0)])
    (one,) = poll(bus, {}).received
    assert before - 0.001 <= one.timestamp <= service.now  # brokers count whole milliseconds


def time_stamps_never_go_back_in_a_partition(service: Service, bus: Bus) -> None:
    for number, now in enumerate([50.0, 10.0, 60.0, 59.0, 61.0] * 4):
        service.now = now
        bus.publish([make_signed(position=number)])
    records = by_partition(poll(bus, {}).received)
    assert sum(len(ones) for ones in records.values()) == 20
    for ones in records.values():
        stamps = [one.timestamp for one in ones]
        assert stamps == sorted(stamps)


def a_poll_goes_on_where_the_last_one_ended(service: Service, bus: Bus) -> None:
    bus.publish(groups(10))
    first = poll(bus, {})
    assert poll(bus, first.positions).received == ()
    late = make_signed(position=99)
    bus.publish([late])
    assert [one.signed for one in poll(bus, first.positions).received] == [late]


def polling_again_from_the_same_positions_gives_the_same(service: Service, bus: Bus) -> None:
    bus.publish(groups(10))
    assert poll(bus, {}) == poll(bus, {})


def positions_hold_across_a_restart(service: Service, bus: Bus) -> None:
    sent = groups(12)
    before = service.connect()
    before.publish(sent[:7])
    positions = poll(before, {}).positions
    if service.lasting:
        before.close()
    after = service.connect()
    after.publish(sent[7:])
    assert ids(poll(after, positions).received) == {one.group_id for one in sent[7:]}
    after.close()


def every_reader_reads_everything(service: Service, bus: Bus) -> None:
    bus.publish(groups(10))
    other = service.connect()
    assert ids(poll(bus, {}).received) == ids(poll(other, {}).received)
    assert len(ids(poll(other, {}).received)) == 10


def publishing_twice_is_harmless(service: Service, bus: Bus) -> None:
    sent = groups(5)
    bus.publish(sent)
    bus.publish(sent)
    got = poll(bus, {}).received
    assert {one.signed.canonical() for one in got} == {one.canonical() for one in sent}


def two_contents_under_one_id_both_arrive(service: Service, bus: Bus) -> None:
    """Telling them apart is the reader's task: one of them is equivocation."""
    one, other = make_signed(texts=("1", "2")), make_signed(texts=("1", "9"))
    assert one.group_id == other.group_id
    bus.publish([one])
    bus.publish([other])
    assert [r.signed.content_sha256 for r in poll(bus, {}).received] == [
        one.content_sha256,
        other.content_sha256,
    ]


def a_poll_keeps_to_its_byte_budget_and_still_gets_everything(service: Service, bus: Bus) -> None:
    sent = [make_signed(position=i, texts=("x" * (37 * i), "y")) for i in range(25)]
    bus.publish(sent)
    for budget in (1, 700, 5000, 20_000):
        got: list[Received] = []
        for found in polls(bus, Limits(max_bytes=budget)):
            size = sum(len(one.signed.payload) for one in found.received)
            assert size <= budget or len(found.received) == 1
            got += found.received
        assert len(got) == 25
        assert ids(got) == {one.group_id for one in sent}


def who_sends_more_bytes_than_its_share_holds_up_nobody(service: Service, bus: Bus) -> None:
    loud = [make_signed("loud", position=i, texts=("x" * 4000, f"{i}")) for i in range(40)]
    quiet = make_signed("quiet")
    bus.publish([*loud, quiet])
    for known, share in ((frozenset({quiet.key}), 10_000), (frozenset({quiet.key, loud[0].key}), 20_000)):
        shares = Shares(author=0.5, newcomers=0.25, known=known.__contains__)
        found = poll(bus, {}, Limits(max_bytes=40_000, shares=shares))
        assert quiet.group_id in ids(found.received)
        sizes = [len(one.signed.payload) for one in found.received if one.signed.key == loud[0].key]
        assert 0 < sum(sizes) <= share
        assert found.passed == len(loud) - len(sizes)
        assert poll(bus, found.positions, EVERYTHING).received == ()


def who_names_anothers_key_takes_nothing_of_its_share(service: Service, bus: Bus) -> None:
    mine = [make_signed("mine", position=i) for i in range(3)]
    forged = [
        make_signed("other", position=i, texts=("x" * 4000, f"{i}")).model_copy(update={"key": mine[0].key})
        for i in range(9)
    ]
    shares = Shares(author=0.5, newcomers=0.25, known=frozenset({mine[0].key}).__contains__)
    bus.publish([*forged[:6], *mine, *forged[6:]])
    limits = Limits(max_bytes=40_000, shares=shares, proven=lambda signed: signed not in forged)
    found = poll(bus, {}, limits)
    assert {one.group_id for one in mine} <= ids(found.received)
    assert found.passed > 0


def a_poll_passes_over_no_more_than_some_times_what_it_reads(service: Service, bus: Bus) -> None:
    bus.publish([make_signed("loud", position=i, texts=("x" * 4000, f"{i}")) for i in range(40)])
    shares = Shares(newcomers=0.25, known=lambda key: False)
    found = poll(bus, {}, Limits(max_bytes=8000, shares=shares))
    assert len(found.received) == 1
    assert found.passed * 4000 < PASSED * 8000
    assert poll(bus, found.positions, EVERYTHING).received


def a_poll_keeps_to_its_number_of_groups(service: Service, bus: Bus) -> None:
    bus.publish(groups(25))
    assert len(poll(bus, {}, Limits(max_groups=4)).received) == 4
    got = [one for found in polls(bus, Limits(max_groups=4)) for one in found.received]
    assert len(got) == len(ids(got)) == 25


def the_tail_window_skips_what_is_older_without_a_gap(service: Service, bus: Bus) -> None:
    bus.publish(groups(40))
    ends = bus.end_positions()
    found = poll(bus, {}, Limits(tail=3))
    assert found.gaps == ()
    assert {p: [place(one)[1] for one in ones] for p, ones in by_partition(found.received).items()} == {
        p: list(range(max(0, end - 3), end)) for p, end in ends.items() if end
    }
    assert dict(found.positions) == dict(ends)


def a_saved_position_inside_the_tail_window_is_kept(service: Service, bus: Bus) -> None:
    bus.publish(groups(40))
    saved = {p: max(0, end - 1) for p, end in bus.end_positions().items()}
    assert all(place(one)[1] >= saved[place(one)[0]] for one in poll(bus, saved, Limits(tail=3)).received)


def records_that_retention_took_are_reported_as_a_gap(service: Service, bus: Bus) -> None:
    bus.publish(groups(40))
    first = poll(bus, {}, Limits(max_groups=1))
    ends = bus.end_positions()
    service.trim(2)
    found = poll(bus, first.positions)
    lost = [Gap(p, first.positions[p], end - 2) for p, end in ends.items() if end - 2 > first.positions[p]]
    assert lost
    assert sorted(found.gaps, key=lambda gap: gap.partition) == lost
    assert dict(found.positions) == dict(ends)
    assert poll(bus, found.positions).gaps == ()


def what_the_tail_window_would_have_skipped_is_no_gap(service: Service, bus: Bus) -> None:
    bus.publish(groups(40))
    zero = dict.fromkeys(bus.end_positions(), 0)
    service.trim(2)
    assert poll(bus, zero, Limits(tail=2)).gaps == ()


def a_reader_without_a_position_begins_with_the_oldest_record(service: Service, bus: Bus) -> None:
    bus.publish(groups(40))
    service.trim(2)
    found = poll(bus, {})
    assert found.gaps == ()
    assert len(found.received) == 2 * len(bus.end_positions())


def offsets_go_on_after_everything_was_deleted(service: Service, bus: Bus) -> None:
    bus.publish(groups(10))
    ends = bus.end_positions()
    service.trim(0)
    assert poll(bus, ends).received == ()
    assert dict(bus.end_positions()) == dict(ends)
    bus.publish([make_signed(position=77)])
    (one,) = poll(bus, ends).received
    assert place(one)[1] == ends[place(one)[0]]


def the_positions_of_a_poll_cover_every_partition(service: Service, bus: Bus) -> None:
    """They replace the saved ones whole."""
    bus.publish(groups(40))
    found = poll(bus, {}, Limits(max_groups=1))
    assert found.positions.keys() == bus.end_positions().keys()


def readers_and_writers_in_threads_lose_nothing(service: Service, bus: Bus) -> None:
    sent = {author: groups(25, author) for author in ("a", "b", "c", "d")}
    shared = service.connect()

    def write(author: str) -> None:
        for one in sent[author]:
            shared.publish([one])

    def read(_: int) -> int:
        return len(poll(shared, {}).received)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, sent))
        list(threads.map(read, range(4)))
    got = poll(shared, {}).received
    assert len(got) == 100
    for author, ones in sent.items():
        order = {one.group_id: number for number, one in enumerate(ones)}
        for records in by_partition(got).values():
            numbers = [order[r.signed.group_id] for r in records if r.signed.group_id in order]
            assert numbers == sorted(numbers), author
    shared.close()


def a_closed_bus_is_unavailable_and_closes_twice(service: Service, bus: Bus) -> None:
    bus.close()
    bus.close()
    with pytest.raises(Unavailable, match="closed"):
        bus.publish(groups(1))
    with pytest.raises(Unavailable, match="closed"):
        poll(bus, {})


PROMISES: tuple[Callable[[Service, Bus], None], ...] = (
    who_names_anothers_key_takes_nothing_of_its_share,
    an_empty_bus_returns_at_once_with_nothing,
    publishing_nothing_is_harmless,
    what_is_published_arrives_byte_for_byte,
    an_announcement_is_carried_as_groups_are,
    within_a_partition_records_come_in_the_order_they_were_published,
    offsets_are_contiguous_from_zero_and_end_at_the_end_positions,
    the_bus_stamps_records_with_its_own_clock,
    time_stamps_never_go_back_in_a_partition,
    a_poll_goes_on_where_the_last_one_ended,
    polling_again_from_the_same_positions_gives_the_same,
    positions_hold_across_a_restart,
    every_reader_reads_everything,
    publishing_twice_is_harmless,
    two_contents_under_one_id_both_arrive,
    a_poll_keeps_to_its_byte_budget_and_still_gets_everything,
    who_sends_more_bytes_than_its_share_holds_up_nobody,
    a_poll_passes_over_no_more_than_some_times_what_it_reads,
    a_poll_keeps_to_its_number_of_groups,
    the_tail_window_skips_what_is_older_without_a_gap,
    a_saved_position_inside_the_tail_window_is_kept,
    records_that_retention_took_are_reported_as_a_gap,
    what_the_tail_window_would_have_skipped_is_no_gap,
    a_reader_without_a_position_begins_with_the_oldest_record,
    offsets_go_on_after_everything_was_deleted,
    the_positions_of_a_poll_cover_every_partition,
    readers_and_writers_in_threads_lose_nothing,
    a_closed_bus_is_unavailable_and_closes_twice,
)


def check_bus(open_service: Callable[[], Service]) -> None:
    """Hold a bus to what every bus promises; each promise gets a service, and a client, of its own. Raises
    `AssertionError` at the first that is not kept."""
    for promise in PROMISES:
        service = open_service()
        bus = service.connect()
        try:
            promise(service, bus)
        finally:
            bus.close()
