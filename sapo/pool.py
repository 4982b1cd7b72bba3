"""The pool: foreign groups received and not yet used, bounded in number, age and share per peer."""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sapo.admission import Seen, fingerprint
from sapo.bus.base import Limits
from sapo.config import PoolConfig
from sapo.errors import Refused
from sapo.journal_rows import Met, PoolRow
from sapo.records import Group, Outcome, Received, Record

if TYPE_CHECKING:
    from sapo.batching import Tokens

SEEN_PER_GROUP = 16
"""Groups remembered per place in the pool, so that what was used or evicted does not come in again."""

PLACE_BYTES = 65_536
"""Of payload to a place: a larger group takes several, so that memory is bounded by their number."""
LOOKS = 16
"""Records looked at in a round per place in the pool: forgers of a known key may have sent most of them."""


def limits(config: PoolConfig, known: Set[str] | None = None, reach: int = 1) -> Limits:
    """How much of the bus a round reads: `reach` times as many groups as the pool has places, of one author
    not more than it may hold, nor of all who are not `known` together; None: everybody is known."""
    return Limits(
        max_bytes=config.poll_bytes,
        max_groups=reach * config.max_groups,
        tail=config.tail,
        max_per_author=most_per_author(config),
        known=known,
        max_others=newcomer_places(config),
        author_share=config.max_peer_share,
        others_share=config.newcomer_share,
    )


def looks(config: PoolConfig) -> tuple[int, int]:
    """Records looked at in a round: under the keys of known authors, and under others."""
    most = LOOKS * config.max_groups
    return most, max(1, int(config.newcomer_share * most))


def most_per_author(config: PoolConfig) -> int:
    """Places that one author may hold."""
    return max(1, int(config.max_groups * config.max_peer_share + 1e-9))


def newcomer_places(config: PoolConfig) -> int:
    """Places that all newcomers together may hold."""
    return max(1, int(config.max_groups * config.newcomer_share + 1e-9))


def places_of(received: Received) -> int:
    """Places that a record takes."""
    return max(1, math.ceil(len(received.signed.payload) / PLACE_BYTES))


class Verdict(Record):
    """What the receiver's own verifier says of a foreign group."""

    outcomes: tuple[Outcome, ...] = ()
    """One per completion, in their order; empty for a group that could not be scored as a whole."""
    reason: str | None = None
    """Why the group is not used, such as `question_mismatch`; a `substandard` one still has outcomes."""

    @classmethod
    def bad(cls, reason: str) -> Self:
        """A group that cannot be used, whatever its completions say."""
        return cls(reason=reason)

    @classmethod
    def at_sight(cls, group: Group) -> Self | None:
        """What needs no verifier: answers that are one text have one score, and teach nothing. Else None."""
        alike = len({completion.text for completion in group.completions}) == 1
        return cls.bad("uninformative") if alike else None

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against the group as a whole."""
        return self.reason is None

    @property
    def scores(self) -> tuple[float | None, ...]:
        """Raw task scores; None where a completion is unscorable."""
        return tuple(outcome.score for outcome in self.outcomes)

    def to_json(self) -> str:
        """The verdict as the journal keeps it."""
        return self.canonical()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The verdict that `to_json` wrote."""
        return cls.model_validate_json(text)


@dataclass(slots=True)
class Entry:
    """A group in the pool. `received_at` is this node's clock; `verdict` is given at sight, or cached by the
    sampler, and so are its `tokens` under this node's vocabulary."""

    received: Received
    group: Group
    received_at: float
    verdict: Verdict | None = None
    tokens: "Tokens | None" = None

    @property
    def group_id(self) -> str:
        """The group's id."""
        return self.received.signed.group_id

    @property
    def places(self) -> int:
        """Places that it takes."""
        return places_of(self.received)

    def age(self, now: float) -> float:
        """Seconds since the bus stamped it; clocks that disagree make nothing younger than new."""
        return max(0.0, now - self.received.timestamp)

    def to_row(self) -> PoolRow:
        """The entry as the journal keeps it."""
        return PoolRow(
            group_id=self.group_id,
            producer_key=self.group.key,
            received=self.received,
            received_at=self.received_at,
            verdict=None if self.verdict is None else self.verdict.to_json(),
        )

    @classmethod
    def from_row(cls, row: PoolRow) -> "Entry":
        """An entry from the journal; its signature was checked before it was written there."""
        return cls(
            received=row.received,
            group=Group.model_validate_json(row.received.signed.payload),
            received_at=row.received_at,
            verdict=None if row.verdict is None else Verdict.from_json(row.verdict),
        )


class Pool:
    """Entries by group id, in the order they came. The bounds hold after `evict`, so call it after adding.

    `known` tells which authors are; all others, the newcomers, together hold no more than `newcomer_share` of
    the places. So much of them they get also when known authors could fill the pool, or nobody would ever
    become known; of what is above it, no newcomer takes anything from a known author. Half of it is for
    newcomers who are `rising`, where they want it: new names that come once leave them a way to be known.
    """

    def __init__(
        self,
        config: PoolConfig,
        known: Callable[[str], bool] = lambda key: True,
        rising: Callable[[str], bool] = lambda key: False,
    ) -> None:
        self.config = config
        self._known, self._rising = known, rising
        self.seen = Seen(self.memory, known)
        self._entries: dict[str, Entry] = {}
        self._new: set[str] = set()
        self._places = _Places(self.memory)
        self._dropped = _Dropped()

    @classmethod
    def restore(
        cls,
        config: PoolConfig,
        rows: Iterable[PoolRow],
        met: Iterable[Met] = (),
        known: Callable[[str], bool] = lambda key: True,
        rising: Callable[[str], bool] = lambda key: False,
    ) -> "Pool":
        """The pool that the journal kept, with its memory of all that was `met`, in order."""
        pool = cls(config, known, rising)
        for one in met:
            pool.seen.note(one)
            if one.author is not None:
                pool._places.add(one.author)
        for row in rows:
            remembered = pool.seen.digest(row.group_id) is not None
            pool.add(Entry.from_row(row))
            if remembered:
                pool._new.discard(row.group_id)
        pool._settle()
        return pool

    @property
    def memory(self) -> int:
        """How many groups are remembered after they have gone."""
        return SEEN_PER_GROUP * self.config.max_groups

    def met(self, group: Group, content_sha256: str, stamp: float | None = None) -> Met:
        """What is to be remembered of a group, once the pool is within its bounds; own ones have no stamp."""
        group_id = group.group_id
        author = group.key if group_id in self._entries else None
        seen = self.seen.get(group_id)
        known = seen is not None and seen.content_sha256 == content_sha256
        mark = seen.fingerprint if seen is not None and known else fingerprint(group)
        return Met(group_id, content_sha256, mark, author, group.key, stamp)

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

    def remove(self, group_ids: Iterable[str]) -> None:
        """Take out groups that were used or found useless; unknown ids are passed over."""
        for group_id in group_ids:
            self._entries.pop(group_id, None)

    def refuse(self, refused: Refused) -> None:
        """Count a group that admission refused."""
        self._dropped.refused[refused.code] += 1
        if refused.code == "stale" and refused.group is not None:
            self._dropped.stale(refused.group)

    def evict(self, now: float) -> dict[str, int]:
        """Drop what exceeds the bounds; how many went, by reason: `age`, `peer_share`, `newcomers`, `number`.

        Of age and share the oldest by the bus's time stamp go first, ties by group id, so that equal pools
        lose equal groups. Of newcomers, and by number, those go whose authors hold most.
        """
        oldest_first = sorted(self._entries.values(), key=lambda e: (e.received.timestamp, e.group_id))
        old = [entry for entry in oldest_first if entry.age(now) > self.config.max_age_s]
        for entry in old:
            self._dropped.stale(entry.group)
        kept = [entry for entry in oldest_first if entry.age(now) <= self.config.max_age_s]
        loud = self._over_share(kept)
        gone = {entry.group_id for entry in loud}
        kept = [entry for entry in kept if entry.group_id not in gone]
        strangers = [entry for entry in kept if not self._known(entry.group.key)]
        crowd = self._over_newcomers(strangers)
        room = self.config.max_groups - (_held(strangers) - _held(crowd))
        familiar = [entry for entry in kept if self._known(entry.group.key)]
        over = self._over_number(familiar, room, known=True)
        counts = {}
        for reason, entries in (("age", old), ("peer_share", loud), ("newcomers", crowd), ("number", over)):
            self.remove([entry.group_id for entry in entries])
            if entries:
                counts[reason] = len(entries)
                self._dropped.evicted[reason] += len(entries)
        self._settle()
        return counts

    def _over_share(self, oldest_first: Collection[Entry]) -> list[Entry]:
        """The oldest groups of every author who has more than their share of the places."""
        limit = most_per_author(self.config)
        held: Counter[str] = Counter()
        for entry in oldest_first:
            held[entry.group.key] += entry.places
        result = []
        for entry in oldest_first:
            if held[entry.group.key] > limit:
                held[entry.group.key] -= entry.places
                result.append(entry)
        return result

    def _over_newcomers(self, oldest_first: Sequence[Entry]) -> list[Entry]:
        """What is left when the newcomers' places are dealt out, half of them to those who are rising."""
        places = newcomer_places(self.config)
        rising = [entry for entry in oldest_first if self._rising(entry.group.key)]
        others = [entry for entry in oldest_first if not self._rising(entry.group.key)]
        over = self._over_number(rising, max((places + 1) // 2, places - _held(others)), known=False)
        return over + self._over_number(others, places - _held(rising) + _held(over), known=False)

    def _over_number(self, oldest_first: Sequence[Entry], places: int, *, known: bool) -> list[Entry]:
        """What is left when `places` are dealt out in turns, one place per author and turn.

        An author's newest groups get their turns first. Where the places end within a turn, arrivals whose
        author had the mean share of the latest places or more stand back, then the older group does. So
        publishing more than others earns no more places, also where there are more authors than places.
        The authors are all `known` or all newcomers.
        """
        if _held(oldest_first) <= places:
            return []
        served = self._places.with_share(lambda author: self._known(author) == known)
        late = {
            entry.group_id
            for entry in oldest_first
            if entry.group_id in self._new and entry.group.key in served
        }
        order = list(reversed(oldest_first))
        if len({entry.group.key for entry in order}) > places:
            order.sort(key=lambda entry: entry.group_id in late)  # or they would displace their author's own
        turns: Counter[str] = Counter()
        queue = []
        for place, entry in enumerate(order):
            turns[entry.group.key] += entry.places
            queue.append((turns[entry.group.key], entry.group_id in late, place))
        over = []
        for _, _, place in sorted(queue):
            places -= order[place].places
            if places < 0:
                over.append(order[place])
                places += order[place].places
        return over

    def _settle(self) -> None:
        """Note whose arrivals have a place now."""
        for entry in self._entries.values():
            if entry.group_id in self._new:
                self._places.add(entry.group.key)
        self._new.clear()

    def metrics(self, now: float) -> dict[str, float]:
        """The series `pool/*`: what is here now, and what was dropped since this was last asked.

        Staleness must not silently favour short, easy answers (TRAPS 8): `pool/stale/chars` and
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


class _Places:
    """Whose groups had the latest places in the pool: a bounded memory that outlives their stay there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._authors: deque[str] = deque()
        self._counts: Counter[str] = Counter()

    def add(self, author: str) -> None:
        """Note a place of `author`."""
        self._authors.append(author)
        self._counts[author] += 1
        if len(self._authors) > self._limit:
            first = self._authors.popleft()
            self._counts[first] -= 1
            if not self._counts[first]:
                del self._counts[first]

    def with_share(self, among: Callable[[str], bool]) -> set[str]:
        """Those of the authors `among` whom it is true of, who had as many places as their mean, or more."""
        counts = {author: count for author, count in self._counts.items() if among(author)}
        total = sum(counts.values())
        return {author for author, count in counts.items() if count * len(counts) >= total}


class _Dropped:
    """Counts of what did not get in or did not stay."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.evicted: Counter[str] = Counter()
        self._stale_tasks: Counter[str] = Counter()
        self._stale_chars: list[float] = []

    def stale(self, group: Group) -> None:
        self._stale_tasks[group.recipe.dataset] += 1
        self._stale_chars.append(_chars(group))

    def metrics(self) -> dict[str, float]:
        metrics = {f"pool/refused/{code}": float(count) for code, count in self.refused.items()}
        metrics |= {f"pool/evicted/{reason}": float(count) for reason, count in self.evicted.items()}
        metrics |= {f"pool/stale/task/{task}": float(count) for task, count in self._stale_tasks.items()}
        if self._stale_chars:
            metrics["pool/stale/chars"] = sum(self._stale_chars) / len(self._stale_chars)
        return metrics


def _held(entries: Iterable[Entry]) -> int:
    """Places that entries take."""
    return sum(entry.places for entry in entries)


def _chars(group: Group) -> float:
    """Mean length of a group's completions in characters."""
    return sum(len(completion.text) for completion in group.completions) / len(group.completions)
