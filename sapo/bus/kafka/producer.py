"""Writing to a topic: at least once, acknowledged by all replicas in sync, within a time limit.

A batch whose acknowledgement was lost is sent again and may be stored twice; readers dedup groups by id.
One batch of a partition is under way at a time: order is kept.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kafka.protocol.producer import ProduceRequest
from kafka.record.memory_records import MemoryRecordsBuilder

from sapo.bus.kafka.connection import Broken, Connection, Throttled, error_name
from sapo.bus.kafka.metadata import STALE, Layout, Link, NoTopic, Place
from sapo.core.errors import UserError
from sapo.core.types import SignedGroup

BATCH_BYTES = 128 * 1024
"""A batch holds no more than this, before compression; only a larger single record makes a larger one."""
REQUEST_BYTES = 1024 * 1024
PAUSE_S = 0.2
"""Between two attempts while a partition has no leader or lacks replicas."""
TRY_AGAIN = {7, 19, 20}
"""RequestTimedOut, NotEnoughReplicas, NotEnoughReplicasAfterAppend."""
TOO_LARGE = {10, 18}
CODECS = {"lz4": 3, "zstd": 4}

Queues = dict[int, deque[list[SignedGroup]]]
"""Per partition what is still to be written, in batches."""


class NotSent(Exception):
    """Not everything could be written in time; the last cause seen."""


class Sender:
    """Writes groups through a link. For one thread at a time."""

    def __init__(self, link: Link, compression: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._codec, self._clock = link, CODECS[compression], clock
        self._stored: set[tuple[str, str]] = set()
        self._stored_in: object = None

    def send(self, groups: Sequence[SignedGroup], limit_s: float) -> None:
        """Write `groups`; returns once all are stored.

        Raises `NotSent`, `Throttled`, `Broken` and `NoTopic`, and `UserError` for a group that is too large.
        What was acknowledged before a failure is not sent again by the next call, or a writer over its quota
        would never come to an end.
        """
        try:
            self._send(groups, limit_s)
            self._stored.clear()
        except Throttled:
            raise
        except BaseException:
            self._link.close()  # answers may be under way that are not awaited
            raise

    def _send(self, groups: Sequence[SignedGroup], limit_s: float) -> None:
        end, layout = self._clock() + limit_s, self._link.layout()
        if layout.topic_id != self._stored_in:
            self._stored.clear()
            self._stored_in = layout.topic_id
        wanted = [group for group in groups if _name(group) not in self._stored]
        numbers = sorted(layout.places)
        queues = {number: deque(cut(ones)) for number, ones in spread(wanted, numbers).items()}
        cause = ""
        while queues:
            failure: Exception | None = None
            try:
                now = self._link.layout()
                if now.topic_id != layout.topic_id:
                    raise NotSent("the topic was deleted and made anew")
                cause = self._attempt(now, queues, end) or cause
            except (Broken, NoTopic) as error:
                self._link.doubt()
                failure, cause = error, str(error)
            if queues and (self._clock() >= end or (failure and self._hopeless())):
                raise NotSent(cause) from failure
            if queues and (failure is not None or self._link.in_doubt):
                time.sleep(PAUSE_S)

    def _hopeless(self) -> bool:
        """Whether no server at all can be reached: waiting for another leader is in vain then."""
        self._link.wake()
        try:
            self._link.layout()
        except Broken:
            return True
        except NoTopic as error:
            return error.forbidden
        return False

    def _attempt(self, layout: Layout, queues: Queues, end: float) -> str | None:
        """Send each leader the next batch of each of its partitions; returns what stands in the way."""
        leaders = layout.led(queues)
        if len(leaders) == 0:
            self._link.doubt()
            return "no partition has a leader"
        asked: list[tuple[int, Connection]] = []
        failure: Broken | Throttled | None = None
        for leader, places in leaders.items():
            try:
                connection = self._link.broker(leader)
                request = self._request(layout, places, queues, end)
                connection.send(request, max_version=13, wait_s=end - self._clock())
                asked.append((leader, connection))
            except (Broken, Throttled) as error:
                failure = self._blame(leader, error)
        cause = None
        for leader, connection in asked:
            try:
                answer = connection.receive(max(0.5, end - self._clock()))
            except Broken as error:
                failure = self._blame(leader, error)
                continue
            for topic in answer.responses:
                for part in topic.partition_responses:
                    cause = self._settle(part, queues) or cause
        if failure is not None:
            raise failure
        return cause

    def _blame(self, leader: int, error: Broken | Throttled) -> Broken | Throttled:
        if isinstance(error, Broken):
            self._link.rest_broker(leader, error)
        return error

    def _settle(self, part: Any, queues: Queues) -> str | None:
        """Take a partition's answer into account; returns why its batch must be sent again, if it must."""
        number, code = part.index, part.error_code
        batch = queues[number][0]
        if code == 0:
            self._stored.update(_name(group) for group in batch)
            queues[number].popleft()
            if not queues[number]:
                del queues[number]
            return None
        if code in TOO_LARGE:
            if len(batch) == 1:
                raise self._too_large(batch[0], part.error_message or error_name(code))
            queues[number].popleft()
            queues[number].extendleft([one] for one in reversed(batch))
            return "a batch was too large for the topic"
        if code in STALE or code in TRY_AGAIN:
            self._link.doubt()
            return f"partition {number}: {error_name(code)}"
        raise NotSent(f"partition {number}: {part.error_message or error_name(code)}")

    def _too_large(self, group: SignedGroup, detail: str) -> UserError:
        group_id, topic = group.group_id[:12], self._link.topic
        problem = f"group {group_id} is larger than topic {topic!r} takes ({detail})"
        remedy = "raise the topic's max.message.bytes, or make groups smaller"
        return UserError("rules.max_payload_bytes", len(group.payload), problem, remedy)

    def _build(self, groups: Sequence[SignedGroup]) -> bytes:
        builder = MemoryRecordsBuilder(2, self._codec, batch_size=2**31 - 1)
        for group in groups:
            builder.append(int(time.time() * 1000), group.group_id.encode(), group.payload, headers(group))
        builder.close()
        return bytes(builder.buffer())

    def _request(self, layout: Layout, places: Sequence[Place], queues: Queues, end: float) -> Any:
        """The next batch of each of these partitions, as many as fit."""
        data = ProduceRequest.TopicProduceData
        parts: list[Any] = []
        size = 0
        for place in places:
            batch = self._build(queues[place.number][0])
            if parts and size + len(batch) > REQUEST_BYTES:
                break
            parts.append(data.PartitionProduceData(index=place.number, records=batch))
            size += len(batch)
        topic = data(name=self._link.topic, topic_id=layout.topic_id, partition_data=parts)
        patience_ms = int(max(0.5, end - self._clock()) * 900)
        return ProduceRequest(transactional_id=None, acks=-1, timeout_ms=patience_ms, topic_data=[topic])


def _name(group: SignedGroup) -> tuple[str, str]:
    return group.group_id, group.content_sha256


def spread(groups: Sequence[SignedGroup], numbers: Sequence[int]) -> dict[int, list[SignedGroup]]:
    """Which group goes to which partition: the same id to the same one, ids in equal shares to all."""
    parts: dict[int, list[SignedGroup]] = {}
    for group in groups:
        number = numbers[int(group.group_id[:8], 16) % len(numbers)]
        parts.setdefault(number, []).append(group)
    return parts


def cut(groups: Sequence[SignedGroup]) -> list[list[SignedGroup]]:
    """Groups in batches of at most `BATCH_BYTES` of payload, each of at least one group."""
    batches: list[list[SignedGroup]] = []
    size = 0
    for group in groups:
        if not batches or size + len(group.payload) > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(group)
        size += len(group.payload)
    return batches


def headers(group: SignedGroup) -> list[tuple[str, bytes]]:
    """What goes beside the payload: the signature with its key and digest, and what it is, for people."""
    named = [
        ("content_type", "application/json"),
        ("content_sha256", group.content_sha256),
        ("key", group.key),
        ("signature", group.signature),
    ]
    try:
        found = json.loads(group.payload)
        named += [(name, str(found[name])) for name in ("schema_version", "node")]
    except (ValueError, KeyError, TypeError):
        pass  # both repeat the payload; a record that is no group has none
    return [(name, value.encode()) for name, value in named]
