"""How fast a bus is beside the bare thing under it, and how much of a topic a node reads."""

import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from bus_authors import Author, Completions
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from sapo.bus.base import Bus, Limits, Positions
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.kafka.producer import cut, spread
from sapo.core.config.load import PoolConfig
from sapo.core.config.schema import KafkaBus as KafkaSection
from sapo.core.errors import Unavailable
from sapo.core.rng import rng
from sapo.core.types import SignedGroup
from sapo.peers.quotas import Quotas

CALL = 8
"""Groups one publish call takes: what a node of preset starter makes in a round."""
WAIT_S = 30.0
"""How long anything here may take before it is an error."""


class Wire(Protocol):
    """What is measured: payloads go in and come out."""

    def put(self, groups: Sequence[SignedGroup]) -> None:
        """Store groups durably."""

    def take(self) -> int:
        """How many groups came since the last call, read and parsed as far as this wire does; may be 0."""


Opener = Callable[[], AbstractContextManager[Wire]]
"""Opens a wire on fresh storage, closed at the end."""


class OurWire:
    """A bus, polled as a node polls it."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._rng = bus, random.Random(0)
        self._positions: Positions = {}
        self.put = bus.publish

    def take(self) -> int:
        """One poll."""
        poll = self._bus.poll(self._positions, Limits(), self._rng)
        self._positions = poll.positions
        return len(poll.received)


class BareList:
    """The baseline of the memory bus: a list."""

    def __init__(self) -> None:
        self._log: list[bytes] = []
        self._read = 0

    def put(self, groups: Sequence[SignedGroup]) -> None:
        """Append the payloads."""
        self._log.extend(group.payload for group in groups)

    def take(self) -> int:
        """Slice off what is new."""
        new = self._log[self._read : self._read + Limits().max_groups]
        self._read += len(new)
        return len(new)


class BareSqlite:
    """The baseline of the embedded bus: a table of blobs, WAL, `synchronous=FULL`, a transaction a call."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("CREATE TABLE log (offset INTEGER PRIMARY KEY, payload BLOB NOT NULL)")
        self._read = 0
        self.close = self._db.close

    def put(self, groups: Sequence[SignedGroup]) -> None:
        """Insert the payloads."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO log (payload) VALUES (?)", [(group.payload,) for group in groups])
        self._db.execute("COMMIT")

    def take(self) -> int:
        """Select what is new."""
        sql = "SELECT offset, payload FROM log WHERE offset > ? ORDER BY offset LIMIT ?"
        rows = self._db.execute(sql, (self._read, Limits().max_groups)).fetchall()
        self._read = rows[-1][0] if rows else self._read
        return len(rows)


class BareKafka:
    """The baseline of the Kafka bus: kafka-python's own producer and consumer, the same bytes and codec.

    As safe as ours: idempotent, `acks=all`, and a call returns when all its messages are acknowledged.
    """

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self._topic = topic
        self._producer: Any = KafkaProducer(
            bootstrap_servers=servers, acks="all", enable_idempotence=True, compression_type="zstd"
        )
        self._consumer: Any = KafkaConsumer(bootstrap_servers=servers, max_poll_records=Limits().max_groups)
        self._consumer.assign([TopicPartition(topic, number) for number in range(partitions)])
        self._consumer.seek_to_beginning()

    def put(self, groups: Sequence[SignedGroup]) -> None:
        """Send and wait for every acknowledgement."""
        sent = [
            self._producer.send(self._topic, value=group.payload, key=group.group_id.encode())
            for group in groups
        ]
        self._producer.flush()
        for future in sent:
            future.get(timeout=WAIT_S)

    def take(self) -> int:
        """One poll of the consumer."""
        return sum(len(records) for records in self._consumer.poll(timeout_ms=20).values())

    def close(self) -> None:
        """Close both."""
        self._producer.close()
        self._consumer.close()


@contextmanager
def sqlite_wire(path: Path) -> Iterator[Wire]:
    """`BareSqlite`, closed at the end."""
    with closing(BareSqlite(path)) as wire:
        yield wire


@contextmanager
def kafka_wire(servers: str, topic: str, partitions: int) -> Iterator[Wire]:
    """`BareKafka`, closed at the end."""
    with closing(BareKafka(servers, topic, partitions)) as wire:
        yield wire


@contextmanager
def our_wire(bus: Bus) -> Iterator[Wire]:
    """`OurWire`, its bus closed at the end."""
    with closing(bus):
        yield OurWire(bus)


def speeds(wire: Wire, groups: Sequence[SignedGroup]) -> tuple[float, float]:
    """Groups a second published in calls of `CALL`, then groups a second read, after one call as warm-up."""
    wire.put(groups[:CALL])
    wait_for(wire, CALL)
    begun = time.perf_counter()
    for place in range(CALL, len(groups), CALL):
        wire.put(groups[place : place + CALL])
    published = time.perf_counter()
    wait_for(wire, len(groups) - CALL)
    read = time.perf_counter()
    count = len(groups) - CALL
    return count / (published - begun), count / (read - published)


def latencies(wire: Wire, groups: Sequence[SignedGroup]) -> list[float]:
    """Seconds from the call that publishes a group to the return of the poll that has it, group by group."""
    found = []
    for group in groups:
        begun = time.perf_counter()
        wire.put([group])
        wait_for(wire, 1)
        found.append(time.perf_counter() - begun)
    return found


def wait_for_leaders(bus: Bus) -> None:
    """Wait until every partition of a new topic is led. Raises `Unavailable` if that does not come."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            bus.end_positions()
            return
        except Unavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def wait_for(wire: Wire, count: int) -> None:
    """Take until `count` groups came. Raises `TimeoutError` if they do not come."""
    end = time.monotonic() + WAIT_S
    while count > 0:
        count -= wire.take()
        if time.monotonic() > end:
            raise TimeoutError(f"{count} groups did not come within {WAIT_S:g} s")


def bytes_per_round(
    section: KafkaSection,
    topic: str,
    publishers: int,
    *,
    rounds: int,
    groups: int,
    shape: Completions,
    bounds: PoolConfig,
) -> tuple[list[int], int]:
    """Bytes a node reads from the broker in each round, and the largest batch of records written (unpacked).

    Each publisher publishes `groups` of its own a round, in a call of its own; the node polls once a round
    as the intake does.
    """
    authors = [Author(number, shape) for number in range(publishers)]
    limits = Quotas(bounds, {author.identity.key for author in authors}).limits()
    positions: Positions = {}
    read, largest = [], 0
    with closing(KafkaBus(section, topic)) as writer, closing(KafkaBus(section, topic)) as reader:
        partitions = range(len(writer.end_positions()))
        for number in range(rounds):
            for author in authors:
                made = author.groups(groups)
                writer.publish(made)
                parts = spread(made, partitions).values()
                batches = [batch for part in parts for batch in cut(part)]
                largest = max(largest, *(sum(len(one.payload) for one in batch) for batch in batches))
            before = reader.bytes_read
            positions = reader.poll(positions, limits, rng("bytes", publishers, number)).positions
            read.append(reader.bytes_read - before)
    return read, largest


def sample(shape: Completions, count: int) -> list[SignedGroup]:
    """`count` groups of four authors in turn."""
    authors = [Author(number, shape) for number in range(4)]
    return [author.groups(1)[0] for _ in range(-(-count // 4)) for author in authors][:count]
