"""Draws by freshness, and what they remember."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learn_support import batch, group
from makers import make_entry, make_verdict
from scipy.stats import chisquare

from sapo.core.config.adaptive import AdaptiveConfig
from sapo.core.types import sha256
from sapo.learn.update import StepResult
from sapo.node.batch import foreign_gaps
from sapo.peers.freshness import Freshness, freshness, weighted_draw
from sapo.peers.pool import Entry
from sapo.peers.sampling import Draw

EVEN = AdaptiveConfig(eta=0, tau=1e300)


def verified(name: str, position: int, scores: tuple[float, ...], timestamp: float = 0.0) -> Entry:
    entry = make_entry(name, position=position)
    received = entry.received.model_copy(update={"timestamp": timestamp})
    return replace(entry, received=received, verdict=make_verdict(scores))


def test_a_weight_is_spread_times_freshness_times_nearness() -> None:
    config = AdaptiveConfig(eta=2, tau=4, kappa=1)
    assert freshness(config, 0.125, 0, 0.0) == pytest.approx(0.25)
    assert freshness(config, 0.25, 4, 0.0) == pytest.approx(0.36788, abs=1e-5)
    assert freshness(config, 0.25, 0, 2.0) == pytest.approx(0.13534, abs=1e-5)
    assert freshness(config, 0.25, 0, -2.0) == 1.0


def test_no_preference_is_uniform() -> None:
    """eta = 0 and tau without end: chi-square over all pairs of four."""
    stream = random.Random(1)
    weights = [
        freshness(EVEN, spread, age, 0.0) for spread, age in [(0.25, 0), (0.01, 50), (0.1, 9), (0.2, 1)]
    ]
    found = Counter(tuple(sorted(weighted_draw(weights, 2, stream))) for _ in range(6000))
    assert len(found) == 6
    assert chisquare(list(found.values())).pvalue > 0.001


@given(st.lists(st.floats(0, 1), max_size=12), st.integers(0, 14), st.integers(0, 9))
def test_no_place_is_drawn_twice_and_what_weighs_nothing_comes_last(
    weights: list[float], want: int, seed: int
) -> None:
    places = weighted_draw(weights, want, random.Random(seed))
    assert len({*places}) == len(places) == min(want, len(weights))
    light = [weights[place] == 0.0 for place in places]
    assert light == sorted(light)


def test_it_goes_on_where_it_was() -> None:
    one = Freshness(AdaptiveConfig())
    one.learned([("a" * 64, 1.5), ("b" * 64, -0.5), ("a" * 64, 0.5)], 5.0)
    other = Freshness(AdaptiveConfig(), one.remembered())
    assert (
        other.remembered()
        == one.remembered()
        == json.dumps({"ends": [5.0], "gaps": {"a" * 64: 1.0, "b" * 64: -0.5}})
    )


def test_old_and_narrow_groups_are_drawn_less_and_authors_of_improbable_texts_too() -> None:
    fresh = Freshness(AdaptiveConfig(tau=1, kappa=1))
    foreign = group((3,), [(4, 1), (5, 1)], [0, 1], source="external", producer="far", position=1)
    for end in range(1, 9):
        step = StepResult(None, {"learn/logprob_local": -1.0}, None, {1: -9.0})
        fresh.learned(foreign_gaps(batch(foreign), step), float(end))
    assert json.loads(fresh.remembered())["gaps"][sha256("far")] == pytest.approx(8.0)
    new = verified("n1", 1, (0.0, 1.0), timestamp=8.5)
    for worse in (
        verified("n1", 2, (0.0, 1.0), timestamp=0.5),
        verified("n1", 3, (0.49, 0.51), timestamp=8.5),
    ):
        draw = Draw((worse, new), {}, (worse, new), 0)
        chosen = Counter(fresh.choose(draw, 1, random.Random(i)).chosen[0].group_id for i in range(50))
        assert chosen[new.group_id] > 45
