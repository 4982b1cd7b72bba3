"""The one interface every bus implements. Delivery is at least once; readers own their positions."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sapo.records import Received, SignedGroup

Positions = Mapping[str, int]
"""Partition name to the offset of the next record to read. Callers keep them, and look at nothing inside."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one poll may take: its cost must not grow with the swarm (DESIGN 7)."""

    max_bytes: int = 8_000_000
    max_groups: int = 1_000
    tail: int | None = None
    """Per partition, start no further back than this many records from the end. None reads everything."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Records of a partition that were gone before they could be read: [first, end)."""

    partition: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll returned, the positions to go on from, and what retention took away."""

    received: tuple[Received, ...]
    positions: Positions
    gaps: tuple[Gap, ...] = field(default=())


class Bus(Protocol):
    """Where groups are published and read. `Received.bus_position` is `<partition>:<offset>`."""

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        """Append groups durably; returns once all are stored. Raises `Unavailable` when the bus is away."""

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        """Read what lies at or after `positions`, visiting partitions in an order drawn from `rng`.

        Returns at once with nothing when nothing is there. Within a partition records come in order.
        Skipping forward to the tail window is not a gap; records deleted by retention are.
        """

    def end_positions(self) -> Positions:
        """The offset after the last record of every partition."""

    def close(self) -> None:
        """Release connections. Closing twice is harmless."""
