"""The pool: foreign groups received and not yet used, bounded in number, age and share per peer."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sapo.core.config.load import PoolConfig
from sapo.core.errors import Refused
from sapo.core.shares import Claim, Served, Shares, over
from sapo.core.types import Group, Outcome, Received, Record
from sapo.peers.dedup import DedupIndex, fingerprint
from sapo.store.journal.rows import PoolRow, SeenGroup

if TYPE_CHECKING:
    from sapo.policy.tokenise import Tokens

SEEN_PER_GROUP = 16
"""Groups remembered per place in the pool, so that what was used or evicted does not come in again."""

PLACE_BYTES = 65_536
"""Of payload to a place: a larger group takes several, so that memory is bounded by their number."""


def places_of(received: Received) -> int:
    """Places that a record takes."""
    return max(1, math.ceil(len(received.signed.payload) / PLACE_BYTES))


class Verdict(Record):
    """The receiver's own verdict on a foreign group."""

    outcomes: tuple[Outcome, ...] = ()
    """One per completion, in their order; empty for a group that could not be scored as a whole."""
    reason: str | None = None
    """Why the group is not used, such as `question_mismatch`; a `substandard` one still has outcomes."""

    @classmethod
    def at_sight(cls, group: Group) -> Self | None:
        """What needs no verifier: answers that are one text have one score, and teach nothing. Else None."""
        alike = len({completion.text for completion in group.completions}) == 1
        return cls(reason="uninformative") if alike else None

    @property
    def scores(self) -> tuple[float | None, ...]:
        """Raw task scores; None where a completion is unscorable."""
        return tuple(outcome.score for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Entry:
    """A group in the pool. `received_at` is this node's clock; `verdict` is given at sight or when it is
    verified, and so are its `tokens` under this node's vocabulary."""

    received: Received
    group: Group
    received_at: float
    verdict: Verdict | None = None
    tokens: "Tokens | None" = None

    @property
    def group_id(self) -> str:
        return self.received.signed.group_id

    def age(self, now: float) -> float:
        """Seconds since the bus stamped it; clocks that disagree make nothing younger than new."""
        return max(0.0, now - self.received.timestamp)

    def to_row(self) -> PoolRow:
        """The entry as the journal keeps it."""
        return PoolRow(
            received=self.received,
            received_at=self.received_at,
            verdict=None if self.verdict is None else self.verdict.canonical(),
        )

    @classmethod
    def from_row(cls, row: PoolRow) -> "Entry":
        """An entry from the journal; its signature was checked before it was written there."""
        return cls(
            received=row.received,
            group=Group.model_validate_json(row.received.signed.payload),
            received_at=row.received_at,
            verdict=None if row.verdict is None else Verdict.model_validate_json(row.verdict),
        )


class Pool:
    """Entries by group id, in the order they came. The bounds hold after `evict`, so call it after adding.

    `shares` divides its places, and the memory of what was in it, among authors.
    """

    def __init__(self, config: PoolConfig, shares: Shares | None = None) -> None:
        self.config = config
        self.shares = shares or Shares(author=config.max_peer_share)
        self.seen = DedupIndex(self.memory, self.shares)
        self._entries: dict[str, Entry] = {}
        self._new: set[str] = set()
        self._served = Served(self.memory)
        self._dropped = _Dropped()

    @classmethod
    def restore(
        cls,
        config: PoolConfig,
        rows: Iterable[PoolRow],
        met: Iterable[SeenGroup] = (),
        shares: Shares | None = None,
    ) -> "Pool":
        """The pool that the journal kept, with its memory of all that was `met`, in order."""
        pool = cls(config, shares)
        for one in met:
            pool.seen.note(one)
            if one.author is not None:
                pool._served.add(one.author)
        for row in rows:
            remembered = pool.seen.get(row.group_id) is not None
            pool.add(Entry.from_row(row))
            if remembered:
                pool._new.discard(row.group_id)
        pool._settle()
        return pool

    @property
    def memory(self) -> int:
        """How many groups are remembered after they have gone."""
        return SEEN_PER_GROUP * self.config.max_groups

    def met(self, group: Group, content_sha256: str, stamp: float | None = None) -> SeenGroup:
        """What is to be remembered of a group, once the pool is within its bounds; own ones have no stamp."""
        group_id = group.group_id
        author = group.key if group_id in self._entries else None
        seen = self.seen.get(group_id)
        same = seen is not None and seen.content_sha256 == content_sha256
        mark = seen.fingerprint if seen is not None and same else fingerprint(group)
        return SeenGroup(group_id, content_sha256, mark, author, group.key, stamp)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._entries

    def get(self, group_id: str) -> Entry | None:
        """The entry with this id, if it is here."""
        return self._entries.get(group_id)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, in the order they came."""
        return tuple(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Take an admitted group; one that is already here is left as it is."""
        self.seen.add(entry.group, entry.received.signed.content_sha256, entry.received.timestamp)
        if entry.group_id not in self._entries:
            self._entries[entry.group_id] = entry
            self._new.add(entry.group_id)

    def keep(self, verified: Iterable[Entry]) -> None:
        """Keep the verdicts of entries that are here."""
        self._entries |= {entry.group_id: entry for entry in verified if entry.group_id in self._entries}

    def remove(self, group_ids: Iterable[str]) -> None:
        """Take out groups that were used or found useless; unknown ids are passed over."""
        for group_id in group_ids:
            self._entries.pop(group_id, None)

    def refuse(self, refused: Refused) -> None:
        """Note what was refused for its age."""
        if refused.code == "stale" and refused.group is not None:
            self._dropped.stale(refused.group)

    def evict(self, now: float) -> dict[str, int]:
        """Drop what exceeds the bounds; how many went, by reason: `age` and those of `sapo.core.shares.over`.

        The oldest by the bus's time stamp go first, ties by group id, so that equal pools lose equal groups.
        """
        newest_first = sorted(
            self._entries.values(), key=lambda e: (e.received.timestamp, e.group_id), reverse=True
        )
        gone = {entry.group_id: "age" for entry in newest_first if entry.age(now) > self.config.max_age_s}
        often = self._served.often(self.shares)
        claims = [
            Claim(
                entry.group_id,
                entry.group.key,
                places_of(entry.received),
                late=entry.group_id in self._new and entry.group.key in often,
            )
            for entry in newest_first
            if entry.group_id not in gone
        ]
        gone |= over(claims, self.shares, self.config.max_groups)
        for group_id, reason in gone.items():
            if reason == "age":
                self._dropped.stale(self._entries[group_id].group)
            self._dropped.evicted[reason] += 1
        self.remove(gone)
        self._settle()
        return dict(Counter(gone.values()))

    def _settle(self) -> None:
        """Note whose arrivals have a place now."""
        for entry in self._entries.values():
            if entry.group_id in self._new:
                self._served.add(entry.group.key)
        self._new.clear()

    def metrics(self, now: float) -> dict[str, float]:
        """The series `pool/*`: what is here now, and what was dropped since this was last asked.

        Staleness must not silently favour short, easy answers: `pool/stale/chars` and
        `pool/stale/task/<data set>` describe what age took away, `pool/chars` what is here.
        """
        entries = self.entries()
        metrics = {"pool/size": float(len(entries))} | self._dropped.metrics()
        self._dropped = _Dropped()
        if entries:
            ages = [entry.age(now) for entry in entries]
            metrics["pool/age_mean"] = sum(ages) / len(ages)
            metrics["pool/age_max"] = max(ages)
            metrics["pool/chars"] = sum(_chars(entry.group) for entry in entries) / len(entries)
            metrics["pool/peers"] = float(len({entry.group.key for entry in entries}))
        return metrics


class _Dropped:
    def __init__(self) -> None:
        self.evicted: Counter[str] = Counter()
        self._stale_tasks: Counter[str] = Counter()
        self._stale_chars: list[float] = []

    def stale(self, group: Group) -> None:
        self._stale_tasks[group.recipe.dataset] += 1
        self._stale_chars.append(_chars(group))

    def metrics(self) -> dict[str, float]:
        metrics = {f"pool/evicted/{reason}": float(count) for reason, count in self.evicted.items()}
        metrics |= {f"pool/stale/task/{task}": float(count) for task, count in self._stale_tasks.items()}
        if self._stale_chars:
            metrics["pool/stale/chars"] = sum(self._stale_chars) / len(self._stale_chars)
        return metrics


def _chars(group: Group) -> float:
    return sum(len(completion.text) for completion in group.completions) / len(group.completions)
