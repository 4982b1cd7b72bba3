"""Writing to a topic whose brokers fail in turns, as their answers tell of it; without a broker."""

import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from makers import make_signed

from sapo.bus.kafka import producer
from sapo.bus.kafka.connection import Broken, Throttled
from sapo.bus.kafka.metadata import Layout, Place, newer
from sapo.bus.kafka.producer import NotSent, Sender
from sapo.core.types import SignedGroup

TOPIC = uuid.UUID(int=1)


def layout(topic: uuid.UUID = TOPIC, partitions: int = 1, epoch: int = 0) -> Layout:
    places = {number: Place(number, 0, epoch) for number in range(partitions)}
    return Layout(topic, "cluster", {0: ("host", 9092)}, places, frozenset())


class Broker:
    """A leader that keeps what it is sent."""

    server = "host:9092"

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.requests = 0
        self.before: list[Exception | None] = []
        """What the next requests meet, None for nothing; `Throttled` before they are written."""
        self.lost_answers = 0
        self._answer: Any = None

    def send(self, request: Any, max_version: int | None = None, wait_s: float | None = None) -> None:
        self.requests += 1
        if self.before and (failure := self.before.pop(0)) is not None:
            raise failure
        (part,) = request.topic_data[0].partition_data
        self.stored.append(bytes(part.records))
        done = SimpleNamespace(index=part.index, error_code=0, error_message=None)
        self._answer = SimpleNamespace(responses=[SimpleNamespace(partition_responses=[done])])

    def receive(self, stall_s: float) -> Any:
        if self.lost_answers:
            self.lost_answers -= 1
            raise Broken(self.server, "request", "did not answer")
        return self._answer

    def holds(self, group: SignedGroup) -> bool:
        return any(group.group_id.encode() in batch for batch in self.stored)


class OneBroker:
    """A link to a topic that one broker leads."""

    topic = "t"
    in_doubt = False

    def __init__(self, broker: Broker) -> None:
        self._broker, self.now = broker, layout()

    def layout(self) -> Layout:
        return self.now

    def broker(self, node: int) -> Broker:
        return self._broker

    def doubt(self) -> None: ...
    def close(self) -> None: ...


class Clock:
    """Goes on only while somebody sleeps, and a little at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(producer.time, "sleep", clock.sleep)
    return clock


def sender(link: OneBroker, clock: Clock) -> Sender:
    return Sender(link, "lz4", clock)  # type: ignore[arg-type]


def groups(count: int) -> Sequence[SignedGroup]:
    return [make_signed(position=position) for position in range(count)]


def test_a_throttled_writer_sends_what_was_not_acknowledged(clock: Clock) -> None:
    broker = Broker()
    writer = sender(OneBroker(broker), clock)
    large = [make_signed(position=n, texts=("x" * 100_000, "y")) for n in range(2)]  # a batch each
    broker.before = [None, Throttled("be quiet")]
    with pytest.raises(Throttled):
        writer.send(large, 8.0)
    writer.send(large, 8.0)
    assert [broker.holds(one) for one in large] == [True, True]
    assert len(broker.stored) == 2


def test_a_broker_that_refuses_is_asked_a_few_times_a_second(clock: Clock) -> None:
    broker = Broker()
    broker.before = [Broken(broker.server, "connect", "nobody listens there") for _ in range(100_000)]
    with pytest.raises(NotSent, match="nobody listens"):
        sender(OneBroker(broker), clock).send(groups(1), 8.0)
    assert 5 < broker.requests < 60


def test_what_a_deleted_topic_held_is_written_to_its_successor(clock: Clock) -> None:
    broker = Broker()
    link = OneBroker(broker)
    writer = sender(link, clock)
    large = [make_signed(position=n, texts=("x" * 100_000, "y")) for n in range(2)]  # a batch each
    broker.before = [None, *[Broken(broker.server, "request", "gone") for _ in range(1000)]]
    with pytest.raises(NotSent):
        writer.send(large, 1.0)
    assert [broker.holds(one) for one in large] == [True, False]
    broker.stored, broker.before = [], []
    link.now = layout(uuid.UUID(int=2))
    writer.send(large, 1.0)
    assert len(broker.stored) == 2


def test_a_broker_that_has_not_heard_of_new_partitions_takes_none_away() -> None:
    grown = layout(partitions=4, epoch=1)
    assert newer(grown, layout(partitions=2)) == grown
    assert sorted(newer(grown, layout(uuid.UUID(int=2), partitions=2)).places) == [0, 1]
