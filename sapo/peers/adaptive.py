"""Draws from the pool that prefer some groups to others, by what this node measured (docs/adaptive.md).

Nothing that a peer says about itself moves a weight: scores are the own verifier's, ages the own rounds
since the bus had a group, gaps the own policy's.
"""

import math
import random
from collections.abc import Mapping, Sequence

from sapo.core.config.adaptive import AdaptiveConfig
from sapo.peers.pool import Entry
from sapo.peers.sampling import information

WIDEST = 0.25
"""The largest variance of scores between 0 and 1."""


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


def rescue_order(
    entries: Sequence[Entry], passed: Mapping[str, float], config: AdaptiveConfig, rng: random.Random
) -> list[Entry]:
    """Entries of the tasks that the own policy fails most first, in random order within a task.

    `passed` is the own share of right answers by task; a task not asked so far counts as failed. With
    `config.only`, tasks of `config.theta` or more are left out.
    """
    order = list(entries)
    rng.shuffle(order)
    order.sort(key=lambda entry: passed.get(entry.group.recipe.dataset, 0.0))  # stable
    if config.only:
        order = [one for one in order if passed.get(one.group.recipe.dataset, 0.0) < config.theta]
    return order


def spread_of(entry: Entry) -> float:
    """Variance of a verified entry's scores."""
    assert entry.verdict is not None
    return information(entry.verdict.scores)
