"""Why a Kafka bus cannot be used, step by step: each cause gets its own message, within seconds.

kafka-python reports most of them as "Unable to bootstrap". Here a server that can be reached is asked one
thing after the other, and the first wrong answer is reported.
"""

import ssl
import time
from dataclasses import dataclass

from kafka.errors import SaslAuthenticationFailedError
from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.sasl import SaslHandshakeRequest

from sapo.bus.kafka.connection import MECHANISM, Broken, Connection, encrypted, trusted
from sapo.bus.kafka.metadata import Layout, NoTopic, ask, split_servers
from sapo.bus.kafka.record_batch import CODECS
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.config.secrets import fetch
from sapo.core.errors import Unavailable, UserError

READ, WRITE = 3, 4
"""Kafka's numbers of operations."""
TOPIC = 2
"""Kafka's number of the resource type."""
RECORD_OVERHEAD = 1024
"""Bytes a message needs besides its payload, at most: key, headers, batch header."""
KEPT_AS_SENT = "producer"
"""The compression.type of a topic whose batches stay as their writer packed them."""
LIMIT_S, STALL_S = 8.0, 3.0
"""Seconds of a whole check, and of one wait in it."""
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64
"""OpenSSL's numbers of what is wrong with a certificate."""


@dataclass(frozen=True, slots=True)
class BusFacts:
    """What a check found: the cluster's id and brokers, the topic's partitions, and its limit in bytes."""

    cluster_id: str
    brokers: tuple[str, ...]
    topic: str
    partitions: int
    max_message_bytes: int | None
    """None where this client may not ask for it."""


def check(section: Section, topic: str, *, max_payload_bytes: int, write: bool = True) -> BusFacts:
    """Connect with the config's settings and check that the bus is usable.

    One server that works is enough; otherwise the first one's fault is reported. Raises `UserError` whose
    field is the setting at fault, in `LIMIT_S` seconds and a little.
    """
    end = time.monotonic() + LIMIT_S
    if section.username is not None:
        _check_password(section)
    if encrypted(section):
        _check_authorities(section)
    faults: list[UserError] = []
    for host, port in split_servers(section.servers):
        left = end - time.monotonic()
        if faults and left < 0.5:
            break
        connection = Connection(host, port, section, stall_s=min(STALL_S, max(left / 2, 0.5)))
        try:
            connection.open()
            return _examine(connection, section, topic, max_payload_bytes, write)
        except Broken as error:
            faults.append(_explain(error, section))
        finally:
            connection.close()
    raise faults[0]


def _check_password(section: Section) -> None:
    try:
        fetch(section.password, "bus.password")
    except Unavailable as error:
        remedy = "start Prefect, or put the password into a file or the environment"
        raise UserError("bus.password", section.password, str(error), remedy) from None


def _check_authorities(section: Section) -> None:
    try:
        trusted(section)
    except OSError as error:
        problem = "holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
        remedy = "name a PEM file with the certificates of the authorities that signed the brokers'"
        raise UserError("bus.ca_file", section.ca_file, problem, remedy) from None


def _examine(
    connection: Connection, section: Section, topic: str, max_payload_bytes: int, write: bool
) -> BusFacts:
    who = "nobody in particular" if section.username is None else f"user {section.username!r}"
    try:
        layout = ask(connection, topic, rights=True)
    except NoTopic as error:
        _refuse_cluster(section, error.cluster_id)
        if error.forbidden:
            raise _forbidden(section, f"{who} may not even see topic {topic!r}", topic) from None
        remedy = (
            "create it (`python -m infra.kafka topic` in a checkout of sapo), or name a topic that is there"
        )
        raise UserError("bus.topic", topic, f"no such topic on {connection.server}", remedy) from None
    _refuse_cluster(section, layout.cluster_id)
    for wanted, operation, verb in ((write, WRITE, "write to"), (True, READ, "read")):
        if wanted and operation not in layout.operations:
            raise _forbidden(section, f"{who} may not {verb} topic {topic!r}", topic)
    limits = _limits(connection, topic)
    _check_limits(limits, topic, max_payload_bytes)
    _check_brokers(connection, section, layout)
    brokers = tuple(f"{host}:{port}" for host, port in layout.brokers.values())
    limit = limits.get("max.message.bytes")
    return BusFacts(
        layout.cluster_id, brokers, topic, len(layout.places), None if limit is None else int(limit)
    )


def _refuse_cluster(section: Section, found: str) -> None:
    if section.cluster_id is not None and found != section.cluster_id:
        remedy = "name the servers of the cluster that is meant, or correct or remove bus.cluster_id"
        raise UserError("bus.cluster_id", section.cluster_id, f"the servers are of cluster {found!r}", remedy)


def _forbidden(section: Section, problem: str, topic: str) -> UserError:
    remedy = (
        "have the cluster's keeper allow it (`python -m infra.kafka acl` in a checkout of sapo), "
        "or name another user or topic"
    )
    return UserError("bus.username", section.username, problem, remedy)


def _limits(connection: Connection, topic: str) -> dict[str, str]:
    """The topic's settings that matter here; empty where this client may not ask."""
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=TOPIC,
        resource_name=topic,
        configuration_keys=["max.message.bytes", "message.timestamp.type", "compression.type"],
    )
    request = DescribeConfigsRequest(
        resources=[resource], include_synonyms=False, include_documentation=False
    )
    answer = connection.call(request, max_version=4)
    return {
        config.name: config.value
        for result in answer.results
        if result.error_code == 0
        for config in result.configs
    }


def _check_limits(limits: dict[str, str], topic: str, max_payload_bytes: int) -> None:
    limit = limits.get("max.message.bytes")
    if limit is not None and int(limit) < max_payload_bytes + RECORD_OVERHEAD:
        needed = max_payload_bytes + RECORD_OVERHEAD
        raise UserError(
            "rules.max_payload_bytes",
            max_payload_bytes,
            f"topic {topic!r} takes messages of {limit} bytes at most (its max.message.bytes)",
            f"set it to {max(1, int(limit) - RECORD_OVERHEAD)} or less, or the topic's to {needed} or more",
        )
    stamped = limits.get("message.timestamp.type", "LogAppendTime")
    if stamped != "LogAppendTime":
        problem = f"its message.timestamp.type is {stamped}: the age of a message would be its author's word"
        raise UserError(
            "bus.topic", topic, problem, "set the topic's message.timestamp.type to LogAppendTime"
        )
    packed = limits.get("compression.type", KEPT_AS_SENT)
    if packed not in (KEPT_AS_SENT, *CODECS):
        problem = f"its compression.type is {packed}, which sapo does not read"
        remedy = f"set the topic's compression.type to {KEPT_AS_SENT}, or to {', '.join(CODECS)}"
        raise UserError("bus.topic", topic, problem, remedy)


def _check_brokers(connection: Connection, section: Section, layout: Layout) -> None:
    """Raise `UserError` when none of the addresses that the brokers give themselves can be reached."""
    fault: Broken | None = None
    for host, port in layout.brokers.values():
        if f"{host}:{port}" == connection.server:
            return
        other = Connection(host, port, section, stall_s=1.0)
        try:
            other.open()
            return
        except Broken as error:
            fault = error
        finally:
            other.close()
    if fault is not None:
        problem = f"the cluster names {fault.server} as a broker's address, and there: {fault.cause}"
        raise UserError("bus.servers", section.servers, problem, "correct the brokers' advertised.listeners")


def _explain(error: Broken, section: Section) -> UserError:
    server, origin = error.server, error.origin
    if error.step in ("resolve", "connect"):
        remedy = "start the broker, or name servers that are there"
        return UserError("bus.servers", server, error.cause, remedy)
    if isinstance(origin, TimeoutError):
        return UserError("bus.servers", server, error.cause, "see whether the broker is paused or overloaded")
    if isinstance(origin, ssl.SSLCertVerificationError):
        return _explain_certificate(origin, server, section)
    if error.step == "tls":
        remedy = "name its TLS port, or leave out bus.username and bus.ca_file if it has none"
        problem = f"nobody speaks TLS there, and bus.username or bus.ca_file asks for it ({error.cause})"
        return UserError("bus.servers", server, problem, remedy)
    if isinstance(origin, SaslAuthenticationFailedError):
        problem = f"{server} does not let user {section.username!r} in with the password there"
        remedy = "put this user's password there, or correct bus.username"
        return UserError("bus.password", section.password, problem, remedy)
    if error.step == "login":
        remedy = f"name a port with logins by {MECHANISM}, or leave out bus.username"
        return UserError("bus.username", section.username, f"{server} {error.cause}", remedy)
    if error.step == "hello" and not encrypted(section):
        problem = f"no Kafka broker speaks plain text there ({error.cause})"
        remedy = "if it is a TLS port, set bus.ca_file, and bus.username where it asks for a login"
        return UserError("bus.servers", server, problem, remedy)
    if section.username is None and _wants_login(server, section):
        remedy = "set bus.username and bus.password"
        return UserError("bus.username", None, f"{server} asks for a login", remedy)
    return UserError("bus.servers", server, error.cause, "see the broker's log")


def _explain_certificate(origin: ssl.SSLCertVerificationError, server: str, section: Section) -> UserError:
    code = origin.verify_code
    if code in (EXPIRED, NOT_YET):
        problem = "its certificate has expired" if code == EXPIRED else "its certificate is not valid yet"
        return UserError(
            "bus.servers", server, problem, "renew the broker's certificate, or see to the clocks"
        )
    if code in (WRONG_NAME, WRONG_ADDRESS):
        problem = f"its certificate is for another name ({origin.verify_message})"
        return UserError("bus.servers", server, problem, "name the broker as its certificate does")
    problem = f"does not vouch for the certificate of {server} ({origin.verify_message})"
    remedy = "name the file with the certificate of the authority that signed the broker's"
    return UserError("bus.ca_file", section.ca_file, problem, remedy)


def _wants_login(server: str, section: Section) -> bool:
    host, _, port = server.rpartition(":")
    connection = Connection(host, int(port), section, stall_s=1.0)
    try:
        answer = connection.open().call(SaslHandshakeRequest(mechanism=MECHANISM), max_version=1)
        return bool(answer.mechanisms)
    except Broken:
        return False
    finally:
        connection.close()
