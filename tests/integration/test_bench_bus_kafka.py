"""The bus benchmark's Kafka parts at small sizes, with a real broker."""

from contextlib import closing

import bus as benchmark
import pytest
from bus_authors import large, small
from bus_traffic import BareKafka, bytes_per_round, sample, speeds

from infra.kafka.cluster import Cluster
from sapo.core.config.load import PoolConfig
from sapo.core.config.schema import KafkaBus as KafkaSection

pytestmark = pytest.mark.kafka


def test_bare_kafka_gives_back_what_it_was_given(kafka: Cluster) -> None:
    kafka.create_topic("bench-bare", partitions=3)
    with closing(BareKafka(kafka.servers, "bench-bare", 3)) as wire:
        assert min(speeds(wire, sample(small, 24))) > 0


def test_what_a_node_reads_stays_within_its_budget(kafka: Cluster) -> None:
    topics = benchmark.Topics(kafka)
    topic = topics.new()
    section = KafkaSection.model_validate(kafka.bus(topic))
    bounds = PoolConfig(poll_bytes=200_000)
    read, batch = bytes_per_round(section, topic, 20, rounds=2, groups=2, shape=large, bounds=bounds)
    assert 40_000 < batch < 130_000
    assert all(50_000 < found <= bounds.poll_bytes + benchmark.PARTITIONS * batch for found in read)
