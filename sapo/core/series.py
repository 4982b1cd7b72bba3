"""What a figure may be: the unit and the range of each series, and of each figure in a run's records.

A wrong figure is a fault of this program. It is refused where figures are written down, so that a chart, a
journal or a summary never holds one; a node leaves it out of its record and says so, and learns on.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Annotated

from pydantic import BeforeValidator

from sapo.core.errors import SapoError

log = logging.getLogger(__name__)

ROUNDING = 1e-9
"""How far a mean of shares may lie outside their range."""
LARGEST = 2.0**53
"""No whole number above it is exact as a float: a count that large is none."""
INFINITY = math.inf


@dataclass(frozen=True, slots=True)
class Range:
    """A unit, and the lowest and the highest value that a figure in it can have; any is finite."""

    unit: str
    low: float = -INFINITY
    high: float = INFINITY

    def problem(self, value: object) -> str | None:
        """What is wrong with a value; None where it is right."""
        if isinstance(value, bool) or not isinstance(value, Real):
            return "is no number"
        if not math.isfinite(value):
            return "is not finite"
        if not self.low - ROUNDING <= float(value) <= self.high + ROUNDING:
            return f"is outside {self.low:g} to {self.high:g} ({self.unit})"
        return None

    def checked(self, value: object) -> object:
        """The value itself. Raises `ValueError` where it is wrong."""
        problem = self.problem(value)
        if problem is not None:
            raise ValueError(f"{value!r} {problem}")
        return value


ANY = Range("")
SHARE = Range("share", 0.0, 1.0)
DIFFERENCE = Range("difference of shares", -1.0, 1.0)
COUNT = Range("count", 0.0, LARGEST)
SECONDS = Range("seconds", 0.0, LARGEST)
AGE = Range("seconds", -LARGEST, LARGEST)
"""By two clocks, so it may be below zero."""
NATS = Range("nats")
SIZE = Range("size", 0.0)

Share = Annotated[float, BeforeValidator(SHARE.checked)]
Difference = Annotated[float, BeforeValidator(DIFFERENCE.checked)]
Amount = Annotated[float, BeforeValidator(COUNT.checked)]
Number = Annotated[int, BeforeValidator(COUNT.checked)]

SERIES: tuple[tuple[Range, str], ...] = (
    (COUNT, "eval/questions eval/full/questions eval/effective eval/full/effective"),
    (SHARE, "reward/* eval/* trait/* share/* judge/reward ensemble/*"),
    (COUNT, "judge/cumulative"),
    (DIFFERENCE, "gain/*"),
    (AGE, "pool/age_* staleness/mean_s staleness/max_s peers/credit/*"),
    (SECONDS, "time/* peers/seconds peers/seconds/*"),
    (SHARE, "learn/clip_share learn/truncated learn/unscorable learn/*_share_external"),
    (NATS, "learn/entropy learn/logprob_* learn/engine_gap"),
    (SIZE, "learn/grad_norm gossip/distance gossip/reach gossip/jump adaptive/weight"),
    (ANY, "learn/loss"),
    (
        COUNT,
        "pool/* sampler/* peers/* identity/* staleness/* tokens/* learn/* adaptive/* gossip/* member/* "
        "outage/* owed/* prefect/*",
    ),
)
"""Ranges and the series that have them, the first that fits; any other series is finite (docs/metrics.md)."""
_PATTERNS = tuple((pattern, kind) for kind, patterns in SERIES for pattern in patterns.split())


class WrongFigure(SapoError):
    """A value that its series cannot have."""

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(f"{name} = {value!r} {problem}: it is not recorded")


def range_of(name: str) -> Range:
    """The unit and range of a series."""
    return next((kind for pattern, kind in _PATTERNS if fnmatchcase(name, pattern)), ANY)


def check(name: str, value: object) -> None:
    """Raise `WrongFigure` for a value that the series cannot have."""
    problem = range_of(name).problem(value)
    if problem is not None:
        raise WrongFigure(name, value, problem)


class Sieve:
    """Takes wrong figures out of what a node records, and raises one alarm for each series that has any."""

    def __init__(self, node: str) -> None:
        self._node, self._told = node, set[str]()

    def kept(self, figures: Mapping[str, object]) -> dict[str, float]:
        """The figures that their series can have."""
        found: dict[str, float] = {}
        for name, value in figures.items():
            try:
                check(name, value)
                found[name] = float(value)  # type: ignore[arg-type]
            except WrongFigure as wrong:
                if name not in self._told:
                    self._told.add(name)
                    log.error("ALARM: %s computed a wrong figure: %s", self._node, wrong)
        return found
