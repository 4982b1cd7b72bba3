"""Sampler `fresh`: of the informative groups found, those that are new, spread and near (docs/adaptive.md).

Nothing that a peer says about itself moves a weight: scores are the own verifier's, ages the own rounds
since the bus had a group, gaps the own policy's.
"""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from sapo.core.config.adaptive import AdaptiveConfig
from sapo.peers.pool import Entry
from sapo.peers.sampling import Draw, information

WIDEST = 0.25
"""The largest variance of scores between 0 and 1."""
ROUNDS = 1024
"""Ends of own rounds that are remembered; older groups count as so old."""
AUTHORS = 64
"""Authors whose gap is remembered: those of the newest groups."""
DECAY = 0.9
"""What is kept of an author's mean gap when a value is added."""


class Freshness:
    """The choice of J of 2 J informative groups, and what it remembers of the rounds before.

    The journal keeps `remembered` with each result. The choice itself is in the round's batch, so a round
    that is replayed needs none of it.
    """

    def __init__(self, config: AdaptiveConfig, remembered: str = "") -> None:
        self.config = config
        self.load(remembered)
        self.mean_weight: float | None = None
        """Of the groups chosen last."""

    def load(self, remembered: str) -> None:
        """Go on with what a round's `remembered` gave."""
        memory: dict[str, Any] = json.loads(remembered) if remembered else {}
        self._ends: list[float] = memory.get("ends", [])
        self._gaps: dict[str, float] = memory.get("gaps", {})

    def remembered(self) -> str:
        """What the next round needs of those before, as JSON."""
        return json.dumps({"ends": self._ends, "gaps": self._gaps})

    def choose(self, draw: Draw, want: int, rng: random.Random) -> Draw:
        """The draw with `want` of its groups, in proportion to their weights; the others stay in the pool."""
        weights = [self._weight(entry) for entry in draw.chosen]
        places = weighted_draw(weights, want, rng)
        self.mean_weight = fmean(weights[place] for place in places) if places else None
        chosen = tuple(draw.chosen[place] for place in places)
        return replace(draw, chosen=chosen, shortfall=want - len(chosen))

    def learned(self, gaps: Iterable[tuple[str, float]], finished: float) -> None:
        """Note a round's end, and by how much less probable than own answers each group's are. `gaps` are the
        groups' authors with that number, in nats per token."""
        self._ends = [*self._ends, finished][-ROUNDS:]
        found: dict[str, list[float]] = {}
        for author, gap in gaps:
            found.setdefault(author, []).append(gap)
        for author, values in found.items():
            before = self._gaps.pop(author, fmean(values))
            self._gaps[author] = DECAY * before + (1.0 - DECAY) * fmean(values)
        while len(self._gaps) > AUTHORS:
            del self._gaps[next(iter(self._gaps))]

    def metrics(self) -> dict[str, float]:
        """The series `adaptive/weight` of the round in hand."""
        return {} if self.mean_weight is None else {"adaptive/weight": self.mean_weight}

    def _weight(self, entry: Entry) -> float:
        assert entry.verdict is not None
        age = sum(end > entry.received.timestamp for end in self._ends)
        gap = self._gaps.get(entry.group.key, 0.0)
        return freshness(self.config, information(entry.verdict.scores), age, gap)


def freshness(config: AdaptiveConfig, spread: float, age: float, gap: float) -> float:
    """The weight of a group, from 0 to 1: `(v / v_max)^eta exp(-a / tau) exp(-kappa max(0, gap))`.

    `spread` is the variance v of its scores, as in DOTS, `age` is in own rounds, as in FreshPER's replay, and
    `gap` is how much less probable the own policy finds its author's answers than its own, in nats per token.
    """
    learnable = min(1.0, spread / WIDEST) ** config.eta
    return learnable * math.exp(-age / config.tau - config.kappa * max(0.0, gap))


def weighted_draw(weights: Sequence[float], want: int, rng: random.Random) -> list[int]:
    """Places of `want` weights, drawn in proportion to them without replacement, the first drawn first.

    Those of weight 0 come last. Efraimidis and Spirakis 2006, in logarithms: u^(1/w) is 0 for small w.
    """
    keys = []
    for place, weight in enumerate(weights):
        chance = 1.0 - rng.random()  # never 0
        keys.append((math.log(chance) / weight if weight > 0.0 else -math.inf, chance, place))
    return [place for _, _, place in sorted(keys, reverse=True)[:want]]
