"""What every bus promises. Each test runs over every implementation."""

import multiprocessing
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from makers import make_signed

from sapo.bus.base import PASSED, Bus, Gap, Limits, Poll
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.schema import KafkaBus as KafkaSection
from sapo.core.errors import Unavailable
from sapo.core.shares import Shares, nobody
from sapo.core.types import Received, SignedGroup
from sapo.peers.signing import unseal

if TYPE_CHECKING:
    from infra.kafka.cluster import Cluster

EVERYTHING = Limits(max_bytes=10**9, max_groups=10**6)


class Service(Protocol):
    """A running bus that clients connect to, and whose clock the test sets where it has one of its own."""

    @property
    def now(self) -> float: ...

    @now.setter
    def now(self, value: float) -> None: ...

    def connect(self) -> Bus: ...

    def trim(self, keep: int) -> None: ...


class MemoryService:
    def __init__(self, partitions: int) -> None:
        self.now = 1000.0
        self._bus = MemoryBus(partitions, clock=lambda: self.now)

    def connect(self) -> Bus:
        return self._bus  # one process holds one

    def trim(self, keep: int) -> None:
        self._bus.trim(keep)


class SqliteService:
    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.path = folder / "bus.sqlite"

    def connect(self) -> SqliteBus:
        return SqliteBus(self.path, clock=lambda: self.now)

    def trim(self, keep: int) -> None:
        self.connect().trim(keep)


class KafkaService:
    """A topic of its own on a real broker, whose clock is the machine's."""

    def __init__(self, cluster: "Cluster", partitions: int) -> None:
        self._cluster, self._topic, self._partitions = cluster, f"contract-{secrets.token_hex(4)}", partitions
        cluster.create_topic(self._topic, partitions=partitions)

    @property
    def now(self) -> float:
        return time.time()

    @now.setter
    def now(self, value: float) -> None:
        pass  # nobody can set it

    def connect(self) -> KafkaBus:
        return KafkaBus(KafkaSection.model_validate(self._cluster.bus(self._topic)), self._topic)

    def trim(self, keep: int) -> None:
        from kafka import TopicPartition
        from kafka.admin import KafkaAdminClient

        bus = self.connect()
        ends = {int(name.rpartition("-")[2]): end for name, end in bus.end_positions().items()}
        bus.close()
        admin = KafkaAdminClient(bootstrap_servers=self._cluster.servers.split(","))
        admin.delete_records({TopicPartition(self._topic, n): max(0, end - keep) for n, end in ends.items()})
        admin.close()


Get = Callable[[str], "Cluster"]
SERVICES: dict[str, Callable[[Path, Get], Service]] = {
    "sqlite": lambda folder, _: SqliteService(folder),
    "memory": lambda _, __: MemoryService(1),
    "memory with 4 partitions": lambda _, __: MemoryService(4),
    "kafka": lambda _, get: KafkaService(get("kafka"), 1),
    "kafka with 4 partitions": lambda _, get: KafkaService(get("kafka"), 4),
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.kafka] if name.startswith("kafka") else []) for name in SERVICES
    ]
)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Service:
    return SERVICES[request.param](tmp_path, request.getfixturevalue)


@pytest.fixture
def bus(service: Service) -> Iterator[Bus]:
    bus = service.connect()
    yield bus
    bus.close()


def groups(count: int, author: str = "peer") -> list[SignedGroup]:
    return [make_signed(author, position=position) for position in range(count)]


def poll(bus: Bus, positions: Mapping[str, int], limits: Limits = EVERYTHING, seed: int = 0) -> Poll:
    return bus.poll(positions, limits, random.Random(seed))


def drain(bus: Bus, limits: Limits, positions: Mapping[str, int] | None = None) -> list[Received]:
    """Everything, poll by poll."""
    received: list[Received] = []
    positions = positions or {}
    for seed in range(10_000):
        found = poll(bus, positions, limits, seed)
        if not found.received:
            return received
        received += found.received
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


class TestBus:
    def test_an_empty_bus_returns_at_once_with_nothing(self, bus: Bus) -> None:
        found = poll(bus, {})
        assert (found.received, found.gaps, found.malformed) == ((), (), ())
        assert poll(bus, found.positions).received == ()
        assert set(bus.end_positions().values()) == {0}

    def test_publishing_nothing_is_harmless(self, bus: Bus) -> None:
        bus.publish([])
        assert poll(bus, {}).received == ()

    def test_what_is_published_arrives_byte_for_byte(self, bus: Bus) -> None:
        sent = groups(20)
        bus.publish(sent)
        got = {one.signed.group_id: one.signed for one in poll(bus, {}).received}
        assert got == {one.group_id: one for one in sent}
        assert all(unseal(one).group_id == one.group_id for one in got.values())

    def test_within_a_partition_records_come_in_the_order_they_were_published(self, bus: Bus) -> None:
        sent = groups(30)
        bus.publish(sent[:11])
        bus.publish(sent[11:])
        order = {one.group_id: number for number, one in enumerate(sent)}
        for records in by_partition(poll(bus, {}).received).values():
            numbers = [order[one.signed.group_id] for one in records]
            assert numbers == sorted(numbers)

    def test_offsets_are_contiguous_from_zero_and_end_at_the_end_positions(self, bus: Bus) -> None:
        bus.publish(groups(30))
        records = by_partition(poll(bus, {}).received)
        for ones in records.values():
            assert [place(one)[1] for one in ones] == list(range(len(ones)))
        assert {p: len(ones) for p, ones in records.items()} == dict(bus.end_positions())

    def test_the_bus_stamps_records_with_its_own_clock(self, service: Service, bus: Bus) -> None:
        service.now = 2000.0
        before = service.now
        bus.publish([make_signed(created_at=5.0)])
        (one,) = poll(bus, {}).received
        assert before - 0.001 <= one.timestamp <= service.now  # brokers count whole milliseconds

    def test_time_stamps_never_go_back_in_a_partition(self, service: Service, bus: Bus) -> None:
        for number, now in enumerate([50.0, 10.0, 60.0, 59.0, 61.0] * 4):
            service.now = now
            bus.publish([make_signed(position=number)])
        records = by_partition(poll(bus, {}).received)
        assert sum(len(ones) for ones in records.values()) == 20
        for ones in records.values():
            stamps = [one.timestamp for one in ones]
            assert stamps == sorted(stamps)

    def test_a_poll_goes_on_where_the_last_one_ended(self, bus: Bus) -> None:
        bus.publish(groups(10))
        first = poll(bus, {})
        assert poll(bus, first.positions).received == ()
        late = make_signed(position=99)
        bus.publish([late])
        assert [one.signed for one in poll(bus, first.positions).received] == [late]

    def test_polling_again_from_the_same_positions_gives_the_same(self, bus: Bus) -> None:
        bus.publish(groups(10))
        assert poll(bus, {}) == poll(bus, {})

    def test_positions_hold_across_a_restart(self, service: Service) -> None:
        sent = groups(12)
        before = service.connect()
        before.publish(sent[:7])
        positions = poll(before, {}).positions
        if not isinstance(before, MemoryBus):  # which is gone with its process
            before.close()
        after = service.connect()
        after.publish(sent[7:])
        assert ids(poll(after, positions).received) == {one.group_id for one in sent[7:]}
        after.close()

    def test_every_reader_reads_everything(self, service: Service, bus: Bus) -> None:
        bus.publish(groups(10))
        other = service.connect()
        assert ids(poll(bus, {}).received) == ids(poll(other, {}).received)
        assert len(ids(poll(other, {}).received)) == 10

    def test_publishing_twice_is_harmless(self, bus: Bus) -> None:
        sent = groups(5)
        bus.publish(sent)
        bus.publish(sent)
        got = poll(bus, {}).received
        assert {one.signed.canonical() for one in got} == {one.canonical() for one in sent}

    def test_two_contents_under_one_id_both_arrive(self, bus: Bus) -> None:
        """Telling them apart is the reader's task: one of them is equivocation."""
        one, other = make_signed(texts=("1", "2")), make_signed(texts=("1", "9"))
        assert one.group_id == other.group_id
        bus.publish([one])
        bus.publish([other])
        assert [r.signed.content_sha256 for r in poll(bus, {}).received] == [
            one.content_sha256,
            other.content_sha256,
        ]

    @pytest.mark.parametrize("budget", [1, 700, 5000, 20_000])
    def test_a_poll_keeps_to_its_byte_budget_and_still_gets_everything(self, bus: Bus, budget: int) -> None:
        sent = [make_signed(position=i, texts=("x" * (37 * i), "y")) for i in range(25)]
        bus.publish(sent)
        positions: Mapping[str, int] = {}
        got: list[Received] = []
        while found := poll(bus, positions, Limits(max_bytes=budget), len(got)):
            if not found.received:
                break
            size = sum(len(one.signed.payload) for one in found.received)
            assert size <= budget or len(found.received) == 1
            got += found.received
            positions = found.positions
        assert len(got) == 25
        assert ids(got) == {one.group_id for one in sent}

    def test_who_sends_more_bytes_than_its_share_holds_up_nobody(self, bus: Bus) -> None:
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

    def test_a_poll_passes_over_no_more_than_some_times_what_it_reads(self, bus: Bus) -> None:
        bus.publish([make_signed("loud", position=i, texts=("x" * 4000, f"{i}")) for i in range(40)])
        shares = Shares(newcomers=0.25, known=nobody)
        found = poll(bus, {}, Limits(max_bytes=8000, shares=shares))
        assert len(found.received) == 1
        assert found.passed * 4000 < PASSED * 8000
        assert poll(bus, found.positions, EVERYTHING).received

    def test_a_poll_keeps_to_its_number_of_groups(self, bus: Bus) -> None:
        bus.publish(groups(25))
        assert len(poll(bus, {}, Limits(max_groups=4)).received) == 4
        got = drain(bus, Limits(max_groups=4))
        assert len(got) == len(ids(got)) == 25

    def test_the_tail_window_skips_what_is_older_without_a_gap(self, bus: Bus) -> None:
        bus.publish(groups(40))
        ends = bus.end_positions()
        found = poll(bus, {}, Limits(tail=3))
        assert found.gaps == ()
        assert {p: [place(one)[1] for one in ones] for p, ones in by_partition(found.received).items()} == {
            p: list(range(max(0, end - 3), end)) for p, end in ends.items() if end
        }
        assert dict(found.positions) == dict(ends)

    def test_a_saved_position_inside_the_tail_window_is_kept(self, bus: Bus) -> None:
        bus.publish(groups(40))
        saved = {p: max(0, end - 1) for p, end in bus.end_positions().items()}
        assert all(place(one)[1] >= saved[place(one)[0]] for one in poll(bus, saved, Limits(tail=3)).received)

    def test_records_that_retention_took_are_reported_as_a_gap(self, service: Service, bus: Bus) -> None:
        bus.publish(groups(40))
        first = poll(bus, {}, Limits(max_groups=1))
        ends = bus.end_positions()
        service.trim(2)
        found = poll(bus, first.positions)
        lost = [
            Gap(p, first.positions[p], end - 2) for p, end in ends.items() if end - 2 > first.positions[p]
        ]
        assert lost
        assert sorted(found.gaps, key=lambda gap: gap.partition) == lost
        assert dict(found.positions) == dict(ends)
        assert poll(bus, found.positions).gaps == ()

    def test_what_the_tail_window_would_have_skipped_is_no_gap(self, service: Service, bus: Bus) -> None:
        bus.publish(groups(40))
        zero = dict.fromkeys(bus.end_positions(), 0)
        service.trim(2)
        assert poll(bus, zero, Limits(tail=2)).gaps == ()

    def test_a_reader_without_a_position_begins_with_the_oldest_record(
        self, service: Service, bus: Bus
    ) -> None:
        bus.publish(groups(40))
        service.trim(2)
        found = poll(bus, {})
        assert found.gaps == ()
        assert len(found.received) == 2 * len(bus.end_positions())

    def test_offsets_go_on_after_everything_was_deleted(self, service: Service, bus: Bus) -> None:
        bus.publish(groups(10))
        ends = bus.end_positions()
        service.trim(0)
        assert poll(bus, ends).received == ()
        assert dict(bus.end_positions()) == dict(ends)
        bus.publish([make_signed(position=77)])
        (one,) = poll(bus, ends).received
        assert place(one)[1] == ends[place(one)[0]]

    def test_the_positions_of_a_poll_cover_every_partition(self, bus: Bus) -> None:
        """They replace the saved ones whole."""
        bus.publish(groups(40))
        found = poll(bus, {}, Limits(max_groups=1))
        assert found.positions.keys() == bus.end_positions().keys()

    def test_readers_and_writers_in_threads_lose_nothing(self, service: Service) -> None:
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

    def test_a_closed_bus_is_unavailable_and_closes_twice(self, bus: Bus) -> None:
        bus.close()
        bus.close()
        with pytest.raises(Unavailable, match="closed"):
            bus.publish(groups(1))
        with pytest.raises(Unavailable, match="closed"):
            poll(bus, {})


def publish_in_process(path: Path, author: str, count: int, barrier: object) -> None:
    """Runs in a process of its own: publishes in batches of one to three."""
    bus = SqliteBus(path)
    ones = groups(count, author)
    barrier.wait()  # type: ignore[attr-defined]
    while ones:
        size = 1 + len(ones) % 3
        bus.publish(ones[:size])
        ones = ones[size:]
    bus.close()


def test_processes_that_publish_at_once_create_one_bus_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    authors = ["a", "b", "c"]
    processes = [
        context.Process(target=publish_in_process, args=(path, author, 40, barrier)) for author in authors
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    bus = SqliteBus(path)
    got = poll(bus, {}).received
    assert [place(one)[1] for one in got] == list(range(120))
    stamps = [one.timestamp for one in got]
    assert stamps == sorted(stamps)
    for author in authors:
        expected = [one.group_id for one in groups(40, author)]
        assert [one.signed.group_id for one in got if one.signed.group_id in set(expected)] == expected
    bus.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["bus.sqlite"]


def test_partitions_are_visited_in_random_order(tmp_path: Path) -> None:
    bus = MemoryBus(4)
    bus.publish(groups(60))
    first = {poll(bus, {}, Limits(max_groups=1), seed).received[0].bus_position for seed in range(50)}
    assert first == {"0:0", "1:0", "2:0", "3:0"}


def test_trap_40_a_reader_that_dies_before_it_saves_its_position_reads_again(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish(groups(5))
    saved = poll(bus, {}, Limits(max_groups=2)).positions
    lost = poll(bus, saved)  # read, and then the process dies
    bus.close()
    again = poll(SqliteBus(tmp_path / "bus.sqlite"), saved)
    assert again.received == lost.received
    assert len(again.received) == 3
