"""The parts of `python -m infra.kafka` that need no broker: options, what it prints, folders, pinned jars."""

import json
import os
import re
import socket
import stat
from pathlib import Path

import pytest

from infra.kafka import cli, keep, runtime, tls
from infra.kafka.broker import environment
from infra.kafka.cluster import Cluster, running
from infra.kafka.layout import Layout, free
from sapo.core.errors import Unavailable, UserError

RUNS = {
    "cluster_id": "abc",
    "servers": "127.0.0.1:1,127.0.0.1:2",
    "secured": True,
    "brokers": [{"broker": 0, "pid": 11, "port": 1}, {"broker": 1, "pid": None, "port": 2}],
    "topics": [
        {
            "name": "sapo.tiny",
            "partitions": 12,
            "replication": 3,
            "under_replicated": 4,
            "retention_hours": 168.0,
            "max_message_bytes": 1_065_536,
            "timestamps": "LogAppendTime",
        }
    ],
    "users": ["admin", "site-b"],
    "acls": [{"user": "site-b", "topic": "sapo.tiny", "operation": "read"}],
    "quotas": {"site-b": {"producer_byte_rate": 1000}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster's folder as it is before its first start."""
    Layout.make(tmp_path / "cluster", brokers=1, secured=False).write()
    return tmp_path / "cluster"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which a command with bad input ends."""
    assert cli.main(list(words)) == cli.BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


class TestParser:
    def test_a_command_keeps_its_own_options(self) -> None:
        given = cli.parser().parse_args(
            ["with", "--topic", "t", "--brokers", "3", "--", "sapo", "swarm", "--x"]
        )
        assert given.command == ["sapo", "swarm", "--x"]
        assert (given.topic, given.brokers, given.dir) == ("t", 3, cli.DEFAULT_DIR)

    def test_ports_are_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.parser().parse_args(["start", "--ports", "1,2,3"]).ports == [1, 2, 3]
        with pytest.raises(SystemExit) as caught:
            cli.parser().parse_args(["start", "--ports", "1;2"])
        assert caught.value.code == 2
        assert "numbers joined by commas" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words", [[], ["fly"], ["topic"], ["with", "--topic", "t"], ["acl", "--read-only", "--write-only"]]
    )
    def test_what_is_missing_or_unknown_ends_it(self, words: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2

    def test_the_keeper_gets_what_start_was_given(self) -> None:
        given = cli.parser().parse_args(["start", "--brokers", "3", "--secured", "--ports", "1,2,3"])
        assert cli._wanted(given) == [
            *("--brokers", "3", "--host", "127.0.0.1", "--ports", "1,2,3", "--secured")
        ]


class TestInput:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["status"], "holds no cluster"),
            (["topic", "t"], "no cluster runs there"),
            (["user", "u"], "no cluster runs there"),
            (["acl", "u", "t"], "no cluster runs there"),
            (["quota", "u", "1000"], "no cluster runs there"),
            (["console", "--topic", "t"], "no cluster runs there"),
            (["topic", "t", "--partitions", "0"], "--partitions = 0: must be above zero"),
            (["topic", "t", "--retention-hours", "-1"], "--retention-hours = -1.0: must be above zero"),
            (["with", "--topic", "t", "--max-payload-bytes", "0", "--", "true"], "--max-payload-bytes = 0"),
            (["with", "--topic", "t", "--brokers", "2", "--", "true"], "one broker or three"),
            (["with", "--topic", "t", "--host", "0.0.0.0", "--", "true"], "clients can't connect to it"),
            (["with", "--topic", "t", "--ports", "1,2", "--", "true"], "name one port for each"),
        ],
    )
    def test_bad_input_is_told_in_a_line(
        self,
        words: list[str],
        said: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(runtime, "jars", lambda: tmp_path)
        dashes = words.index("--") if "--" in words else len(words)
        place = ["--dir", str(tmp_path / "none")]
        assert said in refused(capsys, *words[:dashes], *place, *words[dashes:])

    def test_stopping_what_does_not_run_is_no_error(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["stop", "--dir", str(folder)]) == 0
        assert "nothing runs" in capsys.readouterr().out

    def test_brokers_of_another_command_are_not_stopped(self, folder: Path) -> None:
        (folder / keep.PID).write_text(str(os.getpid()))
        with pytest.raises(Unavailable, match="belong to a command that runs"):
            keep.stop(folder, 1.0)

    def test_a_folder_starts_as_what_it_is(self, folder: Path) -> None:
        for wrong, said in (
            ({"brokers": 3}, "has 1 broker"),
            ({"secured": True}, "is plain"),
            ({"host": "localhost"}, "is for 127.0.0.1"),
        ):
            with pytest.raises(UserError, match=said):
                Cluster.start(folder, **wrong)
            assert not running(folder)


class TestStatus:
    def test_a_cluster_that_is_down(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["status", "--dir", str(folder)]) == cli.FAILED
        assert "broker 0" in (shown := capsys.readouterr().out)
        assert shown.endswith("down\n")
        assert cli.main(["status", "--json", "--dir", str(folder)]) == cli.FAILED
        found = json.loads(capsys.readouterr().out)
        assert found["running"] is False
        assert found["brokers"][0]["pid"] is None
        assert "topics" not in found

    def test_all_is_told_in_lines(self) -> None:
        assert cli.told(RUNS).splitlines() == [
            "cluster abc at 127.0.0.1:1,127.0.0.1:2 (SASL/SCRAM over TLS)",
            "broker 0  port 1  pid 11",
            "broker 1  port 2  down",
            "topic sapo.tiny  12 partitions x 3, 4 under-replicated, 168 h, messages to 1065536 bytes, "
            "LogAppendTime",
            "users admin, site-b",
            "acl site-b may read sapo.tiny",
            "quota site-b producer_byte_rate 1000",
        ]


class TestLayout:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        made = Layout.make(tmp_path, brokers=3, secured=False)
        made.write()
        assert Layout.read(tmp_path) == made
        assert len({*made.ports, *made.inner_ports}) == 9
        assert re.fullmatch(r"[A-Za-z0-9_]{22}", made.cluster_id)

    def test_one_that_cannot_be_read_is_named(self, folder: Path) -> None:
        (folder / "cluster.json").write_text("{")
        with pytest.raises(UserError, match=r"cluster\.json can't be read"):
            Layout.read(folder)

    def test_three_brokers_keep_three_copies(self, tmp_path: Path) -> None:
        Layout.make(tmp_path, brokers=3, secured=False).write()
        for number in range(3):
            lines = (tmp_path / f"broker-{number}" / "server.properties").read_text().splitlines()
            assert {"default.replication.factor=3", "min.insync.replicas=2", f"node.id={number}"} <= {*lines}

    def test_only_what_clients_use_listens_for_others(self, tmp_path: Path) -> None:
        Layout.make(tmp_path, brokers=1, secured=False, host="localhost").write()
        lines = (tmp_path / "broker-0" / "server.properties").read_text().splitlines()
        (listeners,) = [line for line in lines if line.startswith("listeners=")]
        assert [part.split("://")[1].rpartition(":")[0] for part in listeners.split(",")] == [
            "localhost",
            "127.0.0.1",
            "127.0.0.1",
        ]

    def test_a_port_in_use_is_refused_when_asked_for_and_else_avoided(self, tmp_path: Path) -> None:
        made = Layout.make(tmp_path, brokers=1, secured=False)
        with socket.create_server(("127.0.0.1", made.ports[0])):
            with pytest.raises(UserError, match="is in use"):
                made.with_ports(made.ports)
            assert made.with_ports().ports != made.ports
        assert made.with_ports().ports == made.ports
        assert free("127.0.0.1", made.ports[0])

    def test_secrets_are_for_their_owner(self, tmp_path: Path) -> None:
        Layout.make(tmp_path, brokers=1, secured=True).write()
        for file in (tmp_path / "tls").iterdir():
            private = b"PRIVATE KEY" in file.read_bytes()
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 or not private, file
        text = (tmp_path / "broker-0" / "server.properties").read_text()
        assert "password" not in text
        assert f"User:{tls.inner_principal(tmp_path / 'tls')}" in text


class TestJars:
    def test_every_jar_is_pinned_by_its_digest(self) -> None:
        jars = runtime.pinned()
        assert len(jars) > 30
        for jar in jars:
            assert re.fullmatch(r"[0-9a-f]{64}", jar.sha256), jar
            assert all(re.fullmatch(r"[\w.-]+", part) for part in (jar.group, jar.artifact, jar.version)), jar
        assert len({jar.file for jar in jars}) == len(jars)
        assert {jar.version for jar in jars if jar.group == "org.apache.kafka"} == {runtime.VERSION}

    def test_a_folder_that_is_whole_is_not_fetched_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetched: list[Path] = []

        def fetch_all(wanted: list[runtime.Jar], folder: Path, progress: runtime.Progress) -> None:
            fetched.append(folder)
            for jar in wanted:
                (folder / jar.file).touch()

        monkeypatch.setattr(runtime, "_fetch_all", fetch_all)
        place = runtime.jars(tmp_path)
        assert runtime.jars(tmp_path) == place
        assert len(fetched) == 1
        (place / runtime.pinned()[0].file).unlink()
        runtime.jars(tmp_path)
        assert len(fetched) == 2

    def test_brokers_get_little_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAPO_KAFKA_PASSWORD", "secret")
        monkeypatch.setenv("PATH", "/bin")
        assert "secret" not in environment().values()
        assert environment()["PATH"] == "/bin"
