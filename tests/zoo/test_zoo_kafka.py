"""Hostile peers on a real broker: what they send packs small, and costs the nodes that read it little."""

import secrets
from collections.abc import Callable, Iterator

import psutil
import pytest
from animals.bombs import BOMB, noise, packed_giant, zip_bomb
from kafka import KafkaProducer
from reserve import WARM, Reserve, opened

from infra.kafka.cluster import Cluster
from sapo.bus.kafka.bus import KafkaBus
from sapo.core.config.schema import KafkaBus as Section

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def topic(kafka: Cluster) -> str:
    name = f"zoo-{secrets.token_hex(4)}"
    kafka.create_topic(name, partitions=2)
    return name


@pytest.fixture(scope="module")
def producer(kafka: Cluster) -> Iterator[KafkaProducer]:
    client = KafkaProducer(
        bootstrap_servers=kafka.servers.split(","), compression_type="gzip", max_request_size=2 * BOMB
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def reserve(kafka: Cluster, topic: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reserve]:
    section = Section.model_validate(kafka.bus(topic))
    with opened(tmp_path_factory.mktemp("zoo"), bus=KafkaBus(section, topic)) as reserve:
        reserve.rounds(WARM)
        yield reserve


@pytest.mark.parametrize(
    ("send", "code"),
    [(noise, "malformed_record"), (zip_bomb, "malformed_record"), (packed_giant, "payload_too_large")],
)
def test_what_cannot_be_read_is_passed_over(
    reserve: Reserve, producer: KafkaProducer, topic: str, send: Callable[..., object], code: str
) -> None:
    peer, process = reserve.peer(send.__name__), psutil.Process()
    send(peer, producer, topic)
    before = process.memory_info().rss
    passage = reserve.rounds(2)
    assert process.memory_info().rss - before < BOMB // 2
    assert passage.refused(code)
    assert code in passage.quarantined()
    for node in reserve.nodes:
        assert reserve.others(passage, node) <= passage.entered[node.name]
