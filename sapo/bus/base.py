"""The one interface every bus implements. Delivery is at least once; readers own their positions."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from sapo.errors import UserError
from sapo.records import Received, SignedGroup

PASSED = 8
"""Times `max_bytes` that a poll may pass over: what lies behind a flood is not to wait for many polls."""
MAX_RECORD = 4 * 2**20
"""Bytes of a record, with all that packs it: more is passed over unread, whoever wrote it."""
Positions = Mapping[str, int]
"""Partition name to the offset of the next record to read. Callers keep them, and look at nothing inside."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one poll may take: its cost must not grow with the swarm (DESIGN 7)."""

    max_bytes: int = 8_000_000
    max_groups: int = 1_000
    tail: int | None = None
    """Per partition, start no further back than this many records from the end. None reads everything."""
    max_per_author: int | None = None
    """Of one author no more groups than this count for `max_groups`: a flood leaves room for the others."""
    known: Set[str] | None = None
    """Authors who count for themselves; None: all. The rest, and records of nobody, count together."""
    max_others: int = 0
    """No more records of those who are not `known` than this count for `max_groups`."""
    author_share: float | None = None
    """Part of `max_bytes` that is taken of one known author; what is beyond it is passed over. None: all."""
    others_share: float | None = None
    """Likewise, of all who are not `known` together."""


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
    malformed: tuple[str, ...] = field(default=())
    """Bus positions of records passed over because they hold no signed group at all."""
    passed: int = 0
    """Records passed over because their authors had their share of the poll's bytes."""


class Reading:
    """One poll as it grows: keeps to its limits, notes gaps and where to go on."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = self._counted = self._passed = self._passed_bytes = 0
        self._authors: Counter[str] = Counter()
        self._author_bytes: Counter[str] = Counter()
        self._received: list[Received] = []
        self._gaps: list[Gap] = []
        self._malformed: list[str] = []
        self._positions: dict[str, int] = {}

    def start(self, partition: str, saved: int | None, first: int, end: int) -> int:
        """The offset to read `partition` from.

        `saved` is the caller's position (None: from the beginning), `first` the oldest record that still
        exists, `end` the offset after the last. Raises `UserError` if `saved` lies behind the end: offsets
        would then be given out a second time.
        """
        if saved is not None and saved > end:
            raise UserError(
                "bus",
                f"{partition}:{saved}",
                f"the saved position lies behind the bus's end at {end}, so the bus lost records",
                "restore the newer bus, or start a new one",
            )
        start = first if saved is None else saved
        if self._limits.tail is not None:
            start = max(start, end - self._limits.tail)
        self._positions[partition] = start
        self._skip_to(partition, first)
        return self._positions[partition]

    def add(
        self, partition: str, offset: int, size: int, received: Received | None, end: int | None = None
    ) -> bool:
        """Take the record at `offset` of `size` bytes (None: malformed); False when the limits are reached.

        The first record of a poll is taken whatever its size, or a large one would block its partition.
        `end` is the offset to go on from where that is not the next: a batch nobody can read has many.
        """
        author = self._author(received)
        over = self._over_share(author, size)
        taken = len(self._received) + len(self._malformed)
        if over:
            full = self._passed_bytes + size > PASSED * self._limits.max_bytes
        else:
            full = taken > 0 and self._bytes + size > self._limits.max_bytes
        if full or self._counted >= self._limits.max_groups:
            return False
        self._skip_to(partition, offset)
        self._positions[partition] = offset + 1 if end is None else end
        if over:
            self._passed, self._passed_bytes = self._passed + 1, self._passed_bytes + size
            return True
        self._bytes += size
        self._author_bytes[author] += size
        if received is None:
            self._malformed.append(f"{partition}:{offset}")
        else:
            self._received.append(received)
        self._counted += self._counts(author)
        return True

    def _author(self, received: Received | None) -> str:
        """Who wrote a record; "" for nobody, and for all who are not known."""
        key, known = "" if received is None else received.signed.key, self._limits.known
        return key if known is None or key in known else ""

    def _over_share(self, author: str, size: int) -> bool:
        """Whether an author, or all who are not known, had their bytes; one record they have in any case."""
        share = self._limits.author_share if author else self._limits.others_share
        before = self._author_bytes[author]
        return share is not None and before > 0 and before + size > share * self._limits.max_bytes

    def _counts(self, author: str) -> bool:
        """Whether one more record of the author counts for `max_groups`."""
        most = self._limits.max_per_author
        if not author:
            most = None if self._limits.known is None else self._limits.max_others
        self._authors[author] += 1
        return most is None or self._authors[author] <= most

    def keep(self, partition: str, saved: int) -> None:
        """Leave the caller's position of a partition that cannot be read now as it is."""
        self._positions[partition] = saved

    def at(self, partition: str) -> int:
        """Where reading of a partition stands."""
        return self._positions[partition]

    def finish(self, partition: str, end: int) -> None:
        """Everything up to `end` was read; whatever was not there is a gap."""
        self._skip_to(partition, end)

    def _skip_to(self, partition: str, offset: int) -> None:
        position = self._positions[partition]
        if offset > position:
            self._gaps.append(Gap(partition, position, offset))
            self._positions[partition] = offset

    def poll(self) -> Poll:
        """What was read."""
        return Poll(
            tuple(self._received),
            self._positions,
            tuple(self._gaps),
            tuple(self._malformed),
            self._passed,
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
