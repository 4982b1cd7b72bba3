"""The services of docker/compose.yaml as processes of this machine, for there is no Docker engine in a test.

Command, environment and health check of each are the file's own; only hosts, ports and folders are replaced.
What an image does before its command (Kafka formats its folder, Postgres makes its database) is done here.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import postgres
import yaml

from infra.kafka.broker import environment as java_environment
from infra.kafka.broker import java_command
from infra.s3.install import install
from sapo.core.child_process import Child, stop_all, tail

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
LOOPBACK = "127.0.0.1"
HOSTS = re.compile(r"\b(kafka|s3|prefect-db|mlflow-db|prefect|mlflow|localhost)(?=:\d)|\b0\.0\.0\.0\b")
PORTS = (9092, 9093, 19092, 7070, 4200, 5000, 5432)


class Site:
    """Everything that compose would start, under one folder; `sets` is more environment for own images."""

    def __init__(self, folder: Path, values: Mapping[str, str], sets: Mapping[str, str]) -> None:
        self.folder, self.values, self._sets = folder, values, sets
        self.services: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())[
            "services"
        ]
        self.ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self.children: dict[str, Child] = {}
        (folder / "tmp").mkdir()

    # -- what compose would make of the file -----------------------------------------------------------------

    def local(self, text: str, *, hosts: bool = True) -> str:
        """A text of the file with its variables, and with this machine's hosts, ports and folders."""
        text = re.sub(r"\$\{([A-Z0-9_]+)(?::[?-]([^}]*))?\}", lambda found: self.values[found[1]], str(text))
        text = HOSTS.sub(LOOPBACK, text) if hosts else text
        text = re.sub(r"(?<=://)(?=:\d)|^(?=:\d)", LOOPBACK, text)
        text = re.sub(r"\b(\d{4,5})\b", lambda found: str(self.ports.get(int(found[1]), found[1])), text)
        text = re.sub(r"^/data\b", str(self.folder / "s3"), text)
        text = text.replace("/var/lib/kafka/data", str(self.folder / "kafka" / "data"))
        return text.replace("/opt/sapo", str(DOCKER))

    def command(self, name: str) -> list[str]:
        """The command of a service."""
        words = self.services[name].get("command", [])
        return [self.local(word, hosts=not word.startswith("--allowed-hosts")) for word in words]

    def environment(self, name: str, instance: str = "") -> dict[str, str]:
        """The environment of a service, and what its image sets."""
        temporary = self.folder / "tmp" / f"{name}{instance}"
        temporary.mkdir(exist_ok=True)
        own = {key: self.local(text) for key, text in self.services[name].get("environment", {}).items()}
        image = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(temporary),
            "TMPDIR": str(temporary),
            "PREFECT_HOME": str(temporary / "prefect"),
            "SAPO_HOME": str(self.folder / "site" / "home"),
            "SAPO_CACHE": os.environ.get("SAPO_CACHE") or str(Path.home() / ".cache" / "sapo"),
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return image | own | (dict(self._sets) if "SAPO_BUS__TYPE" in own else {})

    # -- processes -------------------------------------------------------------------------------------------

    def start(self, name: str, command: Sequence[str] | None = None, *, instance: str = "") -> Child:
        """Start a service, or one of its containers."""
        words = list(command or self.command(name))
        child = Child.start(
            f"{name}{instance}",
            ["-m", "infra.s3.held", *program(words)],
            log=self.folder / f"{name}{instance}.log",
            env=self.environment(name, instance),
        )
        self.children[child.name] = child
        return child

    def once(self, name: str, command: Sequence[str] | None = None) -> str:
        """Run a service that ends; returns its output. Raises `AssertionError` where it fails."""
        words = list(command or self.command(name))
        done = subprocess.run(
            program(words),
            env=self.environment(name),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def well(self, name: str, instance: str = "") -> bool:
        """Whether its health check says that it is well."""
        words = [self.local(word) for word in self.services[name]["healthcheck"]["test"][1:]]
        return not subprocess.run(
            program(words),
            env=self.environment(name, instance),
            capture_output=True,
            timeout=30,
            check=False,
        ).returncode

    def check(self) -> None:
        """Raise `AssertionError` with the end of the log of a process that has failed."""
        for name, child in self.children.items():
            assert not child.poll(), f"{name} ended with {child.poll()}: {tail(child.log, 40)}"

    def stop(self) -> None:
        """End everything."""
        stop_all(list(self.children.values()), 3.0)

    # -- what images do before their command -----------------------------------------------------------------

    def start_kafka(self) -> None:
        """The broker with the properties that its image makes of the environment."""
        place = self.folder / "kafka"
        (place / "tmp").mkdir(parents=True)
        given = self.environment("kafka")
        properties = {
            key.removeprefix("KAFKA_").lower().replace("_", "."): value
            for key, value in given.items()
            if key.startswith("KAFKA_") and key != "KAFKA_HEAP_OPTS"
        }
        file = place / "server.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        format_it = ["format", "--cluster-id", given["CLUSTER_ID"], "--config", str(file)]
        self._java("kafka.tools.StorageTool", format_it)
        self.start("kafka", java_command("kafka.Kafka", [str(file)], place))

    def create_topic(self) -> None:
        """What the service kafka-topic does, by the class that its script runs."""
        self._java("org.apache.kafka.tools.TopicCommand", self.command("kafka-topic"))

    def _java(self, main: str, arguments: Sequence[str]) -> None:
        command = java_command(main, arguments, self.folder / "kafka")
        subprocess.run(command, env=java_environment(), check=True, capture_output=True, timeout=60)

    def start_s3(self) -> None:
        """The store, with the buckets that s3-buckets makes."""
        self.once("s3-buckets", ["mkdir", "-p", *self.command("s3-buckets")])
        self.start("s3", [str(install()), *self.command("s3")])

    def start_postgres(self) -> None:
        """One server with the users, passwords and databases of both database services."""
        accounts = [self.environment(name) for name in ("prefect-db", "mlflow-db")]
        self.children["postgres"] = postgres.start(self.folder / "postgres", self.ports[5432], accounts)


def program(words: Sequence[str]) -> list[str]:
    """A container's command as this machine runs it."""
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    own = Path(sys.executable).parent / words[0]
    return [str(own) if own.exists() else words[0], *words[1:]]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind((LOOPBACK, 0))
        return [int(free.getsockname()[1]) for free in sockets]
    finally:
        for free in sockets:
            free.close()
