"""95 % intervals of means over questions, for few questions as well as many.

A question may stand in a list several times: drawn several times, and asked once. `asked` then tells
which entries are the same question; without it all differ. Such entries are no independent evidence: an
interval is that of the effective number of questions.
"""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Z = statistics.NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """Both ends of a 95 % interval."""

    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the width."""
        return (self.high - self.low) / 2


def effective(asked: Sequence[Hashable]) -> float:
    """The effective number of questions, (Σw)² / Σw² over how often each was drawn (Kish, 1965)."""
    return len(asked) ** 2 / sum(weight**2 for weight in Counter(asked).values()) if asked else 0.0


def share_interval(
    values: Sequence[float], asked: Sequence[Hashable] | None = None, *, samples: int = 1
) -> Interval:
    """Wilson's score interval of the mean of shares, each of the passes of `samples` answers.

    Shares of several answers spread less than single passes of the same mean, and count as more questions by
    as much, up to `samples` times. Raises `ValueError` without values.
    """
    p = statistics.fmean(values)
    n = _number(values, asked)
    if samples > 1:
        spread = statistics.fmean((value - p) ** 2 for value in values)
        n *= min(samples, p * (1 - p) / spread) if spread else 1
    middle, square = (p + Z**2 / (2 * n)) / (1 + Z**2 / n), Z**2 / n
    half = Z / (1 + square) * math.sqrt(max(0.0, p * (1 - p) / n + square / (4 * n)))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def paired_interval(differences: Sequence[float], asked: Sequence[Hashable] | None = None) -> Interval:
    """The interval of the mean of paired differences, each within [-1, 1], of Bonett and Price (2012).

    It is the normal one after two more questions: one that only the first side passes, and one that only the
    second does. So it has a width where no question differs. Raises `ValueError` without differences.
    """
    n = _number(differences, asked)
    mean = n * statistics.fmean(differences) / (n + 2)
    square = (n * statistics.fmean(one**2 for one in differences) + 2) / (n + 2)
    half = Z * math.sqrt((square - mean**2) / (n + 2))
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


def _number(values: Sequence[float], asked: Sequence[Hashable] | None) -> float:
    return float(len(values)) if asked is None else effective(asked)
