"""What seeds can say: intervals, paired comparisons, power, censored times. The formulas are scipy's.

Every function takes plain floats and gives plain floats; None stands for unknown.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

CONFIDENCE, POWER = 0.95, 0.8
ALPHA = 0.05
ARRANGEMENTS = 3_500
"""Permutation test: enumerate all splits up to this many (7 vs 7), sample this many beyond."""
ALIKE = 1e-9
"""Shares that differ by less are one share, summed in two orders."""
HALF = 0.5 + 1e-9
"""A survival curve has come down to one half here: products of fractions miss it by a rounding error."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with Student's 95 % interval; `spread` is the standard deviation of one value.

    One seed has no interval and no spread.
    """

    mean: float
    low: float | None
    high: float | None
    spread: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Difference(Estimate):
    """Mean of the differences of seeds that both sides have, with interval and two-sided p of the paired
    t-test, and the smallest true difference that as many seeds show at 80 % power given this spread.

    `p` is None where all differences are equal: there is no spread to measure them by.
    """

    p: float | None
    smallest: float | None


@dataclass(frozen=True, slots=True)
class Median:
    """Kaplan-Meier median of times of which some are only known to be longer than what was seen.

    `value` is None where fewer than half reach the end, `high` where the band does not come down to one
    half: below seven runs it never does.
    """

    value: float | None
    low: float | None
    high: float | None
    reached: int
    n: int


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed. Raises `ValueError` where there is none."""
    if not values:
        raise ValueError("an estimate of no values")
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Estimate(mean, None, None, None, n)
    spread = float(np.std(values, ddof=1))
    if _flat(values):
        return Estimate(mean, mean, mean, 0.0, n)
    found = stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
    return Estimate(mean, float(found.low), float(found.high), spread, n)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours minus theirs, by the seeds that both have; None where there is no such seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    a, b = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    found = over_seeds(differences)
    p = smallest = None
    if found.spread is not None and not _flat(differences):
        p, smallest = float(stats.ttest_rel(a, b).pvalue), smallest_difference(found.spread, found.n)
    return Difference(found.mean, found.low, found.high, found.spread, found.n, p, smallest)


def geometric_mean(values: Sequence[float]) -> Estimate | None:
    """The exponential of the mean logarithm and of its interval; None where a value is not positive."""
    if not values or min(values) <= 0:
        return None
    logs = over_seeds([float(value) for value in np.log(values)])
    low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Estimate(float(np.exp(logs.mean)), low, high, logs.spread, logs.n)


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Geometric mean of ours over theirs, by the seeds that both have; None where that has no meaning."""
    seeds = sorted(ours.keys() & theirs.keys())
    if any(min(ours[seed], theirs[seed]) <= 0 for seed in seeds):
        return None
    return geometric_mean([ours[seed] / theirs[seed] for seed in seeds])


def _flat(values: Sequence[float]) -> bool:
    """Whether values differ by rounding errors only: a t-test of such is about nothing but these."""
    return max(values) - min(values) <= 1e-12 * max(1e-300, *(abs(value) for value in values))


def adjusted(ps: Sequence[float | None]) -> list[float | None]:
    """p values as Benjamini and Hochberg adjust them (false discovery rate); None stays None."""
    known = [i for i, p in enumerate(ps) if p is not None]
    result: list[float | None] = [None] * len(ps)
    if known:
        for i, p in zip(known, stats.false_discovery_control([ps[i] for i in known]), strict=True):
            result[i] = float(p)
    return result


def power(difference: float, spread: float, n: int, alpha: float = ALPHA) -> float:
    """Power of a paired t-test of n seeds at `alpha`, two-sided."""
    if difference == 0:
        return alpha
    # a noncentral t squared is a noncentral F: scipy's t is NaN at some centres, its F wrong at 0 alone
    bound = stats.f.isf(alpha, 1, n - 1)
    return float(stats.ncf.sf(bound, 1, n - 1, n * (difference / spread) ** 2))


def smallest_difference(spread: float, n: int, alpha: float = ALPHA) -> float | None:
    """The true difference that n seeds show at 80 % power; None below two seeds or without spread."""
    if n < 2 or spread <= 0:
        return None
    high = 1.0
    while power(high, 1.0, n, alpha) < POWER:
        high *= 2
    return spread * float(optimize.brentq(lambda d: power(d, 1.0, n, alpha) - POWER, 0.0, high))


def spread_beside_seeds(by_arm: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the differences of two arms over seeds, from values by arm and then by seed: what
    is left of them beside the arms' and the seeds' means. None below two arms or two seeds."""
    values = np.array(by_arm, dtype=float)
    if min(values.shape) < 2:
        return None
    left = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    return math.sqrt(2 * float(np.sum(left**2)) / freedom)


def survival_median(times: Sequence[float], reached: Sequence[bool]) -> Median:
    """The median time to the end, of runs that reached it then and of runs that had not by then."""
    if not any(reached):
        return Median(None, None, None, 0, len(times))
    curve = stats.ecdf(_censored(times, reached)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the band where the curve is at 0 or 1
        band = curve.confidence_interval(CONFIDENCE, method="log-log")
    middle, low, high = (_falls_to_half(part) for part in (curve, band.low, band.high))
    return Median(middle, low, high, sum(reached), len(times))


Times = tuple[Sequence[float], Sequence[bool]]
"""When each run ended, and whether it had reached the end by then or is censored."""


def same_survival(ours: Times, theirs: Times) -> float | None:
    """Two-sided p that both reach the end alike: the log-rank statistic among those of all arrangements of
    the runs on two such sides. With a handful of runs its usual approximation is far too sure.

    None if no run reaches it, or all at one time, or a side has one run: that is no evidence of who
    is sooner.
    """
    times, reached = [*ours[0], *theirs[0]], [*ours[1], *theirs[1]]

    def statistic(a: Sequence[int], b: Sequence[int]) -> float:
        sides = (_censored([times[i] for i in side], [reached[i] for i in side]) for side in (a, b))
        return float(stats.logrank(*sides).statistic)

    if not any(reached) or min(len(ours[0]), len(theirs[0])) < 2:
        return None
    sides = np.split(np.arange(len(times)), [len(ours[0])])
    with np.errstate(invalid="ignore"):
        if math.isnan(statistic(*sides)):
            return None
        found = stats.permutation_test(
            sides, statistic, vectorized=False, n_resamples=ARRANGEMENTS, rng=np.random.default_rng(0)
        )
    return float(found.pvalue)


def _censored(times: Sequence[float], reached: Sequence[bool]) -> stats.CensoredData:
    ended = [time for time, done in zip(times, reached, strict=True) if done]
    going = [time for time, done in zip(times, reached, strict=True) if not done]
    return stats.CensoredData(uncensored=ended, right=going)


def _falls_to_half(curve: "stats._survival.EmpiricalDistributionFunction") -> float | None:
    for time, share in zip(curve.quantiles, curve.probabilities, strict=True):
        if share <= HALF:
            return float(time)
    return None


def time_to(points: Sequence[tuple[float, float]], target: float) -> tuple[float, bool]:
    """Where a curve of (x, y) first has y >= target, on the line between its points; or its end and False.

    Raises `ValueError` for a curve without points.
    """
    if not points:
        raise ValueError("a curve without points reaches nothing")
    before: tuple[float, float] | None = None
    for x, y in points:
        if y >= target - ALIKE:
            if before is None or before[1] >= y:
                return x, True
            part = (target - before[1]) / (y - before[1])
            return before[0] + (x - before[0]) * min(1.0, part), True
        before = (x, y)
    return points[-1][0], False


def rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The never falling curve that is nearest to one of (x, y), by least squares.

    A noisy curve touches a level long before it stays there; this one does not.
    """
    fitted = optimize.isotonic_regression([y for _, y in points]).x
    return [(x, float(y)) for (x, _), y in zip(points, fitted, strict=True)]


def window_of(rounds: int) -> int:
    """Width of the moving average in rounds: the paper's 100, or a twentieth of a run below 2,000."""
    return min(100, max(1, rounds // 20))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Means of each `window` values in a row; shorter by `window - 1` than the values, empty if too few."""
    if len(values) < window:
        return []
    return [float(value) for value in np.convolve(values, np.full(window, 1 / window), mode="valid")]


def oscillation(values: Sequence[float]) -> float | None:
    """Standard deviation of the moving average about its own cubic trend; None below eight such means."""
    smooth = moving_average(values, window_of(len(values)))
    if len(smooth) < 8:
        return None
    x = np.arange(len(smooth))
    trend = np.polynomial.Polynomial.fit(x, smooth, deg=3)(x)
    return float(np.sqrt(np.sum((smooth - trend) ** 2) / (len(smooth) - 4)))
