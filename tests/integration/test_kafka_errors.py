"""A Kafka bus that cannot be used: each cause has its own message, names its setting, and is told at once."""

import logging
import os
import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient
from makers import make_signed

from infra.kafka.cluster import Cluster
from sapo import cli
from sapo.bus.base import Limits
from sapo.bus.kafka import connection
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.kafka.diagnose import BusFacts, check
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import Unavailable, UserError

pytestmark = pytest.mark.kafka

LIMIT_S = 10.0
NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True)
class Places:
    """A topic on a plain and on a secured cluster, with users who may do this and that."""

    plain: Cluster
    secure: Cluster
    topic: str
    password: str

    def section(self, user: str | None = "both", **changes: Any) -> dict[str, str]:
        """[bus] of the secured cluster; None takes a key out."""
        values = self.secure.bus(self.topic, f"{user}-{self.topic}") | changes
        return {key: value for key, value in values.items() if value is not None}


@pytest.fixture(scope="module")
def places(kafka: Cluster, secure_kafka: Cluster) -> Places:
    topic = f"errors-{secrets.token_hex(4)}"
    kafka.create_topic(topic, partitions=3)
    secure_kafka.create_topic(topic, partitions=3)
    for user, rights in {"both": (True, True), "reader": (False, True), "writer": (True, False)}.items():
        secure_kafka.add_user(f"{user}-{topic}")
        secure_kafka.allow(f"{user}-{topic}", topic, write=rights[0], read=rights[1])
    password = secure_kafka.add_user(f"nobody-{topic}").read_text()
    return Places(kafka, secure_kafka, topic, password)


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(tmp_path_factory.mktemp("expired"), secured=True, certificate_days=-1) as cluster:
        yield cluster


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, without settings from outside."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in [name for name in os.environ if name.startswith("SAPO_")]:
        monkeypatch.delenv(name)
    return here


def look(section: Mapping[str, Any], **rights: Any) -> BusFacts:
    found = Section.model_validate(section)
    return check(found, found.topic or "sapo.tiny", max_payload_bytes=1_000_000, **rights)


def fault(section: Mapping[str, Any], **rights: Any) -> UserError:
    """The error for a section, which must come in time."""
    begun = time.monotonic()
    with pytest.raises(UserError) as caught:
        look(section, **rights)
    assert time.monotonic() - begun < LIMIT_S
    assert caught.value.remedy
    return caught.value


def arguments(section: Mapping[str, str]) -> list[str]:
    return [part for key, value in section.items() for part in ("--set", f"bus.{key}={value}")]


def refused(section: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `sapo swarm` says of a section it must refuse."""
    begun = time.monotonic()
    assert cli.invoke(["swarm", *arguments(section)]) == 2
    assert time.monotonic() - begun < LIMIT_S
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error: .+\n", shown.err), shown.err
    assert list(Path.cwd().iterdir()) == []
    return shown.err


@pytest.mark.parametrize(
    ("section", "field", "problem"),
    [
        (lambda places: {"type": "kafka", "servers": NOWHERE}, "bus.servers", "nobody listens there"),
        (lambda places: places.section(password="env:WRONG_PASSWORD"), "bus.password", "does not let user"),
        (lambda places: places.section("reader"), "bus.username", "may not write to topic"),
        (lambda places: places.section("writer"), "bus.username", "may not read topic"),
        (lambda places: places.plain.bus("nowhere"), "bus.topic", "no such topic"),
        (
            lambda places: places.plain.bus(places.topic) | {"cluster_id": places.secure.cluster_id},
            "bus.cluster_id",
            "cluster",
        ),
        (lambda places: places.section(ca_file=None, username=None), "bus.servers", "plain text"),
    ],
)
def test_each_cause_names_its_field_and_ends_the_command(
    places: Places,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    section: Callable[[Places], dict[str, str]],
    field: str,
    problem: str,
) -> None:
    monkeypatch.setenv("WRONG_PASSWORD", "not-the-password")
    error, said = fault(section(places)), refused(section(places), capsys)
    assert error.field == field
    assert field in said
    assert problem in said
    assert "not-the-password" not in said


def test_the_certificate_has_expired(expired: Cluster) -> None:
    error = fault(expired.bus("any"))
    assert (error.field, error.value) == ("bus.servers", expired.servers)
    assert "certificate has expired" in error.problem


def test_messages_may_be_larger_than_the_topic_takes(places: Places) -> None:
    topic = f"narrow-{secrets.token_hex(4)}"
    places.plain.create_topic(topic, partitions=1, max_payload_bytes=10_000)
    error = fault(places.plain.bus(topic))
    assert (error.field, error.value) == ("rules.max_payload_bytes", 1_000_000)


class TestMore:
    def test_all_is_well(self, places: Places) -> None:
        facts = look(places.section())
        assert facts.cluster_id == places.secure.cluster_id
        assert (facts.topic, facts.partitions, facts.brokers) == (places.topic, 3, (places.secure.servers,))
        assert facts.max_message_bytes is not None
        assert facts.max_message_bytes > 1_000_000
        assert look(places.section("reader"), write=False).partitions == 3  # the archive's way

    def test_a_certificate_for_another_name(self, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
        host, _, port = places.secure.servers.rpartition(":")
        monkeypatch.setattr(connection, "resolve", lambda *_: [(host, int(port))])
        error = fault(places.section(servers=f"kafka.example:{port}"))
        assert error.field == "bus.servers"
        assert "certificate is for another name" in error.problem

    @pytest.mark.parametrize(
        ("settings", "remedy"),
        [
            ({"message.timestamp.type": "CreateTime"}, "LogAppendTime"),
            ({"message.timestamp.type": "LogAppendTime", "compression.type": "snappy"}, "zstd"),
        ],
    )
    def test_a_topic_whose_setting_makes_messages_useless(
        self, places: Places, settings: dict[str, str], remedy: str
    ) -> None:
        topic = f"set-{secrets.token_hex(4)}"
        admin = KafkaAdminClient(bootstrap_servers=places.plain.servers)
        # a setting changed later takes a while to reach the broker that is asked
        wanted = {topic: {"num_partitions": 1, "replication_factor": 1, "configs": settings}}
        admin.create_topics(wanted, wait_for_metadata=True)
        admin.close()
        error = fault(places.plain.bus(topic))
        assert error.field == "bus.topic"
        assert remedy in error.remedy

    def test_a_broker_that_is_paused(self, places: Places) -> None:
        places.secure.pause(0)
        try:
            error = fault(places.section())
        finally:
            places.secure.resume(0)
        assert error.field == "bus.servers"
        assert "answer" in error.problem


class TestRights:
    def test_a_right_that_is_taken_away_in_a_run_is_an_outage(self, places: Places) -> None:
        """A node that may not publish goes on by itself; what it owes is delivered when it may again."""
        bus = open_as(places, "both")
        sent = make_signed()
        bus.publish([sent])
        bus.close()
        reader, writer = open_as(places, "reader"), open_as(places, "writer")
        (one,) = reader.poll({}, Limits(), random.Random(0)).received
        assert one.signed == sent
        with pytest.raises(Unavailable, match="not allowed"):
            reader.publish([sent])
        writer.publish([sent])
        with pytest.raises(Unavailable, match="not allowed"):
            writer.poll({}, Limits(), random.Random(0))
        reader.close()
        writer.close()

    def test_a_password_is_fetched_for_each_connection(
        self, places: Places, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that one that was changed is used without a restart."""
        right = Path(places.section()["password"].removeprefix("file:")).read_text().strip()
        monkeypatch.setenv("SAPO_KAFKA_PASSWORD", "not it")
        skew = [0.0]
        section = Section.model_validate(places.section(password="env:SAPO_KAFKA_PASSWORD"))
        bus = KafkaBus(section, places.topic, clock=lambda: time.monotonic() + skew[0])
        with pytest.raises(Unavailable, match="does not let user"):
            bus.poll({}, Limits(), random.Random(0))
        monkeypatch.setenv("SAPO_KAFKA_PASSWORD", right)
        skew[0] = 60
        bus.poll({}, Limits(), random.Random(0))
        bus.close()


def open_as(places: Places, user: str) -> KafkaBus:
    return KafkaBus(Section.model_validate(places.section(user)), places.topic)


class TestCommands:
    def test_a_wrong_password_ends_the_command_and_is_never_shown(
        self, places: Places, elsewhere: Path
    ) -> None:
        begun = time.monotonic()
        section = places.section(password="env:SAPO_KAFKA_PASSWORD")
        env = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        done = subprocess.run(
            [sys.executable, "-m", "sapo.cli", "node", "n0", *arguments(section)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=elsewhere,
            env=env | {"SAPO_KAFKA_PASSWORD": places.password.strip()},  # another user's
        )
        assert time.monotonic() - begun < LIMIT_S
        assert done.returncode == 2, done.stderr
        assert "bus.password" in done.stderr
        assert places.password.strip() not in done.stdout + done.stderr
        assert list(elsewhere.iterdir()) == []

    def test_no_log_record_holds_a_password(
        self, places: Places, caplog: pytest.LogCaptureFixture, elsewhere: Path
    ) -> None:
        caplog.set_level(logging.DEBUG)
        logging.getLogger("kafka").setLevel(logging.DEBUG)
        try:
            section = Section.model_validate(places.section())
            bus = KafkaBus(section, places.topic)
            bus.poll({}, Limits(), random.Random(0))
            bus.close()
            look(places.section())
        finally:
            logging.getLogger("kafka").setLevel(logging.CRITICAL)
        file = places.section()["password"].removeprefix("file:")
        password = Path(file).read_text().strip()
        assert password not in caplog.text
        assert password not in repr(bus) + repr(section) + repr(vars(bus._reader))
