"""From a real topic into the history, exactly once: rivals, pauses, resent records, retention, new topics."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
from history_samples import MANIFEST, signed
from kafka import KafkaAdminClient, TopicPartition

from infra.kafka.cluster import Cluster
from sapo.bus.base import Bus, Limits, Poll, Positions
from sapo.bus.kafka.bus import KafkaBus
from sapo.core.config.schema import KafkaBus as Section
from sapo.ops.archiver import Archiver, Counts
from sapo.store.history import query
from sapo.store.history.tables import Store

pytestmark = pytest.mark.kafka
NUMBERS = itertools.count()
PARTITIONS = 3
GROUPS = [signed(i) for i in range(12)]


class Paused:
    """A bus whose first poll is followed by `then`, before the reader sees what it read."""

    def __init__(self, bus: Bus, then: Callable[[], object]) -> None:
        self._bus, self._then = bus, [then]

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        found = self._bus.poll(positions, limits, rng)
        if self._then:
            self._then.pop()()
        return found

    def end_positions(self) -> Positions:
        return self._bus.end_positions()


@pytest.fixture
def topic(kafka: Cluster) -> str:
    name = f"archive-{next(NUMBERS)}"
    kafka.create_topic(name, partitions=PARTITIONS)
    return name


@pytest.fixture
def bus(kafka: Cluster, topic: str) -> Iterator[KafkaBus]:
    bus = KafkaBus(Section(servers=kafka.servers), topic)
    yield bus
    bus.close()


def archiver(bus: object, store: Store, **more: object) -> Archiver:
    return Archiver(bus, store, MANIFEST, **more)  # type: ignore[arg-type]


def held(store: Store) -> list[tuple[str, int]]:
    rows = query.query(store, "SELECT group_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1")
    return [(row["group_id"], row["n"]) for row in rows.to_pylist()]


WHOLE = sorted((one.group_id, 4) for one in GROUPS)


def test_an_archiver_paused_between_read_and_commit_doubles_nothing_of_a_topic(
    bus: KafkaBus, store: Store
) -> None:
    bus.publish(GROUPS)
    rival = archiver(bus, store)
    paused = archiver(Paused(bus, rival.run), store)
    assert paused.run() == Counts()
    assert held(store) == WHOLE


def test_the_paused_archiver_still_writes_what_its_rival_left(bus: KafkaBus, store: Store) -> None:
    bus.publish(GROUPS)
    rival = archiver(bus, store, limits=Limits(max_groups=5))
    assert archiver(Paused(bus, rival.run_once), store).run().groups == len(GROUPS) - 5
    assert held(store) == WHOLE


def test_records_resent_at_new_offsets_of_a_topic_are_recognised(bus: KafkaBus, store: Store) -> None:
    bus.publish(GROUPS)
    archiver(bus, store).run()
    bus.publish(GROUPS[:7])
    counts = archiver(bus, store).run()
    assert (counts.passed, counts.groups, counts.duplicates) == (7, 0, 7)
    assert held(store) == WHOLE


def test_what_retention_took_from_a_topic_is_recorded_as_a_gap_once(
    kafka: Cluster, topic: str, bus: KafkaBus, store: Store
) -> None:
    bus.publish(GROUPS)
    before = dict(bus.end_positions())
    admin = KafkaAdminClient(bootstrap_servers=kafka.servers)
    try:
        admin.delete_records({TopicPartition(topic, n): -1 for n in range(PARTITIONS)})
    finally:
        admin.close()
    late = [signed(50 + i) for i in range(6)]
    bus.publish(late)
    archiver(bus, store).run()
    archiver(bus, store).run()
    assert held(store) == sorted((one.group_id, 4) for one in late)
    found = query.query(store, 'SELECT "partition", "offset", end_offset, reason FROM quarantine').to_pylist()
    assert {row["reason"] for row in found} == {"gap"}
    assert {row["partition"]: (row["offset"], row["end_offset"]) for row in found} == {
        name: (0, end) for name, end in before.items() if end
    }


def test_a_topic_made_anew_is_archived_from_its_beginning(
    kafka: Cluster, topic: str, bus: KafkaBus, store: Store
) -> None:
    bus.publish(GROUPS)
    archiver(bus, store).run()
    admin = KafkaAdminClient(bootstrap_servers=kafka.servers)
    try:
        admin.delete_topics([topic])
    finally:
        admin.close()
    kafka.create_topic(topic, partitions=PARTITIONS)
    again = KafkaBus(Section(servers=kafka.servers), topic)
    late = [signed(90 + i) for i in range(6)]
    again.publish(late)
    counts = archiver(again, store).run()
    again.close()
    assert (counts.groups, counts.gaps) == (6, 0)
    assert len(held(store)) == len(GROUPS) + 6
