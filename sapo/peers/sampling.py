"""SelectSubset, SampleSelf and SampleExternal of Algorithm 1 (arXiv:2509.08721, section 3)."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sapo.core import own_code
from sapo.core.config.load import ShareConfig
from sapo.core.shares import in_turns
from sapo.learn.advantage import informative
from sapo.peers.pool import Entry

Scores = Sequence[float | None]
"""Raw task scores of a group's completions; None where one is unscorable."""


def select_subset(
    count: int, share: ShareConfig, rng: random.Random, scores: Sequence[Scores] | None = None
) -> list[int]:
    """S of B: the places, ascending, of those of `count` own groups that are published.

    `fraction` and `top` take `share.fraction` of them, rounded up. `top` takes the most informative by
    `scores` (one row per group), ties drawn by `rng`. Raises `ValueError` for `top` without scores.
    """
    if share.select == "all":
        return list(range(count))
    order = list(range(count))
    rng.shuffle(order)
    if share.select == "top":
        if scores is None or len(scores) != count:
            raise ValueError("top needs the scores of every group")
        order.sort(key=lambda place: -information(scores[place]))  # stable: the shuffle settles ties
    # 0.07 * 100 is a little more than 7 in floating point, and must not become 8
    return sorted(order[: math.ceil(share.fraction * count - 1e-9)])


def information(scores: Scores) -> float:
    """Population variance of the scores there are (two-pass); 0 for fewer than two."""
    known = [score for score in scores if score is not None]
    if len(known) < 2:
        return 0.0
    mean = math.fsum(known) / len(known)
    return math.fsum((score - mean) ** 2 for score in known) / len(known)


def sample_self(count: int, want: int, rng: random.Random, useful: Sequence[bool] | None = None) -> list[int]:
    """I of B: the places, ascending, of `want` of `count` own groups, drawn uniformly; at most all. With
    `useful`, one flag per group, those that are come first; the others fill what is left."""
    order = rng.sample(range(count), count if useful else min(want, count))
    if useful:
        order.sort(key=lambda place: not useful[place])  # stable: either part stays in random order
    return sorted(order[:want])


@dataclass(frozen=True, slots=True)
class Draw:
    """The external part of a batch, and what was found out about the pool on the way."""

    chosen: tuple[Entry, ...]
    """At most J informative entries, in the order they were drawn."""
    rejected: dict[str, str]
    """Reason by group id of what is of no use: `uninformative`, `unscorable`, `question_mismatch`, ..."""
    verified: tuple[Entry, ...]
    """Entries verified now, with their verdicts; those of the others were cached or not needed."""
    shortfall: int
    """How many fewer than J were found."""
    waiting: int = 0
    """Groups passed over, unverified: their authors have no verification time left."""

    @property
    def leaving(self) -> set[str]:
        """Ids of the groups that leave the pool: chosen or rejected."""
        return {entry.group_id for entry in self.chosen} | self.rejected.keys()

    def metrics(self) -> dict[str, float]:
        """The series `sampler/*`."""
        reasons = Counter(self.rejected.values())
        unscorable: Counter[str] = Counter()
        for entry in self.verified:
            missing = sum(score is None for score in entry.verdict.scores) if entry.verdict else 0
            unscorable[entry.group.recipe.dataset] += missing
        metrics = {
            "sampler/external": float(len(self.chosen)),
            "sampler/shortfall": float(self.shortfall),
            "sampler/verified": float(len(self.verified)),
            "sampler/uninformative": float(reasons["uninformative"]),
            "sampler/unscorable": float(unscorable.total()),
            "sampler/waiting": float(self.waiting),
        }
        metrics |= {f"sampler/rejected/{reason}": float(count) for reason, count in reasons.items()}
        return metrics | {f"sampler/unscorable/{task}": float(count) for task, count in (+unscorable).items()}


LEAST_SHARE = 1 / 8
"""Of informative groups that is guessed: a draw asks for no more than so many times what it wants."""
Known = Callable[[str], bool]
"""Whether the author with a key is known here; the others are newcomers."""
Verify = Callable[[Sequence[Entry]], Sequence[Entry]]
"""The same entries with their verdicts, and whatever else verifying them found."""
Ready = Callable[[Entry, Sequence[Entry]], bool]
"""Whether an entry may be verified now, together with others that are about to be."""


def informative_share(scores: Sequence[Scores], tolerance: float) -> float:
    """Which part of groups with such scores is informative, as a guess for others; at least `LEAST_SHARE`. A
    node asks its own answers, which a round that is begun again has again: the draw is then the same."""
    useful = sum(informative(row, tolerance) for row in scores)
    return max(LEAST_SHARE, useful / len(scores)) if scores else 1.0


Sampler = Callable[[Sequence[Entry], random.Random], Sequence[Entry]]
"""Orders the pool's entries as a draw is to look at them; all chance comes from the generator."""


def uniform(entries: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """A random permutation."""
    order = list(entries)
    rng.shuffle(order)
    return order


def round_robin(entries: Sequence[Entry], rng: random.Random) -> list[Entry]:
    """A random permutation with authors in turn: one entry of each, then a second of each, and so on. An
    author's share of a draw thus goes by how many authors there are, not by how much it publishes."""
    return in_turns(entries, lambda entry: entry.group.key, rng)


def open_sampler(name: str) -> Sampler:
    """The sampler that `batch.sampler` names. Raises `UserError` for one that is not here."""
    if own_code.is_own(name):
        return own_code.load("batch.sampler", name)
    return round_robin if name == "round_robin" else uniform


def walk(
    entries: Sequence[Entry],
    rng: random.Random,
    known: Known = lambda key: True,
    sampler: Sampler = uniform,
) -> list[Entry]:
    """The order in which a draw looks at the pool: the sampler's, authors who are not `known` last.

    New names thus take no place from known authors. What a sampler leaves out stays in the pool. Raises
    `ValueError` for one that returns an entry twice, or one that is not in the pool.
    """
    order = list(sampler(entries, rng))
    if len({entry.group_id for entry in order} & {entry.group_id for entry in entries}) != len(order):
        raise ValueError("batch.sampler returned an entry twice, or one that is not in the pool")
    order.sort(key=lambda entry: not known(entry.group.key))  # stable: either part is in random order
    return order


def sample_external(
    order: Sequence[Entry],
    want: int,
    verify: Verify,
    *,
    tolerance: float,
    share: float = 1.0,
    ready: Ready = lambda entry, beside: True,
    known: Known = lambda key: True,
    trials: int = 0,
) -> Draw:
    """J of the pool: the first `want` entries of a `walk` whose raw scores spread wider than `tolerance`.

    Only the walk's order decides, and laziness changes neither what is chosen nor its order: a `uniform` one
    gives a draw exactly uniform over the informative entries of all known authors who have verification time
    left to its end, whatever the others do. Entries that are not `ready` when the walk comes to them stay;
    that may depend on what was verified before. `trials` newcomers are verified in any case; what is found
    informative of them waits in the pool for its turn. Raises `ValueError` when `verify` does not answer for
    every completion it was asked about.
    """
    newcomers = [entry for entry in order if entry.verdict is None and not known(entry.group.key)]
    return _Walk(order, want, verify, tolerance, share, ready, newcomers, trials).draw()


@dataclass(frozen=True, slots=True)
class _Walk:
    """A draw under way. Entries without a verdict are verified as the walk comes to them: at a time those it
    is sure to reach before `want` of them are informative, and as many as it will if `share` of them (above
    0) are, for a call costs as much as many groups."""

    order: Sequence[Entry]
    want: int
    verify: Verify
    tolerance: float
    share: float
    ready: Ready
    newcomers: Sequence[Entry]
    trials: int
    found: dict[str, Entry] = field(default_factory=dict)
    """Those verified so far, in that order."""

    def draw(self) -> Draw:
        chosen: list[Entry] = []
        walked: list[Entry] = []
        waiting = 0
        for place, entry in enumerate(self.order):
            if len(chosen) == self.want:
                break
            if self._now(entry).verdict is None and not self._ask(self._ahead(place, len(chosen))):
                waiting += 1
                continue
            walked.append(self._now(entry))
            if rejection(walked[-1], self.tolerance) is None:
                chosen.append(walked[-1])
        while self._ask(self._on_trial(())):
            pass
        reasons = {one.group_id: rejection(one, self.tolerance) for one in (*walked, *self.found.values())}
        return Draw(
            chosen=tuple(chosen),
            rejected={group_id: reason for group_id, reason in reasons.items() if reason is not None},
            verified=tuple(self.found.values()),
            shortfall=self.want - len(chosen),
            waiting=waiting,
        )

    def _now(self, entry: Entry) -> Entry:
        return self.found.get(entry.group_id, entry)

    def _ask(self, entries: Sequence[Entry]) -> bool:
        """Verify entries; whether there were any."""
        for entry, found in zip(entries, self.verify(entries) if entries else (), strict=True):
            assert found.verdict is not None
            if found.verdict.reason is None and len(found.verdict.outcomes) != len(entry.group.completions):
                raise ValueError("a verdict needs one outcome per completion")
            self.found[entry.group_id] = found
        return bool(entries)

    def _ahead(self, place: int, useful: int) -> list[Entry]:
        """The unverified entries from a place on that the walk is sure to reach, and more of them up to as
        many as it is likely to; `useful` are those informative before it.

        Empty if the first is not ready. One that is only not ready beside the others ends the list: it has
        to be asked about again once they are verified. Trials share the first call.
        """
        missing = self.want - useful
        likely = math.ceil(missing * (place + self.want) / (useful + self.want * self.share))
        result: list[Entry] = []
        certain = 0
        for entry in map(self._now, self.order[place:]):
            if certain >= missing and len(result) >= likely:
                break
            if entry.verdict is None:
                if self.ready(entry, result):
                    result.append(entry)
                    certain += 1
                elif not result or self.ready(entry, ()):
                    break
            elif rejection(entry, self.tolerance) is None:
                certain += 1
        return result if self.found or not result else result + self._on_trial(result)

    def _on_trial(self, beside: Sequence[Entry]) -> list[Entry]:
        """The next newcomers who are ready, so that they become known: `trials`, less those among `beside`
        and those verified."""
        ids = {entry.group_id for entry in beside} | self.found.keys()
        missing = self.trials - sum(entry.group_id in ids for entry in self.newcomers)
        result: list[Entry] = []
        for entry in self.newcomers:
            if len(result) >= missing:
                break
            if entry.group_id not in ids and self.ready(entry, [*beside, *result]):
                result.append(entry)
        return result


def rejection(entry: Entry, tolerance: float) -> str | None:
    """Why a verified entry can never be used; None for an informative one."""
    verdict = entry.verdict
    assert verdict is not None
    if verdict.reason is not None:
        return verdict.reason
    if all(score is None for score in verdict.scores):
        return "unscorable"
    return None if informative(verdict.scores, tolerance) else "uninformative"
