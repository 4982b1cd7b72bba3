"""The bus over Apache Kafka: one topic per swarm, groups keyed by their ids, any number of partitions.

Reading knows no consumer group: each reader keeps its own positions, so no reader waits for a rebalance, and
what a poll reads from the network is bounded.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest

from sapo.bus.base import Limits, Poll, Positions, Reading
from sapo.bus.kafka.connection import Broken, Throttled, error_name
from sapo.bus.kafka.metadata import STALE, Layout, Link, NoTopic, Place
from sapo.bus.kafka.producer import NotSent, Sender
from sapo.bus.kafka.record_batch import read
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import Unavailable
from sapo.core.types import SignedGroup

PUBLISH_S = 8.0
"""How long one publish goes on trying while the cluster sorts itself out."""
GRACE_S = 30.0
"""How long a saved position may lie behind the end before it is an error: a broker that was cut off may tell
of the past until it has heard of its successor."""
FETCH_BYTES = 256 * 1024
"""Asked for at once; packed, it holds several times that, of which a poll may have use for less."""
LATEST, EARLIEST = -1, -2
OUT_OF_RANGE = 1


class NotRead(Exception):
    """No partition, or not all that were asked for, could be read; the last cause seen."""


@dataclass
class Ends:
    """The offsets of the oldest record and after the newest, per partition that could be asked."""

    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    cause: str = "no partition has a leader"
    """Why a partition could not be asked, where one could not."""


class KafkaBus:
    """Groups of one topic. Safe to share between threads: publishing and polling do not wait for each other.

    Opening it connects to nothing; a cluster that is away is `Unavailable`, and the same object works again
    when it is back. While it is away, polling tries for a second now and then and otherwise fails at once.
    `bytes_read` counts the bytes of record batches that came over the network.
    """

    def __init__(self, section: Section, topic: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_read = 0
        self._servers, self._topic, self._clock = section.servers, topic, clock
        self._reader, self._writer = Link(section, topic, clock), Link(section, topic, clock)
        self._sender = Sender(self._writer, section.compression, clock)
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._behind: dict[str, float] = {}
        self._closed = False

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        """Append groups durably: returns once every replica in sync has them. Raises `Unavailable` after some
        10 s at most, `UserError` for a group the topic is too narrow for."""
        if not groups:
            return
        with self._write_lock, self._errors():
            self._writer.wake()
            self._sender.send(groups, PUBLISH_S)

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        """Read on from `positions`, partitions in an order drawn from `rng`, until the bytes are spent.

        Partitions whose leader is away keep their position and are left for a later poll. Raises
        `Unavailable` when none can be read.
        """
        with self._read_lock, self._errors(), self._afresh():
            return self._poll(positions, limits, rng)

    def end_positions(self) -> Positions:
        """The offset after the last record of every partition. Raises `Unavailable` if one of them cannot be
        asked."""
        with self._read_lock, self._errors(), self._afresh():
            self._reader.doubt()  # an archiver must not take a new topic's ends for an old one's
            layout, ends = self._ends()
            if len(ends.last) < len(layout.places):
                raise NotRead(ends.cause)
            return {layout.name(number): end for number, end in sorted(ends.last.items())}

    def close(self) -> None:
        """Close connections at once, also those another thread waits on. Closing twice is harmless."""
        self._closed = True
        for link, lock in ((self._reader, self._read_lock), (self._writer, self._write_lock)):
            link.abort()
            if lock.acquire(timeout=1.0):
                link.close()
                lock.release()

    def __repr__(self) -> str:
        return f"KafkaBus({self._servers!r}, {self._topic!r})"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        where = f"the bus {self._servers} cannot be used"
        if self._closed:
            raise Unavailable(f"the bus {self._servers} is closed")
        try:
            yield
        except (Broken, NoTopic, NotRead, NotSent, Throttled) as error:
            if self._closed:
                raise Unavailable(f"the bus {self._servers} is closed") from error
            raise Unavailable(f"{where}: {error}") from error

    @contextmanager
    def _afresh(self) -> Iterator[None]:
        """After a failure ask the brokers afresh; `Link` leaves those alone a while that failed."""
        try:
            yield
        except BaseException as error:
            self._reader.close()  # answers may be under way that are not awaited
            if isinstance(error, Broken | NoTopic | NotRead):
                self._behind.clear()
            raise

    def _poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        layout, ends = self._ends()
        if not ends.last:
            raise NotRead(ends.cause)
        reading = Reading(limits)
        order = sorted(layout.places)
        rng.shuffle(order)
        due: deque[int] = deque()
        for number in order:
            name = layout.name(number)
            saved = positions.get(name)
            if number in ends.last and not self._ahead(name, saved, ends.last[number]):
                start = reading.start(name, saved, ends.first[number], ends.last[number])
                if start < ends.last[number]:
                    due.append(number)
            elif saved is not None:
                reading.keep(name, saved)
        self._fetch_all(layout, due, ends.last, reading, limits.max_bytes)
        return reading.poll()

    def _ahead(self, name: str, saved: int | None, end: int) -> bool:
        """Whether a saved position lies behind the end, and has not done so for long yet."""
        if saved is None or saved <= end:
            self._behind.pop(name, None)
            return False
        self._reader.doubt()
        since = self._behind.setdefault(name, self._clock())
        return self._clock() - since < GRACE_S

    def _ends(self) -> tuple[Layout, Ends]:
        """First and last offsets of all partitions whose leader answers, one exchange per leader. What a
        leader does not know for sure, such as the end just after an election, it does not tell."""
        layout, ends = self._reader.layout(), Ends()
        todo = set(layout.places)
        for attempt in range(2):
            for leader, places in layout.led(sorted(todo)).items():
                try:
                    self._ask_ends(leader, places, ends)
                except (Broken, Throttled) as error:
                    ends.cause = str(error)
                    if isinstance(error, Broken):
                        self._reader.rest_broker(leader, error)
            todo -= ends.last.keys() & ends.first.keys()
            if not todo or attempt:
                break
            self._reader.doubt()
            with suppress(Broken, NoTopic):
                before, layout = layout, self._reader.layout()
                if layout.topic_id != before.topic_id:
                    return layout, Ends(cause="the topic was deleted and made anew")
        for number in todo:
            ends.first.pop(number, None)
            ends.last.pop(number, None)
        return layout, ends

    def _ask_ends(self, leader: int, places: Sequence[Place], ends: Ends) -> None:
        connection = self._reader.broker(leader)
        for timestamp in (EARLIEST, LATEST):
            connection.send(_offsets(self._topic, places, timestamp), max_version=9)
        for found in (ends.first, ends.last):
            for topic in connection.receive().topics:
                for part in topic.partitions:
                    if part.error_code == 0:
                        found[part.partition_index] = part.offset
                    else:
                        ends.cause = f"partition {part.partition_index}: {error_name(part.error_code)}"

    def _fetch_all(
        self, layout: Layout, due: deque[int], last: dict[int, int], reading: Reading, budget: int
    ) -> None:
        """Read the partitions in `due` in that order up to their ends, until the budget of bytes is spent."""
        taken = False
        while due and budget > 0:
            places = _run(layout, due)
            try:
                parts = self._fetch(layout, places, reading, min(budget, FETCH_BYTES))
            except (Broken, Throttled) as error:
                if isinstance(error, Broken) and places[0].leader is not None:
                    self._reader.rest_broker(places[0].leader, error)
                for place in places:
                    due.remove(place.number)
                if not due and not taken:
                    raise
                continue  # what was read so far is good; the rest stays where it is
            size = sum(map(len, parts.values()))
            taken = taken or size > 0
            budget -= size
            self.bytes_read += size
            for place in places:
                data = parts.get(place.number, b"")
                name = layout.name(place.number)
                before = reading.at(name)
                if not all(reading.add(name, found) for found in read(data, name, before)):
                    return
                # a leader that gave the first of them nothing has nothing to give now
                stuck = place is places[0] and reading.at(name) == before
                if stuck or reading.at(name) >= last[place.number]:
                    due.remove(place.number)

    def _fetch(
        self, layout: Layout, places: Sequence[Place], reading: Reading, limit: int
    ) -> dict[int, bytes]:
        """Records of partitions of one leader: `limit` bytes, or one batch where that is larger."""
        assert places[0].leader is not None
        wanted = FetchRequest.FetchTopic
        parts = [
            wanted.FetchPartition(
                partition=place.number,
                current_leader_epoch=place.epoch,
                fetch_offset=reading.at(layout.name(place.number)),
                last_fetched_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=limit,
            )
            for place in places
        ]
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=limit,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[wanted(topic=self._topic, topic_id=layout.topic_id, partitions=parts)],
            forgotten_topics_data=[],
            rack_id="",
        )
        connection = self._reader.broker(places[0].leader)
        answer = connection.call(request, max_version=13)
        if answer.error_code:
            self._reader.doubt()
            raise Broken(connection.server, "request", error_name(answer.error_code))
        found: dict[int, bytes] = {}
        for topic in answer.responses:
            for part in topic.partitions:
                if part.error_code == 0:
                    found[part.partition_index] = bytes(part.records or b"")
                elif part.error_code in STALE or part.error_code == OUT_OF_RANGE:
                    self._reader.doubt()
                else:
                    cause = f"partition {part.partition_index}: {error_name(part.error_code)}"
                    raise Broken(connection.server, "request", cause)
        return found


def _run(layout: Layout, due: Sequence[int]) -> list[Place]:
    """The partitions at the head of `due` that one leader has: one request for all keeps their order."""
    places: list[Place] = []
    for number in due:
        place = layout.places[number]
        if places and place.leader != places[0].leader:
            break
        places.append(place)
    return places


def _offsets(topic: str, places: Sequence[Place], timestamp: int) -> Any:
    wanted = ListOffsetsRequest.ListOffsetsTopic
    parts = [
        wanted.ListOffsetsPartition(
            partition_index=place.number, current_leader_epoch=place.epoch, timestamp=timestamp
        )
        for place in places
    ]
    return ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=[wanted(name=topic, partitions=parts)])
