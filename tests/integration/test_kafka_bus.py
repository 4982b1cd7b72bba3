"""What is the Kafka bus's own: records of others, topics that change, bytes on the wire, outages."""

import json
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient
from makers import make_signed

from infra.kafka.cluster import Cluster
from sapo.bus.base import Limits, Poll, Positions
from sapo.bus.kafka.bus import GRACE_S, KafkaBus
from sapo.bus.kafka.producer import headers
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import Unavailable, UserError
from sapo.core.types import Received, SignedGroup

pytestmark = [pytest.mark.core, pytest.mark.kafka]

EVERYTHING = Limits(max_bytes=10**9, max_groups=10**6)
IN_TIME_S = 60.0


class Topic:
    """A topic of a test's own, with what reads and writes it besides the bus."""

    def __init__(self, cluster: Cluster, partitions: int = 4) -> None:
        self.cluster, self.name = cluster, f"bus-{secrets.token_hex(4)}"
        cluster.create_topic(self.name, partitions=partitions)
        self.skew = 0.0
        self._open: list[Any] = []

    def bus(self) -> KafkaBus:
        """A client whose clock the test can put forward."""
        section = Section.model_validate(self.cluster.bus(self.name))
        return self._keep(KafkaBus(section, self.name, clock=lambda: time.monotonic() + self.skew))

    def admin(self) -> KafkaAdminClient:
        return self._keep(KafkaAdminClient(bootstrap_servers=self.cluster.servers.split(",")))

    def producer(self, **options: Any) -> KafkaProducer:
        return self._keep(KafkaProducer(bootstrap_servers=self.cluster.servers.split(","), **options))

    def raw(self, count: int) -> list[Any]:
        """All records, as a consumer that knows nothing of sapo reads them."""
        consumer = self._keep(KafkaConsumer(bootstrap_servers=self.cluster.servers.split(",")))
        places = [TopicPartition(self.name, n) for n in sorted(consumer.partitions_for_topic(self.name))]
        consumer.assign(places)
        consumer.seek_to_beginning()
        found: list[Any] = []
        deadline = time.monotonic() + IN_TIME_S
        while len(found) < count and time.monotonic() < deadline:
            found += [one for ones in consumer.poll(timeout_ms=200).values() for one in ones]
        return found

    def _keep(self, client: Any) -> Any:
        self._open.append(client)
        return client

    def close(self) -> None:
        for client in self._open:
            client.close()


@pytest.fixture
def topic(kafka: Cluster) -> Iterator[Topic]:
    topic = Topic(kafka)
    yield topic
    topic.close()


def poll(bus: KafkaBus, positions: Positions, limits: Limits = EVERYTHING, seed: int = 0) -> Poll:
    return bus.poll(positions, limits, random.Random(seed))


def groups(count: int, size: int = 10, author: str = "peer", first: int = 0) -> list[SignedGroup]:
    """Groups whose texts no compression makes smaller."""
    noise = random.Random(first)
    return [
        make_signed(author, position=i, texts=(noise.randbytes(size // 2).hex(), "x"))
        for i in range(first, first + count)
    ]


def ids(ones: Sequence[Received]) -> set[str]:
    return {one.signed.group_id for one in ones}


def soon(attempt: Callable[[], Any]) -> Any:
    """What `attempt` returns as soon as the bus is back."""
    deadline = time.monotonic() + IN_TIME_S
    while True:
        try:
            return attempt()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def timed(attempt: Callable[[], Any]) -> tuple[float, str]:
    """How long it took to say that the bus is away, and what was said."""
    begun = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        attempt()
    return time.monotonic() - begun, str(caught.value)


class TestWire:
    def test_anybody_can_read_the_groups_as_json_with_their_headers(self, topic: Topic) -> None:
        sent = groups(9)
        topic.bus().publish(sent)
        records = topic.raw(9)
        assert {record.key.decode() for record in records} == {one.group_id for one in sent}
        record = next(one for one in records if one.key.decode() == sent[0].group_id)
        assert record.value == sent[0].payload
        assert json.loads(record.value)["question"] == "What is 0 + 0?"
        assert {name: value.decode() for name, value in record.headers} == {
            "content_type": "application/json",
            "schema_version": str(json.loads(record.value)["schema_version"]),
            "node": "peer",
            "content_sha256": sent[0].content_sha256,
            "key": sent[0].key,
            "signature": sent[0].signature,
        }


class TestJunk:
    def test_what_is_no_signed_group_is_passed_over_and_counted(self, kafka: Cluster) -> None:
        topic = Topic(kafka, partitions=1)
        bus = topic.bus()
        good = groups(3)
        fine = headers(good[0])
        junk: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]] = [
            (b"hello", None, []),
            (None, b"key", []),
            (good[0].payload, good[0].group_id.encode(), []),
            (good[0].payload, None, fine),
            (good[0].payload, b"\xff\xfe", fine),
            (good[0].payload, b"nobody", fine),
            (good[0].payload, good[0].group_id.encode(), [*fine, ("signature", b"\xff" * 128)]),
            (good[0].payload, good[0].group_id.encode(), [*fine, ("key", b"")]),
        ]
        bus.publish(good[:1])
        for compression in (None, "gzip", "lz4", "zstd"):
            producer = topic.producer(compression_type=compression)
            for value, key, given in junk:
                producer.send(topic.name, value, key=key, headers=given)
            producer.flush(10)
        bus.publish(good[1:])
        found = poll(bus, {})
        assert [one.signed for one in found.received] == good
        (name,) = bus.end_positions()
        places = [one.bus_position for one in found.malformed]
        assert places == [f"{name}:{offset}" for offset in range(1, 33)]
        assert [one.payload for one in found.malformed[:2]] == [b"hello", b""]
        assert found.gaps == ()
        assert found.positions == {name: 35}
        topic.close()

    def test_what_a_batch_unpacks_to_is_bounded(self, kafka: Cluster) -> None:
        """A few kilobytes that unpack to many megabytes are passed over, and cost no memory."""
        topic = Topic(kafka, partitions=1)
        bus = topic.bus()
        sent = groups(2)
        bus.publish(sent[:1])
        producer = topic.producer(compression_type="zstd", max_request_size=2**27, batch_size=2**27)
        producer.send(topic.name, bytes(40 * 2**20)).get(30)
        bus.publish(sent[1:])
        found = poll(bus, {})
        assert [one.signed for one in found.received] == sent
        assert [one.bus_position.rpartition(":")[2] for one in found.malformed] == ["1"]
        assert bus.bytes_read < 100_000
        topic.close()

    def test_marks_of_a_transaction_are_neither_groups_nor_gaps(self, kafka: Cluster) -> None:
        topic = Topic(kafka, partitions=1)
        bus = topic.bus()
        sent = groups(2)
        bus.publish(sent[:1])
        producer = topic.producer(transactional_id=topic.name)
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic.name, sent[1].payload, key=sent[1].group_id.encode(), headers=headers(sent[1]))
        producer.commit_transaction()
        deadline = time.monotonic() + IN_TIME_S
        while sum(bus.end_positions().values()) < 3:  # the mark comes a moment later
            assert time.monotonic() < deadline
        found = poll(bus, {})
        assert [one.signed for one in found.received] == sent
        assert (len(found.malformed), found.gaps) == (1, ())
        assert dict(found.positions) == dict(bus.end_positions())
        topic.close()


class TestBytes:
    @pytest.mark.parametrize("budget", [1, 30_000, 200_000])
    def test_a_poll_reads_no_more_than_its_budget_and_one_batch(self, topic: Topic, budget: int) -> None:
        writer, reader = topic.bus(), topic.bus()
        largest = 0
        for first in range(0, 120, 15):
            sent = groups(15, size=4_000, first=first)
            writer.publish(sent)
            largest = max(largest, sum(len(one.payload) + 500 for one in sent))
        positions: Positions = {}
        got: set[str] = set()
        while len(got) < 120:
            before = reader.bytes_read
            found = poll(reader, positions, Limits(max_bytes=budget), len(got))
            assert found.received
            assert reader.bytes_read - before <= budget + largest
            got |= ids(found.received)
            positions = found.positions

    def test_a_position_inside_a_batch_is_where_reading_goes_on(self, kafka: Cluster) -> None:
        topic = Topic(kafka, partitions=1)
        bus = topic.bus()
        sent = groups(20)
        bus.publish(sent)
        positions: Positions = {}
        got: list[str] = []
        for _ in range(10):
            before = bus.bytes_read
            found = poll(bus, positions, Limits(max_groups=2))
            got += [one.signed.group_id for one in found.received]
            positions = found.positions
            assert bus.bytes_read > before  # the same batch, again
        assert got == [one.group_id for one in sent]
        topic.close()


class TestTopics:
    def test_a_topic_made_anew_is_another_place(self, kafka: Cluster) -> None:
        topic = Topic(kafka, partitions=1)
        bus, late = topic.bus(), topic.bus()
        bus.publish(groups(9))
        old = poll(bus, {}).positions
        topic.admin().delete_topics([topic.name])
        kafka.create_topic(topic.name, partitions=1)
        sent = groups(3)
        soon(lambda: late.publish(sent))
        assert bus.end_positions().keys().isdisjoint(old)
        found = poll(bus, old)
        assert found.positions.keys().isdisjoint(old)
        assert (ids(found.received), found.gaps) == ({one.group_id for one in sent}, ())
        soon(lambda: bus.publish(groups(1, first=50)))
        assert len(poll(bus, found.positions).received) == 1
        topic.close()

    def test_a_topic_that_is_gone_is_unavailable(self, topic: Topic) -> None:
        bus = topic.bus()
        bus.publish(groups(1))
        topic.admin().delete_topics([topic.name])

        def poll_on() -> None:
            deadline = time.monotonic() + IN_TIME_S
            while time.monotonic() < deadline:
                topic.skew += 20
                poll(bus, {})

        # a broker that has begun to delete it names a partition first
        assert re.search("is not there|UnknownTopicOrPartition", timed(poll_on)[1])

    def test_partitions_that_are_added_are_read_from_their_beginning(self, topic: Topic) -> None:
        reader, writer = topic.bus(), topic.bus()
        positions = poll(reader, {}, Limits(tail=5)).positions
        topic.admin().create_partitions({topic.name: 7})
        sent = groups(60)
        topic.skew += 20
        soon(lambda: writer.publish(sent))
        found = poll(reader, positions)
        assert len(found.positions) == 7
        assert ids(found.received) == {one.group_id for one in sent}
        assert found.gaps == ()

    def test_a_position_behind_the_end_is_an_error_only_if_it_stays_so(self, topic: Topic) -> None:
        """Brokers that have just changed places may tell of the past for a moment."""
        bus = topic.bus()
        bus.publish(groups(20))
        ends = dict(bus.end_positions())
        name = min(ends)
        ahead = ends | {name: ends[name] + 5}
        for _ in range(3):
            found = poll(bus, ahead)
            assert (found.received, dict(found.positions)) == ((), ahead)
        topic.skew += GRACE_S + 1
        with pytest.raises(UserError, match="lost records"):
            poll(bus, ahead)
        assert poll(bus, ends).received == ()


class TestWriting:
    def test_a_writer_over_its_quota_waits_and_sends_nothing_twice(self, secure_kafka: Cluster) -> None:
        topic = Topic(secure_kafka, partitions=1)
        user = f"flooder-{topic.name}"
        secure_kafka.add_user(user)
        secure_kafka.allow(user, topic.name)
        secure_kafka.quota(user, 20_000)
        section = Section.model_validate(secure_kafka.bus(topic.name, user))
        bus = KafkaBus(section, topic.name)
        sent = groups(110, size=6_000)
        seconds, said = timed(lambda: bus.publish(sent))
        assert seconds < 10
        assert "throttles this client" in said
        soon(lambda: bus.publish(sent))
        assert sum(bus.end_positions().values()) == 110
        assert ids(poll(bus, {}).received) == {one.group_id for one in sent}
        bus.close()

    def test_what_one_publish_stored_is_sent_again_by_another(self, topic: Topic) -> None:
        """Only a publish that failed is gone on with."""
        bus = topic.bus()
        bus.publish(groups(5))
        bus.publish(groups(5))
        assert sum(bus.end_positions().values()) == 10


class TestOutage:
    def test_a_paused_broker_costs_little_and_is_used_again_when_it_goes_on(
        self, kafka: Cluster, topic: Topic
    ) -> None:
        bus, late = topic.bus(), topic.bus()
        bus.publish(groups(10))
        positions = poll(bus, {}).positions
        kafka.pause(0)
        try:
            with ThreadPoolExecutor(1) as thread:
                writing = thread.submit(timed, lambda: bus.publish(groups(5, first=10)))
                # a publish that waits keeps no poll waiting; one may be told of the log before the pause
                assert timed(lambda: [poll(bus, positions) for _ in range(2)])[0] < 5
                at_once = [timed(lambda: poll(bus, positions))[0] for _ in range(5)]
                assert max(at_once) < 0.5
                topic.skew += 2
                assert timed(lambda: poll(bus, positions))[0] < 2
                assert "did not answer" in timed(lambda: late.end_positions())[1]
                assert writing.result()[0] < 12
        finally:
            kafka.resume(0)
        topic.skew += 20
        soon(lambda: bus.publish(groups(5, first=10)))
        wanted = {one.group_id for one in groups(5, first=10)}
        # the first poll may still be told of the log as it was before the pause
        wait_until(lambda: wanted <= ids(soon(lambda: poll(bus, positions)).received))

    def test_a_broker_that_dies_is_used_again_when_it_is_back(self, kafka: Cluster, topic: Topic) -> None:
        bus = topic.bus()
        bus.publish(groups(10))
        positions = poll(bus, {}).positions
        kafka.kill(0)
        try:
            for attempt in (lambda: poll(bus, positions), lambda: bus.publish(groups(1))):
                seconds, said = timed(attempt)
                assert seconds < 3
                assert kafka.servers in said
            topic.skew += 20
            assert "nobody listens" in timed(lambda: poll(bus, positions))[1]
        finally:
            kafka.restart(0)
        soon(lambda: bus.publish(groups(5, first=10)))
        topic.skew += 20
        found = soon(lambda: poll(bus, positions))
        assert ids(found.received) == {one.group_id for one in groups(5, first=10)}
        assert found.gaps == ()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(tmp_path_factory.mktemp("three"), brokers=3) as cluster:
        yield cluster


class TestLeaders:
    def test_a_leader_that_dies_costs_its_own_partitions_only(self, three: Cluster) -> None:
        topic = Topic(three, partitions=6)
        bus = topic.bus()
        bus.publish(groups(60))
        three.kill(0)
        found = poll(bus, {})  # from the two that are left
        assert 0 < len(found.received) < 60
        soon(lambda: bus.publish(groups(60, first=60)))

        def read_on() -> bool:
            nonlocal found
            topic.skew += 5
            more = poll(bus, found.positions)
            assert more.gaps == ()
            found = Poll((*found.received, *more.received), more.positions)
            return len(ids(found.received)) == 120

        wait_until(read_on)
        three.restart(0)
        topic.close()

    def test_a_leader_that_was_cut_off_tells_nobody_of_the_past(self, three: Cluster) -> None:
        """It believes for a moment that it leads still, with less than what was read elsewhere meanwhile."""
        topic = Topic(three, partitions=6)
        bus, writer = topic.bus(), topic.bus()
        writer.publish(groups(60))
        three.pause(1)
        try:
            soon(lambda: writer.publish(groups(60, first=60)))
            got: dict[str, Poll] = {"last": poll(bus, {})}

            def read_on() -> bool:
                topic.skew += 5
                got["last"] = poll(bus, got["last"].positions)
                return sum(got["last"].positions.values()) >= 120

            wait_until(read_on)
        finally:
            three.resume(1)
        for _ in range(50):
            fresh = topic.bus()  # as a process that has just begun
            with suppress(Unavailable):
                ends = fresh.end_positions()
                assert all(ends[name] >= offset for name, offset in got["last"].positions.items())
            fresh.close()
            with suppress(Unavailable):
                topic.skew += 20
                assert dict(poll(bus, got["last"].positions).positions) == got["last"].positions
        topic.close()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + IN_TIME_S
    while not soon(done):
        assert time.monotonic() < deadline
        time.sleep(0.2)
