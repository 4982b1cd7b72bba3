"""Every bus keeps what `sapo.testing.bus` says all promise."""

import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sapo.bus.base import Bus, Limits
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.schema import KafkaBus as KafkaSection
from sapo.testing.bus import PROMISES, Service, check_bus, groups, place, poll

if TYPE_CHECKING:
    from infra.kafka.cluster import Cluster

Promise = Callable[[Service, Bus], None]


class MemoryService:
    lasting = False

    def __init__(self, partitions: int) -> None:
        self.now = 1000.0
        self._bus = MemoryBus(partitions, clock=lambda: self.now)

    def connect(self) -> Bus:
        return self._bus  # one process holds one

    def trim(self, keep: int) -> None:
        self._bus.trim(keep)


class SqliteService:
    lasting = True

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.path = folder / "bus.sqlite"

    def connect(self) -> SqliteBus:
        return SqliteBus(self.path, clock=lambda: self.now)

    def trim(self, keep: int) -> None:
        self.connect().trim(keep)


class KafkaService:
    """A topic of its own on a real broker, whose clock is the machine's."""

    lasting = True

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


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_every_bus_keeps_what_all_promise(promise: Promise, service: Service, bus: Bus) -> None:
    promise(service, bus)


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


def test_a_reader_that_dies_before_it_saves_its_position_reads_again(tmp_path: Path) -> None:
    bus = SqliteBus(tmp_path / "bus.sqlite")
    bus.publish(groups(5))
    saved = poll(bus, {}, Limits(max_groups=2)).positions
    lost = poll(bus, saved)  # read, and then the process dies
    bus.close()
    again = poll(SqliteBus(tmp_path / "bus.sqlite"), saved)
    assert again.received == lost.received
    assert len(again.received) == 3


class Forgetful(MemoryService):
    """A bus whose retention takes nothing."""

    def trim(self, keep: int) -> None:
        pass


def test_a_check_of_all_promises_finds_the_one_that_is_broken() -> None:
    check_bus(lambda: MemoryService(4))
    with pytest.raises(AssertionError):
        check_bus(lambda: Forgetful(1))
