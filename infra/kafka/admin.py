"""What an administrator does in a cluster: topics, users, who may do what, quotas."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import kafka.errors
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ConfigResource,
    KafkaAdminClient,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    UserScramCredentialUpsertion,
)
from kafka.protocol.admin import AlterClientQuotasRequest, DescribeClientQuotasRequest

from infra.kafka import tls
from infra.kafka.layout import ADMIN, HEADROOM, SCRAM, Layout
from sapo.core.errors import UserError

TIMEOUT_S = 20.0
SETTLE_S = 5.0
PAUSE_S = 0.1
AWAY = (
    kafka.errors.KafkaConnectionError,
    kafka.errors.NodeNotReadyError,
    kafka.errors.UnknownBrokerIdError,
)
QUOTAS = ("producer_byte_rate", "consumer_byte_rate")


@dataclass(frozen=True)
class Topic:
    """A topic as the brokers describe it."""

    name: str
    partitions: int
    replication: int
    under_replicated: int
    """Partitions of which not every copy is up to date."""
    retention_hours: float
    """Minus one for ever."""
    max_message_bytes: int
    timestamps: str


@dataclass(frozen=True)
class Right:
    """A user may do something with a topic."""

    user: str
    topic: str
    operation: str


class Admin:
    """A connection as the administrator."""

    def __init__(self, layout: Layout, client: KafkaAdminClient) -> None:
        self._layout, self._client = layout, client

    @classmethod
    @contextlib.contextmanager
    def connect(cls, layout: Layout) -> Iterator[Self]:
        """Connect for the length of a block."""
        admin = cls(layout, _client(layout))
        try:
            yield admin
        finally:
            admin._client.close()

    def create_topic(
        self, name: str, *, partitions: int, max_payload_bytes: int, retention_hours: float
    ) -> bool:
        """Create a topic, unless it is there: then nothing changes. Returns whether it was made.

        Raises UserError for what Kafka does not take.
        """
        copies = self._layout.brokers
        settings = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(max_payload_bytes + HEADROOM),
            "retention.ms": str(round(retention_hours * 3_600_000)),
            "segment.ms": str(round(min(24.0, max(retention_hours / 4, 1 / 60)) * 3_600_000)),
            "cleanup.policy": "delete",
            "min.insync.replicas": str(max(1, copies - 1)),
            "unclean.leader.election.enable": "false",
        }
        wanted = {name: {"num_partitions": partitions, "replication_factor": copies, "configs": settings}}
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._ask("create_topics", wanted, wait_for_metadata=True)
                return True
            except kafka.errors.TopicAlreadyExistsError:
                return False
            except kafka.errors.InvalidReplicationFactorError as error:
                # a broker that has just started may not count yet
                if time.monotonic() > deadline:
                    raise UserError(
                        "topic", name, f"not all {copies} brokers are there", "start them all"
                    ) from error
                time.sleep(PAUSE_S)
            except (
                kafka.errors.InvalidTopicError,
                kafka.errors.InvalidPartitionsError,
                kafka.errors.InvalidConfigurationError,
            ) as error:
                raise UserError("topic", name, f"Kafka refuses it: {_reason(error)}", "correct it") from error

    def topics(self) -> list[Topic]:
        """All topics but Kafka's own."""
        described = [topic for topic in self._ask("describe_topics") if not topic["is_internal"]]
        if not described:
            return []
        names = [topic["name"] for topic in described]
        resources = [ConfigResource("topic", name) for name in names]
        settings = self._ask("describe_configs", resources, config_filter="all")["topic"]
        return [
            _topic(topic, settings[topic["name"]]) for topic in sorted(described, key=lambda t: t["name"])
        ]

    def add_user(self, name: str) -> None:
        """Create a user with a password of its own, in a file for its owner; one that is there stays."""
        file = self._layout.password_file(name)
        if file.exists() and name in self.users():
            return
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            tls.write_private(file, secrets.token_urlsafe(24).encode())
        password = file.read_text(encoding="ascii").strip()
        problem = self._ask(
            "alter_user_scram_credentials", [UserScramCredentialUpsertion(name, SCRAM, password)]
        )[name]
        if problem is not None:
            raise UserError("user", name, f"Kafka refuses it: {problem}", "choose another name")

        if not self.knows(name):
            raise UserError("user", name, "the brokers do not know it yet", "make it again")

    def knows(self, name: str) -> bool:
        """Whether there is such a user; one made here a moment ago counts, which brokers learn of later."""
        made_here = self._layout.password_file(name).exists()
        deadline = time.monotonic() + (SETTLE_S if made_here else 0.0)
        while name not in self.users():
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    def users(self) -> list[str]:
        """The names of all users, the administrator among them."""
        return sorted(self._ask("describe_user_scram_credentials"))

    def allow(self, user: str, topic: str, *, write: bool, read: bool) -> None:
        """Let a user write to a topic and read it; who may do either may also see its settings."""
        operations = [ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS]
        operations += [ACLOperation.WRITE] * write + [ACLOperation.READ] * read
        pattern = ResourcePattern(ResourceType.TOPIC, topic)
        result = self._ask(
            "create_acls",
            [
                ACL(f"User:{user}", "*", operation, ACLPermissionType.ALLOW, pattern)
                for operation in operations
            ],
        )
        for failed in result["failed"]:
            raise UserError("acl", user, f"Kafka refuses it: {failed.__name__}", "see the broker's log")

    def rights(self) -> list[Right]:
        """Who may do what; the administrator, who may do everything, is not named."""
        anything = ResourcePatternFilter(ResourceType.TOPIC, None, ACLResourcePatternType.ANY)
        found, _ = self._ask(
            "describe_acls",
            ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ALLOW, anything),
        )
        rights = [
            Right(
                acl.principal.removeprefix("User:"),
                acl.resource_pattern.resource_name,
                acl.operation.name.lower(),
            )
            for acl in found
        ]
        return sorted(rights, key=lambda right: (right.user, right.topic, right.operation))

    def set_quota(self, user: str, kind: str, bytes_per_second: int) -> None:
        """Bound how many bytes a user may produce or consume (`kind` is one of QUOTAS), per broker.

        Returns once the broker that is asked knows the bound, which takes it a moment.
        """
        entry = AlterClientQuotasRequest.EntryData
        request = AlterClientQuotasRequest(
            entries=[
                entry(
                    entity=[entry.EntityData(entity_type="user", entity_name=user)],
                    ops=[entry.OpData(key=kind, value=float(bytes_per_second), remove=False)],
                )
            ],
            validate_only=False,
        )
        for result in self._send(request).entries:
            if result.error_code:
                raise UserError("quota", user, f"Kafka refuses it: {result.error_message}", "correct it")
        deadline = time.monotonic() + TIMEOUT_S
        while self.quotas().get(user, {}).get(kind) != bytes_per_second and time.monotonic() < deadline:
            time.sleep(0.1)

    def quotas(self) -> dict[str, dict[str, int]]:
        """Bytes a second by user and kind."""
        component = DescribeClientQuotasRequest.ComponentData
        any_of_them = 2
        request = DescribeClientQuotasRequest(
            components=[component(entity_type="user", match_type=any_of_them, match=None)], strict=False
        )
        found: dict[str, dict[str, int]] = {}
        for entry in self._send(request).entries or ():
            name = entry.entity[0].entity_name or "(default)"
            found[name] = {value.key: int(value.value) for value in entry.values}
        return dict(sorted(found.items()))

    def _send(self, request: Any) -> Any:
        # kafka-python has the messages for quotas, but no method that sends them
        return self._again(lambda client: client._manager.run(client._manager.send, request))

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._again(lambda client: getattr(client, method)(*arguments, **options))

    def _again(self, call: Callable[[KafkaAdminClient], Any]) -> Any:
        """Call with the client, and with a new one while the broker that it asks is away.

        kafka-python asks any broker, and one for all changes, whether they are there or not.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return call(self._client)
            except AWAY:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)
                self._client.close()
                self._client = _client(self._layout)


def _client(layout: Layout) -> KafkaAdminClient:
    return KafkaAdminClient(
        **client_options(layout), bootstrap_timeout_ms=TIMEOUT_S * 1000, client_id="infra.kafka"
    )


def client_options(layout: Layout) -> dict[str, Any]:
    """What kafka-python's clients need to connect, as the administrator."""
    options: dict[str, Any] = {"bootstrap_servers": layout.servers.split(",")}
    if layout.secured:
        options |= {
            "security_protocol": "SASL_SSL",
            "ssl_cafile": str(layout.ca_file),
            "sasl_mechanism": SCRAM,
            "sasl_plain_username": ADMIN,
            "sasl_plain_password": layout.password_file(ADMIN).read_text(encoding="ascii").strip(),
        }
    return options


def _topic(described: dict[str, Any], settings: dict[str, Any]) -> Topic:
    partitions = described["partitions"]
    retention = int(settings["retention.ms"]["value"])
    return Topic(
        name=described["name"],
        partitions=len(partitions),
        replication=len(partitions[0]["replica_nodes"]),
        under_replicated=sum(len(one["isr_nodes"]) < len(one["replica_nodes"]) for one in partitions),
        retention_hours=-1 if retention < 0 else retention / 3_600_000,
        max_message_bytes=int(settings["max.message.bytes"]["value"]),
        timestamps=settings["message.timestamp.type"]["value"],
    )


def _reason(error: Exception) -> str:
    return type(error).__name__.removesuffix("Error")
