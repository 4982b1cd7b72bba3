"""How every bound on what peers cost is divided among them.

For each bounded thing *u* and each party *p*, a known author or all newcomers together:

    cost_u(p) <= share(p) * bound_u

The share of a known author is `pool.max_peer_share`, that of all newcomers together `pool.newcomer_share`:
new identities cost nothing, so two thousand of them have what one has. The parts may add up to more than the
bound, which holds in any case. What is bounded, and who keeps to it:

| unit | bound | kept by |
|---|---|---|
| bytes and groups of a poll | `pool.poll_bytes`, `pool.max_groups` | `sapo.bus.base.Reading` |
| signatures checked in a round | `LOOKS` times `pool.max_groups` | `sapo.peers.quotas` |
| places in the pool, of 64 kB each | `pool.max_groups` | `sapo.peers.pool` |
| groups and authors remembered | 16 times `pool.max_groups`, 4,096 | `sapo.peers.dedup`, `.resend_guard` |
| seconds: admission, verification, excess of an update | `pool.verify_share` of own work | `.quotas` |
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shares:
    """The part of any bound that one author has, and that all newcomers have, who are not `known`.

    Newcomers who are `on_probation`, of whom something was found sound, have half of the newcomers' part if
    they want it: new names that come once leave them a way to become known.
    """

    author: float = 1.0
    newcomers: float = 1.0
    known: Callable[[str], bool] = lambda key: True
    on_probation: Callable[[str], bool] = lambda key: False

    def divided(self, items: Iterable[T], author: Callable[[T], str]) -> tuple[list[T], list[T], list[T]]:
        """Items of known authors, of newcomers on probation and of other newcomers, each in their order."""
        kinds: tuple[list[T], list[T], list[T]] = ([], [], [])
        for item in items:
            key = author(item)
            kinds[0 if self.known(key) else 1 if self.on_probation(key) else 2].append(item)
        return kinds

    def most(self, bound: int) -> int:
        """What one author may have of `bound`; at least 1."""
        return max(1, int(self.author * bound + 1e-9))

    def most_newcomers(self, bound: int) -> int:
        """What all newcomers together may have of `bound`; at least 1."""
        return max(1, int(self.newcomers * bound + 1e-9))


EQUAL = Shares()
"""Everybody is known, and may have all there is."""


class Meter:
    """What was taken of a bound that is taken bit by bit. A party's first item fits wherever any does."""

    def __init__(self, shares: Shares, bound: int) -> None:
        self._shares, self._most = shares, shares.most(bound)
        self._together = {True: bound, False: shares.most_newcomers(bound)}
        self._sums = {True: 0, False: 0}
        self._authors: Counter[str] = Counter()

    def fits(self, key: str, amount: int = 1) -> bool:
        """Whether an author may take so much more."""
        known = self._shares.known(key)
        if not self._sums[known]:
            return True
        author = self._authors[key]
        return self._has_room(known, amount) and (author + amount <= self._most or (known and not author))

    def newcomers_full(self, key: str, amount: int) -> bool:
        """Whether it is a newcomer's, and would not fit whichever newcomer's it was."""
        return not self._shares.known(key) and not self._has_room(False, amount)

    def _has_room(self, known: bool, amount: int) -> bool:
        return not self._sums[known] or self._sums[known] + amount <= self._together[known]

    def move(self, key: str, other: str, amount: int) -> None:
        """Have it count as another's: it was not the author's."""
        for one, more in ((key, -amount), (other, amount)):
            self._sums[self._shares.known(one)] += more
            self._authors[one] += more

    def disown(self, key: str) -> None:
        """Have it count for the bound alone: it was not the author's, nor another's."""
        self._authors[key] -= 1

    def take(self, key: str, amount: int = 1) -> bool:
        """Take it if it fits; whether it did."""
        fits = self.fits(key, amount)
        if fits:
            self._sums[self._shares.known(key)] += amount
            self._authors[key] += amount
        return fits


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that wants to stay where room is bounded: `size` of it, for an author. Within a turn a `late`
    one stands back."""

    id: str
    author: str
    size: int = 1
    late: bool = False


def size_of(claims: Iterable[Claim]) -> int:
    """What claims want together."""
    return sum(claim.size for claim in claims)


def over(newest_first: Sequence[Claim], shares: Shares, bound: int, *, lend: bool = False) -> dict[str, str]:
    """Ids of the claims that have to go so that `bound` and the shares hold, each with the reason.

    Reasons are `peer_share`, the oldest of an author who has more than their share; `newcomers`; `number`,
    the bound itself. The places of either kind are dealt out in turns, one per author and turn, to an
    author's newest claims first: publishing more than others earns no more places. With `lend`, newcomers
    have besides what known authors do not want.
    """
    gone: dict[str, str] = {}
    taken: Counter[str] = Counter()
    within: list[Claim] = []
    for claim in newest_first:
        if taken[claim.author] + claim.size > shares.most(bound):
            gone[claim.id] = "peer_share"
            continue
        taken[claim.author] += claim.size
        within.append(claim)
    known, on_probation, new = shares.divided(within, lambda claim: claim.author)
    places = shares.most_newcomers(bound)
    if lend:
        places = max(places, bound - size_of(known))
    half = max((places + 1) // 2, places - size_of(new))
    stay = _deal(on_probation, half)
    stay += _deal(new, places - size_of(stay))
    stay += _deal(known, bound - size_of(stay))
    kept = {claim.id for claim in stay}
    for reason, claims in (("number", known), ("newcomers", [*on_probation, *new])):
        gone |= {claim.id: reason for claim in claims if claim.id not in kept}
    return gone


def _deal(claims: Sequence[Claim], places: int) -> list[Claim]:
    """Those that stay when `places` are dealt out in turns, one place per author and turn."""
    if size_of(claims) <= places:
        return list(claims)
    order = list(claims)
    if len({claim.author for claim in claims}) > places:
        order.sort(key=lambda claim: claim.late)  # or they would displace their author's own
    turns: Counter[str] = Counter()
    queue = []
    for place, claim in enumerate(order):
        turns[claim.author] += claim.size
        queue.append((turns[claim.author], claim.late, place))
    stay = []
    for _, _, place in sorted(queue):
        if order[place].size <= places:
            stay.append(order[place])
            places -= order[place].size
    return stay


def in_turns(items: Iterable[T], author: Callable[[T], str], rng: random.Random) -> list[T]:
    """One item of every author, another of every author, and so on; authors and items in random order."""
    of_author: dict[str, list[T]] = {}
    for item in items:
        of_author.setdefault(author(item), []).append(item)
    order = sorted(of_author)
    rng.shuffle(order)
    for key in order:
        rng.shuffle(of_author[key])
    return by_turns(*(of_author[key] for key in order))


def by_turns(*rows: Sequence[T]) -> list[T]:
    """The first of each row, the second of each, and so on."""
    return [item for turn in zip_longest(*rows, fillvalue=None) for item in turn if item is not None]


class Served:
    """Whose claims had the latest places: a bounded memory that outlives their stay."""

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

    def often(self, shares: Shares) -> Collection[str]:
        """Authors who had as many places as the mean of their kind, known or newcomers, or more."""
        found: set[str] = set()
        for kind in (True, False):
            counts = {one: count for one, count in self._counts.items() if shares.known(one) == kind}
            total = sum(counts.values())
            found |= {author for author, count in counts.items() if count * len(counts) >= total}
        return found
