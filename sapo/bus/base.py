"""The one interface every bus implements. Delivery is at least once; readers own their positions."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sapo.core.errors import UserError
from sapo.core.shares import EQUAL, Meter, Shares
from sapo.core.types import Received, SignedGroup

PASSED = 8
"""Times `max_bytes` that a poll may pass over: what lies behind a flood is not to wait for many polls."""
MAX_RECORD = 4 * 2**20
"""Bytes of a record, with all that packs it: more is passed over unread, whoever wrote it."""
MAX_KEPT_BYTES = 65_536
"""Of a record that is refused, its beginning: what the archive keeps."""
Positions = Mapping[str, int]
"""Partition name to the offset of the next record to read. Callers keep them, and look at nothing inside."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one poll may take: its cost must not grow with the swarm."""

    max_bytes: int = 8_000_000
    max_groups: int = 1_000
    tail: int | None = None
    """Per partition, start no further back than this many records from the end. None reads everything."""
    shares: Shares = EQUAL
    """Of the bytes, what is beyond a share is passed over; of the groups, it does not count for `max_groups`:
    a flood leaves room for the others. Records without an author count as a newcomer's."""
    proven: Callable[[SignedGroup], bool] = lambda signed: True
    """Whether a record is by the author it names. Asked only where one's share of the bytes is used up: what
    others sent in its name then counts as a newcomer's."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Records of a partition that were gone before they could be read: [first, end)."""

    partition: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """What holds no signed group at all: a record, or what is left of a batch, up to the offset `end`."""

    bus_position: str
    end: int
    payload: bytes | None = None
    """The beginning of what is there; None where it was not even read."""
    payload_bytes: int = 0
    count: int = 1
    """How many records it is said to be."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll returned, the positions to go on from, and what retention took away."""

    received: tuple[Received, ...]
    positions: Positions
    gaps: tuple[Gap, ...] = field(default=())
    malformed: tuple[Malformed, ...] = field(default=())
    """Passed over because no signed group at all is there."""
    passed: int = 0
    """Records passed over because their authors had their share of the poll's bytes."""


@dataclass(frozen=True, slots=True)
class Found:
    """What stands at `offset`, of `size` bytes: a signed group, or nothing that is one. `end` is the offset
    after it; a batch that cannot be read is passed over whole."""

    offset: int
    end: int
    size: int
    received: Received | None
    raw: bytes | None = None
    """The record's value or, of a batch that cannot be read, all of it; None where it was not even read."""
    count: int = 1
    """How many records it is said to be."""


class Reading:
    """One poll as it grows: keeps to its limits, notes gaps and where to go on."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = self._counted = self._passed = self._passed_bytes = 0
        self._byte_shares = Meter(limits.shares, limits.max_bytes)
        self._group_shares = Meter(limits.shares, limits.max_groups)
        self._proofs: set[bytes] = set()
        self._taken: dict[str, list[tuple[SignedGroup, int]]] = {}
        self._received: list[Received] = []
        self._gaps: list[Gap] = []
        self._malformed: list[Malformed] = []
        self._positions: dict[str, int] = {}

    def start(self, partition: str, saved: int | None, first: int, end: int) -> int:
        """The offset to read `partition` from.

        `saved` is the caller's position (None: from the beginning), `first` the oldest record that still
        exists, `end` the offset after the last. Raises `UserError` if `saved` lies behind the end: offsets
        would then be given out a second time.
        """
        if saved is not None and saved > end:
            problem = f"the saved position lies behind the bus's end at {end}, so the bus lost records"
            raise UserError(
                "bus", f"{partition}:{saved}", problem, "restore the newer bus, or start a new one"
            )
        start = first if saved is None else saved
        if self._limits.tail is not None:
            start = max(start, end - self._limits.tail)
        self._positions[partition] = start
        self.skip_to(partition, first)
        return self._positions[partition]

    def add(self, partition: str, found: Found) -> bool:
        """Take what was found; False when the limits are reached. The first record of a poll is taken
        whatever its size, or a large one would block its partition."""
        received, size = found.received, found.size
        author = "" if received is None else received.signed.key
        taken = len(self._received) + len(self._malformed)
        over = taken > 0 and not self._byte_shares.fits(author, size)
        if over and received is not None and author and not self._byte_shares.newcomers_full(author, size):
            author = self._proven(received.signed)
            over = not self._byte_shares.fits(author, size)
        full = taken > 0 and self._bytes + size > self._limits.max_bytes
        full = full or (over and self._passed_bytes + size > PASSED * self._limits.max_bytes)
        if full or self._counted >= self._limits.max_groups:
            return False
        self.skip_to(partition, found.offset)
        self._positions[partition] = found.end
        if over:
            self._passed, self._passed_bytes = self._passed + 1, self._passed_bytes + size
            return True
        self._bytes += size
        self._byte_shares.take(author, size)
        if received is not None and author:
            self._taken.setdefault(author, []).append((received.signed, size))
        if received is None:
            kept = None if found.raw is None else found.raw[:MAX_KEPT_BYTES]
            size = 0 if found.raw is None else len(found.raw)
            place = f"{partition}:{found.offset}"
            self._malformed.append(Malformed(place, found.end, kept, size, found.count))
        else:
            self._received.append(received)
        self._counted += self._group_shares.take(author)
        return True

    def _proven(self, signed: SignedGroup) -> str:
        """The author of a record whose share is used up; nobody where it is a forgery. Whatever was taken in
        that author's name is looked at, too, once; of one content the first counts."""
        for earlier, size in self._taken.pop(signed.key, ()):
            if not self._is_proven(earlier):
                self._byte_shares.move(signed.key, "", size)
        return signed.key if self._is_proven(signed) else ""

    def _is_proven(self, signed: SignedGroup) -> bool:
        again = signed.payload in self._proofs
        self._proofs.add(signed.payload)
        return not again and self._limits.proven(signed)

    def keep(self, partition: str, saved: int) -> None:
        """Leave the caller's position of a partition that cannot be read now as it is."""
        self._positions[partition] = saved

    def at(self, partition: str) -> int:
        """Where reading of a partition stands."""
        return self._positions[partition]

    def skip_to(self, partition: str, offset: int) -> None:
        """Everything before `offset` was read; whatever was not there is a gap."""
        position = self._positions[partition]
        if offset > position:
            self._gaps.append(Gap(partition, position, offset))
            self._positions[partition] = offset

    def poll(self) -> Poll:
        """What was read."""
        return Poll(
            tuple(self._received), self._positions, tuple(self._gaps), tuple(self._malformed), self._passed
        )


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
