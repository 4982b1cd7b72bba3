"""What a poll of the Kafka bus counts, without a broker."""

import random
import uuid
from typing import Any

import pytest
from makers import make_received

from sapo.bus.base import Found, Limits
from sapo.bus.kafka import bus as kafka
from sapo.bus.kafka.bus import Ends, KafkaBus
from sapo.bus.kafka.metadata import Layout, Place
from sapo.core.config.schema import KafkaBus as Section


def test_all_bytes_that_came_are_counted_also_those_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {number: Place(number, 0, 0) for number in range(3)}
    layout = Layout(uuid.UUID(int=1), "cluster", {0: ("host", 9092)}, places, frozenset())
    data = b"a batch of one group"
    bus = KafkaBus(Section(type="kafka", servers="host:9092"), "t")
    ends = Ends(first=dict.fromkeys(places, 0), last=dict.fromkeys(places, 1))

    def fetch(*given: Any) -> dict[int, bytes]:
        return dict.fromkeys(places, data)

    def read(data: bytes, partition: str, position: int) -> list[Found]:
        return [Found(position, position + 1, len(data), make_received())]

    monkeypatch.setattr(kafka, "read", read)
    monkeypatch.setattr(bus, "_ends", lambda: (layout, ends))
    monkeypatch.setattr(bus, "_fetch", fetch)
    found = bus.poll({}, Limits(max_groups=1), random.Random(0))
    assert len(found.received) == 1
    assert bus.bytes_read == 3 * len(data)
