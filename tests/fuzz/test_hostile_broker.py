"""What a hostile producer stores on a real broker, which checks headers and little else."""

import random
import secrets
import struct
import uuid
from collections.abc import Callable

import crc32c
import pytest
import zstandard
from kafka.protocol.producer import ProduceRequest
from kafka_batches import LOG_APPEND_TIME, packed, record, sized, varint, zeros
from makers import make_signed

from infra.kafka.cluster import Cluster
from sapo.bus.base import Limits
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.kafka.metadata import Link
from sapo.core.config.schema import KafkaBus as Section

pytestmark = pytest.mark.kafka

CRC_AT, CRC_FROM, ATTRIBUTES_AT = 17, 21, 22
RECORDS = [make_signed("stranger", position=i) for i in range(3)]


BOMB = RECORDS[0].model_copy(update={"payload": bytes(64 * 2**20)})


def store(section: Section, topic: str, batch: bytes) -> int:
    """Have the broker store a batch as it is; returns its error code."""
    data = bytearray(batch)
    data[ATTRIBUTES_AT] &= ~LOG_APPEND_TIME
    struct.pack_into(">I", data, CRC_AT, crc32c.crc32c(bytes(data[CRC_FROM:])))
    link = Link(section, topic)
    layout = link.layout()
    topics = ProduceRequest.TopicProduceData
    part = topics.PartitionProduceData(index=0, records=bytes(data))
    request = ProduceRequest(
        transactional_id=None,
        acks=-1,
        timeout_ms=5000,
        topic_data=[topics(name=topic, topic_id=layout.topic_id, partition_data=[part])],
    )
    answer = link.broker(layout.places[0].leader or 0).call(request, max_version=13)
    link.close()
    return int(answer.responses[0].partition_responses[0].error_code)


def lying(*distances: int) -> bytes:
    return packed(0, b"".join(record(one, at) for one, at in zip(RECORDS, distances, strict=True)))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "an offset far behind the end": lambda: lying(0, 10**9, 2),
    "offsets that go back": lambda: lying(0, 0, 0),
    "a million headers": lambda: packed(0, record(RECORDS[0], 0, more=[(b"", b"")] * 200_000), count=1),
    "a bomb of one record": lambda: packed(4, zstandard.compress(record(BOMB, 0)), count=1),
    "a bomb of no records": lambda: packed(1, zeros(1, 200), count=1),
    "no records": lambda: packed(0, b"\xff" * 500),
    "no such codec": lambda: packed(7, b"of the future"),
    "too many records": lambda: packed(0, sized(b"\0" * 2 + varint(0)) * 9000, count=9000),
}


STORED = [*HOSTILE][:4]
"""What a broker takes."""


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_a_broker_stores_nobodys_reading_stops(kafka: Cluster, what: str) -> None:
    """It refuses some, stores others; behind each of them an honest group arrives."""
    topic = f"hostile-{uuid.uuid4().hex[:8]}-{secrets.token_hex(2)}"
    kafka.create_topic(topic, partitions=1)
    section = Section.model_validate(kafka.bus(topic))
    bus = KafkaBus(section, topic)
    bus.publish([make_signed("first")])
    code = store(section, topic, HOSTILE[what]())
    bus.publish([make_signed("last")])
    assert code == 0 or what not in STORED, "the broker takes no such batch any more"
    found = bus.poll({}, Limits(), random.Random(0))
    keys = [one.signed.key for one in found.received]
    assert keys[0] == make_signed("first").key
    assert keys[-1] == make_signed("last").key
    assert dict(found.positions) == dict(bus.end_positions())
    assert bus.poll(found.positions, Limits(), random.Random(0)).received == ()
    bus.close()
