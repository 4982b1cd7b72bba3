"""SelectSubset, SampleSelf and SampleExternal of Algorithm 1 (arXiv:2509.08721, section 3)."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sapo.core.config.load import ShareConfig
from sapo.learn.advantage import informative
from sapo.peers.pool import Entry, Verdict

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
    """I of B: the places, ascending, of `want` of `count` own groups, drawn uniformly; at most all.

    With `useful`, one flag per group, those that are come first; the others fill what is left.
    """
    order = rng.sample(range(count), count if useful else min(want, count))
    if useful:
        order.sort(key=lambda place: not useful[place])  # stable: either part stays in random order
    return sorted(order[:want])


@dataclass(frozen=True, slots=True)
class Draw:
    """The external part of a batch, and what was learned about the pool on the way."""

    chosen: tuple[Entry, ...]
    """At most J informative entries, in the order they were drawn."""
    rejected: dict[str, str]
    """Reason by group id of what is of no use: `uninformative`, `unscorable`, `question_mismatch`, ..."""
    verified: int
    """Groups verified now; the others' verdicts were cached or not needed."""
    unscorable: dict[tuple[str, str], int]
    """Unscorable completions among those verified now, by producer key and data set."""
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
        metrics = {
            "sampler/external": float(len(self.chosen)),
            "sampler/shortfall": float(self.shortfall),
            "sampler/verified": float(self.verified),
            "sampler/uninformative": float(reasons["uninformative"]),
            "sampler/unscorable": float(sum(self.unscorable.values())),
            "sampler/waiting": float(self.waiting),
        }
        metrics |= {f"sampler/rejected/{reason}": float(count) for reason, count in reasons.items()}
        for (_, dataset), count in self.unscorable.items():
            name = f"sampler/unscorable/{dataset}"
            metrics[name] = metrics.get(name, 0.0) + count
        return metrics


LEAST_SHARE = 1 / 8
"""Of informative groups that is guessed: a draw asks for no more than so many times what it wants."""
Verify = Callable[[Sequence[Entry]], Sequence[Verdict]]
"""What is found of entries."""
Ready = Callable[[Entry, Sequence[Entry]], bool]
"""Whether an entry may be verified now, together with others that are about to be."""


def informative_share(scores: Sequence[Scores], tolerance: float) -> float:
    """Which part of groups with such scores is informative, as a guess for others; at least `LEAST_SHARE`.

    A node asks its own answers, which a round that is begun again has again: the draw is then the same.
    """
    useful = sum(informative(row, tolerance) for row in scores)
    return max(LEAST_SHARE, useful / len(scores)) if scores else 1.0


def sample_external(
    entries: Sequence[Entry],
    want: int,
    rng: random.Random,
    verify: Verify,
    *,
    tolerance: float,
    share: float = 1.0,
    ready: Ready = lambda entry, beside: True,
    known: Callable[[str], bool] = lambda key: True,
    trials: int = 0,
) -> Draw:
    """J of the pool: `want` entries, exactly uniform over the informative ones (DESIGN 7).

    Walks a random permutation and stops at `want` entries whose raw scores spread wider than `tolerance`;
    only the permutation decides the order. Entries without a verdict are verified as the walk needs them: at
    a time those it is sure to reach, and as many as it will if `share` of them (above 0) are informative, for
    a call costs as much as many groups. That changes neither what is chosen nor its order; the verdict is
    kept in the entry. Raises `ValueError` when `verify` does not answer for every completion it was asked
    about.

    Those whose author is not `known`, the newcomers, come after all others, so that new names take no place
    from known authors. For them to become known `trials` of them are verified in any case, if there are so
    many; what is found informative waits in the pool for its turn.

    Entries that are not `ready` when the walk comes to them are passed over, and stay. Whether one is may
    depend on what was verified before, such as the time its author has left. The draw is exactly uniform
    over the informative entries of all known authors who have time left to its end, whatever the others do.
    """
    order = list(entries)
    rng.shuffle(order)
    order.sort(key=lambda entry: not known(entry.group.key))  # stable: either part is in random order
    newcomers = [entry for entry in order if entry.verdict is None and not known(entry.group.key)]
    chosen: list[Entry] = []
    rejected: dict[str, str] = {}
    fresh: list[Entry] = []
    waiting = 0
    for place, entry in enumerate(order):
        if len(chosen) == want:
            break
        if entry.verdict is None:
            missing = want - len(chosen)
            likely = math.ceil(missing * (place + want) / (len(chosen) + want * share))
            ahead = _needed(order[place:], missing, likely, tolerance, ready)
            if not ahead:
                waiting += 1
                continue
            if not fresh:  # trials share the first call
                ahead += _on_trial(newcomers, trials, ahead, ready)
            fresh += _verify(ahead, verify)
        reason = _rejection(entry, tolerance)
        if reason is None:
            chosen.append(entry)
        else:
            rejected[entry.group_id] = reason
    while ahead := _on_trial(newcomers, trials, (), ready):
        fresh += _verify(ahead, verify)
    rejected |= {entry.group_id: reason for entry in fresh if (reason := _rejection(entry, tolerance))}
    return Draw(
        tuple(chosen), rejected, len(fresh), _unscorable(fresh), shortfall=want - len(chosen), waiting=waiting
    )


def _unscorable(entries: Sequence[Entry]) -> dict[tuple[str, str], int]:
    """Unscorable completions by producer key and data set."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        missing = sum(score is None for score in entry.verdict.scores) if entry.verdict else 0
        if missing:
            counts[entry.group.key, entry.group.recipe.dataset] += missing
    return dict(counts)


def _on_trial(newcomers: Sequence[Entry], count: int, beside: Sequence[Entry], ready: Ready) -> list[Entry]:
    """The next newcomers who are `ready`, until with those `beside` and those verified they are `count`."""
    ids = {entry.group_id for entry in beside}
    missing = count - sum(entry.group_id in ids or entry.verdict is not None for entry in newcomers)
    result: list[Entry] = []
    for entry in newcomers:
        if len(result) >= missing:
            break
        if entry.verdict is None and entry.group_id not in ids and ready(entry, [*beside, *result]):
            result.append(entry)
    return result


def _needed(ahead: Sequence[Entry], want: int, count: int, tolerance: float, ready: Ready) -> list[Entry]:
    """The unverified entries that the walk is sure to reach, and more of them up to `count`.

    Empty if the first is not `ready`. One that is only not ready beside the others ends the list: it has to
    be asked about again once they are verified.
    """
    result: list[Entry] = []
    certain = 0
    for entry in ahead:
        if certain >= want and len(result) >= count:
            break
        if entry.verdict is None:
            if ready(entry, result):
                result.append(entry)
                certain += 1
            elif not result or ready(entry, ()):
                break
        elif _rejection(entry, tolerance) is None:
            certain += 1
    return result


def _verify(entries: Sequence[Entry], verify: Verify) -> Sequence[Entry]:
    """Have entries verified; returns them."""
    for entry, verdict in zip(entries, verify(entries), strict=True):
        if verdict.usable and len(verdict.outcomes) != len(entry.group.completions):
            raise ValueError("a verdict needs one outcome per completion")
        entry.verdict = verdict
    return entries


def _rejection(entry: Entry, tolerance: float) -> str | None:
    """Why an entry can never be used; None for an informative one."""
    verdict = entry.verdict
    assert verdict is not None
    if verdict.reason is not None:
        return verdict.reason
    if all(score is None for score in verdict.scores):
        return "unscorable"
    return None if informative(verdict.scores, tolerance) else "uninformative"
