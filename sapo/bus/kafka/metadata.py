"""Where a topic is in a Kafka cluster: which partitions it has, who leads them, and connections there.
Brokers that failed rest here (`Link.rest`), and rounds are spared a slow bus by `sapo.bus.poller`."""

import base64
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kafka.protocol.metadata import MetadataRequest

from sapo.bus.kafka.connection import Broken, Connection
from sapo.core.config.schema import KafkaBus as Section

FRESH_S = 10.0
"""How old what is known of a topic may get: new partitions are read that much later at most."""
STALL_S = 3.0
"""How long a silent broker is waited for, as long as all is well."""
REST_S = 5.0
"""How long a broker that failed is left alone."""
PROBE_S = 1.0
"""How long one that failed is waited for when it is tried again."""


class NoTopic(Exception):
    """The cluster does not show the topic to this client."""

    def __init__(self, topic: str, code: int, cluster_id: str) -> None:
        self.topic, self.code, self.cluster_id = topic, code, cluster_id
        what = "may not be seen by this client" if self.forbidden else "is not there"
        super().__init__(f"topic {topic!r} {what}")

    @property
    def forbidden(self) -> bool:
        """Whether it is a matter of rights."""
        return self.code == 29


@dataclass(frozen=True, slots=True)
class Place:
    """One partition: its number, its leader (None: no leader now), and the leader epoch."""

    number: int
    leader: int | None
    epoch: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What one answer said of a topic and its cluster."""

    topic_id: uuid.UUID
    cluster_id: str
    brokers: dict[int, tuple[str, int]]
    places: dict[int, Place]
    operations: frozenset[int]
    """What this client may do with the topic, by Kafka's numbers; empty where it was not asked."""

    def name(self, number: int) -> str:
        """A partition's name on the bus: a topic deleted and made anew is another place."""
        topic_id = base64.urlsafe_b64encode(self.topic_id.bytes).decode().rstrip("=")  # as Kafka writes it
        return f"{topic_id}-{number}"

    def led(self, numbers: Iterable[int]) -> dict[int, list[Place]]:
        """The leaders of these partitions, in order of appearance, with what they lead; the leaderless
        are left out."""
        found: dict[int, list[Place]] = {}
        for number in numbers:
            place = self.places[number]
            if place.leader is not None:
                found.setdefault(place.leader, []).append(place)
        return found


class Link:
    """Connections of one thread at a time to the brokers that lead a topic. Raises `Broken` and `NoTopic`."""

    def __init__(self, section: Section, topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.topic, self._section, self._clock = topic, section, clock
        self._servers = split_servers(section.servers)
        self._open: dict[tuple[str, int], Connection] = {}
        self._rests: dict[tuple[str, int], tuple[float, Broken]] = {}
        self._layout: Layout | None = None
        self._asked_at = 0.0
        self._aborted = False

    def layout(self) -> Layout:
        """Where the topic is, asked anew when that is old, unknown or in doubt."""
        if self._layout is None or self._clock() - self._asked_at > FRESH_S:
            # a broker that was paused may not know yet that it leads no longer: at first all are asked
            answers = self._ask(everyone=self._layout is None)
            for answer in answers:
                self._layout = newer(self._layout, answer)
            self._asked_at = self._clock()
        assert self._layout is not None
        return self._layout

    def doubt(self) -> None:
        """Ask again at the next `layout`: a broker said that what is known is no longer so."""
        self._asked_at = float("-inf")

    @property
    def in_doubt(self) -> bool:
        """Whether the next `layout` will ask."""
        return self._asked_at == float("-inf")

    def broker(self, node: int) -> Connection:
        """A connection to a broker of the layout."""
        assert self._layout is not None
        if node not in self._layout.brokers:
            self.doubt()
            raise Broken(f"broker {node}", "resolve", "is not among the cluster's brokers now")
        return self.connection(self._layout.brokers[node])

    def connection(self, server: tuple[str, int]) -> Connection:
        """A connection to a server, opened if there is none. One that just failed is left alone a while."""
        if self._aborted:
            raise Broken(f"{server[0]}:{server[1]}", "connect", "the bus was closed")
        known = self._open.get(server)
        if known is not None and not known.closed:
            return known
        until, last = self._rests.get(server, (0.0, None))
        if last is not None and self._clock() < until:
            raise last
        made = Connection(*server, self._section, stall_s=STALL_S if last is None else PROBE_S)
        self._open[server] = made  # before it is open, for `abort` to find it
        try:
            made.open()
        except Broken as error:
            self.rest(server, error)
            raise
        self._rests.pop(server, None)
        made.stall_s = STALL_S
        return made

    def rest(self, server: tuple[str, int], error: Broken) -> None:
        """Leave a server alone for a while, and ask the others who leads instead."""
        if self._rests.get(server, (0.0, None))[1] is error:
            return  # it was not tried just now
        self._rests[server] = (self._clock() + REST_S, error)
        self.doubt()

    def rest_broker(self, node: int, error: Broken) -> None:
        """Leave a broker of the layout alone for a while."""
        if self._layout is not None and node in self._layout.brokers:
            self.rest(self._layout.brokers[node], error)

    def wake(self) -> None:
        """Leave no server alone: the caller has waited enough."""
        self._rests = {server: (float("-inf"), error) for server, (_, error) in self._rests.items()}

    def close(self) -> None:
        """Close all connections; the next use opens them again."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()
        self.doubt()

    def abort(self) -> None:
        """End whatever another thread waits for here, and let it begin nothing new."""
        self._aborted = True
        for connection in list(self._open.values()):
            connection.abort()

    def _ask(self, everyone: bool) -> list[Layout]:
        """The topic's metadata from one server, or merged from all that answer; those known longest come
        last."""
        known = [] if self._layout is None else list(self._layout.brokers.values())
        servers = list(dict.fromkeys([*known, *self._servers]))
        open_now = [s for s in servers if s in self._open and not self._open[s].closed]
        found: list[Layout] = []
        failures: list[Broken] = []
        missing: NoTopic | None = None
        for server in dict.fromkeys([*open_now, *servers]):
            try:
                found.append(ask(self.connection(server), self.topic))
            except Broken as error:
                failures.append(error)
                self.rest(server, error)
            except NoTopic as error:
                missing = error
            if found and not everyone:
                break
        if not found:
            raise missing or failures[0]
        return found


def split_servers(text: str) -> list[tuple[str, int]]:
    """`host:port,host:port` in parts."""
    pairs = [server.rpartition(":") for server in text.split(",")]
    return [(host, int(port)) for host, _, port in pairs]


def ask(connection: Connection, topic: str, *, rights: bool = False) -> Layout:
    """Fetch a topic's metadata from a broker. Raises `Broken` and `NoTopic`."""
    wanted = MetadataRequest.MetadataRequestTopic(name=topic, topic_id=uuid.UUID(int=0))
    request = MetadataRequest(
        topics=[wanted],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=rights,
    )
    answer = connection.call(request, max_version=12)
    if answer.API_VERSION < 10:
        raise Broken(
            connection.server, "request", "is of a Kafka release without topic ids; 2.8 is the oldest"
        )
    (found,) = answer.topics
    if found.error_code and (found.error_code in (3, 29, 17) or not found.partitions):
        raise NoTopic(topic, found.error_code, answer.cluster_id or "")
    places = {p.partition_index: _place(p) for p in found.partitions}
    operations = frozenset(int(one) for one in found.authorized_operations or ()) if rights else frozenset()
    brokers = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
    return Layout(found.topic_id, answer.cluster_id or "", brokers, places, operations)


def _place(partition: Any) -> Place:
    leader = None if partition.leader_id < 0 else partition.leader_id
    return Place(partition.partition_index, leader, partition.leader_epoch)


def newer(old: Layout | None, new: Layout) -> Layout:
    """Merge another answer: of each partition the entry with the later leader epoch.

    A broker cut off for a while reports stale metadata: its leader of a partition may be older than what is
    known, and the offsets it would give are too. Partitions it does not know yet are there all the same.
    """
    if old is None or old.topic_id != new.topic_id:
        return new
    places = dict(old.places)
    for number, place in new.places.items():
        if number not in places or place.epoch >= places[number].epoch:
            places[number] = place
    return replace(new, places=places)


STALE = {3, 5, 6, 9, 13, 56, 74, 75, 78, 100, 103}
"""Errors of a layout that is out of date or not settled, so that asking again may help:
UnknownTopicOrPartition, LeaderNotAvailable, NotLeader, ReplicaNotAvailable, NetworkException, KafkaStorage,
FencedLeaderEpoch, UnknownLeaderEpoch, OffsetNotAvailable, UnknownTopicId and InconsistentTopicId."""
