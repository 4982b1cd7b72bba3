"""Noticing that a node unlearns: probes that stay clearly below the best one."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sapo.core.intervals import paired_interval
from sapo.node.probes import Probe


@dataclass(frozen=True, slots=True)
class Fall:
    """The best probe's round, and what the newest ones lost since, in words."""

    best: int
    alarm: str


def best_of(found: Sequence[Probe]) -> Probe | None:
    """The probe with the highest pass@1, the first of equals; None of none."""
    return max(found, key=lambda probe: (statistics.fmean(probe.sampled), -probe.round), default=None)


def fall(found: Sequence[Probe], many: int) -> Fall | None:
    """Whether the last `many` probes, by round, are each below the best by more than chance.

    Probes are compared on the same questions, pair by pair: the lower end of the 95 % interval of what was
    lost lies above 0. None for `many` = 0.
    """
    best = best_of(found)
    last = [probe for probe in found[-many:] if best is not None and probe.round > best.round] if many else []
    if best is None or not many or len(last) < many:
        return None
    lost = [[a - b for a, b in zip(best.sampled, probe.sampled, strict=True)] for probe in last]
    if min(paired_interval(one, best.asked).low for one in lost) <= 0:
        return None
    alarm = (
        f"eval/pass_at_1 was clearly below its best, that of round {best.round}, in {many} probes in a row; "
        f"now by {100 * statistics.fmean(lost[-1]):.1f} points"
    )
    return Fall(best.round, alarm)
