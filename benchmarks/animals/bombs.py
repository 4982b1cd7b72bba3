"""Hostile peers that need a real broker: records whose size only shows when they are unpacked."""

from kafka import KafkaProducer

from animals.peer import Peer, mixed
from sapo.bus.kafka.producer import headers
from sapo.core.types import SignedGroup

BOMB = 100 * 2**20
"""Bytes of zeros in one record: a few thousand on the wire."""


def zip_bomb(peer: Peer, producer: KafkaProducer, topic: str) -> None:
    """A record in good form that fills the memory of whoever unpacks it whole."""
    producer.send(topic, key=b"0" * 64, value=bytes(BOMB)).get(60)


def packed_giant(peer: Peer, producer: KafkaProducer, topic: str) -> SignedGroup:
    """A signed group far larger than the manifest allows, which packs into what the broker takes."""
    (item,) = peer.items(1)
    filler = "1" * (20 * peer.grounds.manifest.max_payload_bytes)
    signed = peer.publish(item, [*mixed(item, 2), filler])
    sent = producer.send(topic, key=signed.group_id.encode(), value=signed.payload, headers=headers(signed))
    sent.get(60)
    return signed


def noise(peer: Peer, producer: KafkaProducer, topic: str) -> None:
    """Records that hold no signed group at all."""
    for _ in range(8):
        producer.send(topic, value=peer.rng.randbytes(200), headers=[("key", b"\xff" * 9)]).get(60)
