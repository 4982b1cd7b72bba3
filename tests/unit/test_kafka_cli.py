"""The parts of `python -m infra.kafka` that need no broker: options, what it prints, folders, pinned jars."""

import re
import socket
import stat
from pathlib import Path

import pytest

from infra.kafka import runtime, tls
from infra.kafka.broker import environment
from infra.kafka.layout import Layout, free
from sapo.core.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster's folder as it is before its first start."""
    Layout.make(tmp_path / "cluster", brokers=1, secured=False).write()
    return tmp_path / "cluster"


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
