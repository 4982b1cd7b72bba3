"""What a poll of the Kafka bus counts, without a broker."""

import random
import uuid
from typing import Any

import pytest
from makers import make_received

from sapo.bus.base import Limits
from sapo.bus.kafka import bus as kafka
from sapo.bus.kafka.bus import GRACE_S, Ends, KafkaBus, NotRead
from sapo.bus.kafka.metadata import Layout, Place
from sapo.bus.kafka.record_batch import Found
from sapo.core.config.schema import KafkaBus as Section
from sapo.core.errors import Unavailable, UserError


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


def test_the_grace_of_a_position_behind_the_end_begins_anew_after_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(uuid.UUID(int=1), "cluster", {0: ("host", 9092)}, {0: Place(0, 0, 0)}, frozenset())
    now = 0.0
    bus = KafkaBus(Section(type="kafka", servers="host:9092"), "t", clock=lambda: now)
    behind = {layout.name(0): 5}
    shrunk = (layout, Ends(first={0: 0}, last={0: 3}))

    def away() -> tuple[Layout, Ends]:
        raise NotRead("away")

    def poll() -> object:
        return bus.poll(behind, Limits(), random.Random(0)).positions

    monkeypatch.setattr(bus, "_ends", lambda: shrunk)
    assert poll() == behind
    monkeypatch.setattr(bus, "_ends", away)
    with pytest.raises(Unavailable):
        poll()
    now += 2 * GRACE_S
    monkeypatch.setattr(bus, "_ends", lambda: shrunk)
    assert poll() == behind
    now += GRACE_S + 1
    with pytest.raises(UserError, match="lost records"):
        poll()
