"""What lies in a cluster's folder: its description, and per broker the files that Kafka is started with."""

import base64
import json
import random
import socket
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from infra.kafka import tls
from sapo.core.atomic_file import write_atomically
from sapo.core.errors import UserError

LOOPBACK = "127.0.0.1"
SIZES = (1, 3)
ADMIN = "admin"
"""The user that may do everything; no other may have this name."""
FIRST_PORT = 10_000
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
HEADROOM = 65_536
"""Bytes of a message beside its payload: key, headers and what a record batch adds."""


@dataclass(frozen=True)
class Layout:
    """A cluster as its folder's `cluster.json` describes it."""

    folder: Path
    cluster_id: str
    host: str
    secured: bool
    certificate_days: int
    ports: tuple[int, ...]
    """Where clients connect, one per broker."""
    inner_ports: tuple[int, ...]
    """Two per broker, on loopback only: controllers among themselves, then brokers among themselves."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The cluster of a folder; None where there is none yet.

        Raises UserError when the description can't be read.
        """
        try:
            content = json.loads((folder / "cluster.json").read_text(encoding="utf-8"))
            content["ports"], content["inner_ports"] = tuple(content["ports"]), tuple(content["inner_ports"])
            return cls(folder=folder, **content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise UserError(
                "dir", str(folder), "its cluster.json can't be read", "choose another folder"
            ) from None

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        brokers: int,
        secured: bool,
        host: str = LOOPBACK,
        ports: Sequence[int] | None = None,
        certificate_days: int = tls.DAYS,
    ) -> Self:
        """A new cluster in `folder`, not written yet. Raises UserError for what can't be."""
        if brokers not in SIZES:
            raise UserError("brokers", brokers, "a cluster has one broker or three", "choose 1 or 3")
        if ports is not None and len(ports) != brokers:
            raise UserError("ports", list(ports), f"there are {brokers} brokers", "name one port for each")
        if host in ("", "0.0.0.0", "::"):
            raise UserError("host", host, "clients can't connect to it", "name one address of this machine")
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # Kafka's tools would take a leading dash for an option
        cluster_id = cluster_id.replace("-", "_")
        made = cls(folder, cluster_id, host, secured, certificate_days, (), ())
        return made.with_ports(ports, brokers)

    def with_ports(self, ports: Sequence[int] | None = None, brokers: int | None = None) -> Self:
        """The same with ports that are free now: its own where possible, else others.

        Raises UserError when one of `ports`, which were asked for, is in use.
        """
        for port in ports or ():
            if not free(self.host, port):
                problem = f"{self.host}:{port} is in use, or no address of this machine"
                raise UserError("ports", port, problem, "choose another")
        count = brokers or len(self.ports)
        taken: set[int] = set(ports or ())
        outer = tuple(ports or _keep_or_choose(self.host, self.ports, count, taken))
        inner = _keep_or_choose(LOOPBACK, self.inner_ports, 2 * count, taken)
        return replace(self, ports=outer, inner_ports=tuple(inner))

    @property
    def brokers(self) -> int:
        """How many brokers it has."""
        return len(self.ports)

    @property
    def servers(self) -> str:
        """Where clients connect: `host:port,host:port`."""
        return ",".join(f"{self.host}:{port}" for port in self.ports)

    @property
    def ca_file(self) -> Path | None:
        """The certificate of the authority that clients must trust; None where nothing is secured."""
        return self.folder / "tls" / "ca.pem" if self.secured else None

    def password_file(self, user: str) -> Path:
        """Where the password of a user is, for their eyes only."""
        return self.folder / "users" / f"{user}.password"

    def broker_folder(self, broker: int) -> Path:
        """The files of one broker."""
        return self.folder / f"broker-{broker}"

    def write(self) -> None:
        """Write the description and what each broker is started with; data and certificates stay."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.secured:
            tls.prepare(self.folder / "tls", host=self.host, days=self.certificate_days)
        for broker in range(self.brokers):
            place = self.broker_folder(broker)
            (place / "tmp").mkdir(parents=True, exist_ok=True)
            text = "".join(f"{key}={value}\n" for key, value in self._properties(broker).items())
            (place / "server.properties").write_text(text, encoding="utf-8")
            (place / "log4j2.properties").write_text(LOGGING, encoding="utf-8")
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        write_atomically(self.folder / "cluster.json", json.dumps(content, indent=1))

    def _properties(self, broker: int) -> dict[str, object]:
        place = self.broker_folder(broker)
        controllers, among = self.inner_ports[: self.brokers], self.inner_ports[self.brokers :]
        listeners = [f"CLIENT://{self.host}:{self.ports[broker]}", f"BROKER://{LOOPBACK}:{among[broker]}"]
        voters = ",".join(f"{number}@{LOOPBACK}:{port}" for number, port in enumerate(controllers))
        copies = min(self.brokers, 3)
        return {
            "process.roles": "broker,controller",
            "node.id": broker,
            "listeners": ",".join([*listeners, f"CONTROLLER://{LOOPBACK}:{controllers[broker]}"]),
            "advertised.listeners": ",".join(listeners),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "BROKER",
            "controller.quorum.voters": voters,
            "log.dirs": place / "data",
            **(self._security() if self.secured else PLAIN),
            "default.replication.factor": copies,
            "min.insync.replicas": max(1, copies - 1),
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": max(1, copies - 1),
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": max(1, copies - 1),
            **FIXED,
        }

    def _security(self) -> dict[str, object]:
        """Clients show a password over TLS; brokers and controllers show each other a certificate."""
        tls_folder = self.folder / "tls"
        inner = {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": tls_folder / tls.INNER,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": tls_folder / "ca.pem",
            "ssl.client.auth": "required",
        }
        mapped = {
            f"listener.name.{name}.{key}": value
            for name in ("broker", "controller")
            for key, value in inner.items()
        }
        return {
            "listener.security.protocol.map": "CLIENT:SASL_SSL,BROKER:SSL,CONTROLLER:SSL",
            **inner,
            **mapped,
            "listener.name.client.ssl.keystore.type": "PEM",
            "listener.name.client.ssl.keystore.location": tls_folder / tls.OUTER,
            "listener.name.client.ssl.client.auth": "none",
            "sasl.enabled.mechanisms": SCRAM,
            "listener.name.client.sasl.enabled.mechanisms": SCRAM,
            f"listener.name.client.{SCRAM.lower()}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": f"User:{ADMIN};User:{tls.inner_principal(tls_folder)}",
        }


SCRAM = "SCRAM-SHA-512"

PLAIN: dict[str, object] = {
    "listener.security.protocol.map": "CLIENT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
}

FIXED: dict[str, object] = {
    "auto.create.topics.enable": "false",
    "num.partitions": 12,
    "log.message.timestamp.type": "LogAppendTime",
    "unclean.leader.election.enable": "false",
    "log.retention.hours": 168,
    "log.segment.bytes": 67_108_864,
    # a broker that is gone is noticed in seconds, so that its partitions get another leader
    "broker.heartbeat.interval.ms": 1000,
    "broker.session.timeout.ms": 6000,
    "replica.lag.time.max.ms": 10_000,
    # what follows fits a small machine: few threads, small buffers, nothing for thousands of clients
    "num.network.threads": 2,
    "num.io.threads": 3,
    "background.threads": 2,
    "num.recovery.threads.per.data.dir": 1,
    "log.cleaner.threads": 1,
    "log.cleaner.dedupe.buffer.size": 4_194_304,
    "log.index.size.max.bytes": 1_048_576,
    "offsets.topic.num.partitions": 1,
    "offsets.topic.segment.bytes": 16_777_216,
    "transaction.state.log.num.partitions": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "group.initial.rebalance.delay.ms": 0,
}

LOGGING = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:sapo.folder}/server.log
appender.file.filePattern = ${sys:sapo.folder}/server.log.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{ISO8601} %-5p %c{1}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 5MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
logger.authorizer.name = kafka.authorizer.logger
logger.authorizer.level = warn
logger.config.name = kafka.server.KafkaConfig
logger.config.level = warn
"""


def free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # a port whose last connections are still closing is free; one with a listener is not
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _keep_or_choose(host: str, kept: Sequence[int], count: int, taken: set[int]) -> list[int]:
    chosen = []
    for index in range(count):
        port = kept[index] if index < len(kept) else 0
        while not port or port in taken or not free(host, port):
            port = random.randrange(FIRST_PORT, _first_ephemeral())
        taken.add(port)
        chosen.append(port)
    return chosen


def _first_ephemeral() -> int:
    """Ports from here on may be given to any outgoing connection.

    A broker that is down for a moment would lose such a port: to anybody, even to a client that tries to
    reach it and so connects to itself.
    """
    try:
        first = int(EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return max(first, FIRST_PORT + 1000)
