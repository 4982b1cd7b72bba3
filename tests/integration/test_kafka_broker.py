"""Real brokers from pip-installed parts: they keep data, die with their owner, and let in who may come in."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource
from kafka.errors import KafkaConnectionError, KafkaError

from infra.kafka.admin import Admin, Topic, client_options
from infra.kafka.cluster import Cluster
from sapo.core.child_process import alive
from sapo.core.errors import UserError

pytestmark = pytest.mark.kafka

IN_TIME_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until it holds; what it returned then."""
    deadline = time.monotonic() + IN_TIME_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
    return found


def name() -> str:
    return f"broker-{secrets.token_hex(4)}"


def write(cluster: Cluster, topic: str, values: Sequence[bytes], user: str | None = None) -> None:
    """Write values, acknowledged by all replicas in sync."""
    producer = KafkaProducer(**client_options(cluster.layout, user), acks="all", max_block_ms=20_000)
    try:
        for sent in [producer.send(topic, value) for value in values]:
            sent.get(timeout=30)
    finally:
        producer.close()


def read(cluster: Cluster, topic: str, count: int, user: str | None = None) -> list[Any]:
    """The records of a topic, once there are `count`."""
    consumer = KafkaConsumer(**client_options(cluster.layout, user))
    try:
        known = until(lambda: partitions(consumer, topic))
        consumer.assign([TopicPartition(topic, number) for number in known])
        consumer.seek_to_beginning()
        found: list[Any] = []
        deadline = time.monotonic() + IN_TIME_S
        while len(found) < count and time.monotonic() < deadline:
            found += [one for ones in consumer.poll(timeout_ms=200).values() for one in ones]
        return found
    finally:
        consumer.close()


def partitions(consumer: KafkaConsumer, topic: str) -> set[int] | None:
    """None while kafka-python asks a broker that is away."""
    with contextlib.suppress(KafkaConnectionError):
        return consumer.partitions_for_topic(topic)
    return None


def values(cluster: Cluster, topic: str, count: int) -> set[bytes]:
    return {record.value for record in read(cluster, topic, count)}


def topic_of(cluster: Cluster, topic: str) -> Topic:
    with Admin.connect(cluster.layout) as admin:
        return next(one for one in admin.topics() if one.name == topic)


def environment(**more: str) -> dict[str, str]:
    """As on a machine without Java and Maven, of which no program can be found."""
    kept = {key: os.environ[key] for key in ("HOME", "SAPO_CACHE", "LANG") if key in os.environ}
    return kept | {"PATH": "/no/programs", "PYTHONUNBUFFERED": "1"} | more


def infra(*words: str, timeout: float = 120.0) -> "subprocess.CompletedProcess[str]":
    """`python -m infra.kafka WORDS...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "infra.kafka", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )


class TestFolder:
    def test_it_keeps_all_and_belongs_to_one(self, tmp_path: Path) -> None:
        topic = name()
        with Cluster.start(tmp_path) as first:
            first.create_topic(topic, partitions=2)
            write(first, topic, [b"a", b"b"])
            first.kill(0)
            assert first.pid(0) is None
            first.restart(0)
            write(first, topic, [b"c"])
            assert values(first, topic, 3) == {b"a", b"b", b"c"}
            with pytest.raises(UserError, match="kept by another process"):
                Cluster.start(tmp_path)
            known = (first.cluster_id, first.servers)
        assert first.pid(0) is None
        with Cluster.start(tmp_path) as second:
            assert (second.cluster_id, second.servers) == known
            assert values(second, topic, 3) == {b"a", b"b", b"c"}

    def test_brokers_die_with_their_owner(self, tmp_path: Path) -> None:
        """However it dies, and its folder can be used again at once."""
        script = (
            "import sys, time; from pathlib import Path; from infra.kafka.cluster import Cluster\n"
            f"cluster = Cluster.start(Path({str(tmp_path)!r}))\n"
            f"cluster.create_topic('t', partitions=1); print(cluster.pid(0), flush=True); time.sleep(600)"
        )
        owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            assert owner.stdout is not None
            java = int(owner.stdout.readline())
            assert alive(java)
        finally:
            owner.kill()
            owner.communicate()
        with Cluster.start(tmp_path) as cluster:
            assert not alive(java)
            assert topic_of(cluster, "t").partitions == 1


class TestThree:
    def test_two_of_three_go_on(self, tmp_path: Path) -> None:
        topic = name()
        with Cluster.start(tmp_path, brokers=3) as cluster:
            cluster.create_topic(topic, partitions=6)
            assert topic_of(cluster, topic).replication == 3
            with Admin.connect(cluster.layout) as admin:
                assert settings(admin, topic)["min.insync.replicas"] == "2"
            write(cluster, topic, [b"all %d" % i for i in range(6)])
            cluster.kill(1)
            for _ in range(5):  # whichever broker is asked
                cluster.create_topic(topic)
            write(cluster, topic, [b"two %d" % i for i in range(30)])
            wanted = {b"all %d" % i for i in range(6)} | {b"two %d" % i for i in range(30)}
            assert values(cluster, topic, 36) == wanted
            until(lambda: topic_of(cluster, topic).under_replicated == 6)
            cluster.restart(1)
            until(lambda: topic_of(cluster, topic).under_replicated == 0)
            # now another may go, and the one that was away has all
            cluster.kill(0)
            assert values(cluster, topic, 36) == wanted


def settings(admin: Admin, topic: str) -> dict[str, str]:
    described = admin._client.describe_configs([ConfigResource("topic", topic)], config_filter="all")
    return {key: str(one["value"]) for key, one in described["topic"][topic].items()}


class TestSecured:
    def test_a_user_may_do_what_it_was_allowed(self, secure_kafka: Cluster) -> None:
        topic, user, reader = name(), name(), name()
        secure_kafka.create_topic(topic, partitions=1)
        for one in (user, reader):
            file = secure_kafka.add_user(one)
            assert secure_kafka.add_user(one) == file  # and the password stays
            assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(KafkaError, match="AuthorizationFailed"):
            write(secure_kafka, topic, [b"no"], user)
        secure_kafka.allow(user, topic)
        secure_kafka.allow(reader, topic, write=False)
        write(secure_kafka, topic, [b"yes"], user)
        with pytest.raises(KafkaError, match="AuthorizationFailed"):
            write(secure_kafka, topic, [b"no"], reader)
        for one in (user, reader):
            assert [record.value for record in read(secure_kafka, topic, 1, one)] == [b"yes"]

    def test_who_is_not_there_gets_no_rights(self, secure_kafka: Cluster) -> None:
        for call in (
            lambda: secure_kafka.allow("stranger", "t"),
            lambda: secure_kafka.quota("stranger", 1000),
            lambda: secure_kafka.bus("t", "stranger"),
        ):
            with pytest.raises(UserError, match=r"no such user; python -m infra\.kafka user stranger"):
                call()

    def test_a_quota_slows_its_user_and_nobody_else(self, secure_kafka: Cluster) -> None:
        """By what the broker itself says in its answers: how long it wants each to keep quiet."""
        topic, flooder, other = name(), name(), name()
        secure_kafka.create_topic(topic, partitions=1)
        for one in (flooder, other):
            secure_kafka.add_user(one)
            secure_kafka.allow(one, topic)
        secure_kafka.quota(flooder, 50_000)
        with Admin.connect(secure_kafka.layout) as admin:
            assert admin.quotas()[flooder] == {"producer_byte_rate": 50_000}
        asked = {one: throttled_ms(secure_kafka, topic, one) for one in (flooder, other)}
        assert asked[flooder] > 1000
        assert asked[other] == 0


def throttled_ms(cluster: Cluster, topic: str, user: str) -> float:
    """The longest pause that a broker asks of a user who writes 1 MB."""
    producer = KafkaProducer(**client_options(cluster.layout, user), acks="all", linger_ms=0)
    try:
        for _ in range(2):
            producer.send(topic, secrets.token_bytes(500_000)).get(timeout=60)
        metrics = producer.metrics()
        return max(group.get("throttle-time-max", 0.0) for group in metrics.values())
    finally:
        producer.close(timeout=0)
