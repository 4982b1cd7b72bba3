"""Draws by freshness, rescue, and what the rules remember."""

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
from swarms import small_config

from sapo.core.config.adaptive import AdaptiveConfig
from sapo.core.types import Recipe, sha256
from sapo.learn.update import StepResult
from sapo.node.adaptive import Fresh, SamplingRule, open_rule
from sapo.peers.adaptive import freshness, rescue_order, weighted_draw
from sapo.peers.pool import Entry
from sapo.peers.sampling import Draw

EVEN = AdaptiveConfig(eta=0, tau=1e300)


def rule(*sets: str) -> SamplingRule:
    return open_rule(small_config(sets))


def verified(name: str, position: int, scores: tuple[float, ...], timestamp: float = 0.0) -> Entry:
    entry = make_entry(name, position=position)
    received = entry.received.model_copy(update={"timestamp": timestamp})
    return replace(entry, received=received, verdict=make_verdict(scores))


def of_task(name: str, position: int, task: str) -> Entry:
    return make_entry(name, position=position, recipe=Recipe.make(task, {}, seed=position))


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


def test_tasks_that_fail_most_come_first_and_those_that_do_not_may_stay_out() -> None:
    entries = [of_task("n1", i, name) for i, name in enumerate("abcabc")]
    passed = {"a": 0.9, "b": 0.1}
    order = rescue_order(entries, passed, AdaptiveConfig(), random.Random(0))
    assert [entry.group.recipe.dataset for entry in order] == [*"ccbbaa"]
    order = rescue_order(entries, passed, AdaptiveConfig(only=True), random.Random(0))
    assert [entry.group.recipe.dataset for entry in order] == [*"ccbb"]


@pytest.mark.parametrize("sampler", ["fresh", "balanced", "rescue"])
def test_a_rule_goes_on_where_it_was(sampler: str) -> None:
    one, other = rule(f"batch.sampler={sampler}"), rule(f"batch.sampler={sampler}")
    own, foreign = (
        group((3,), [(4, 1), (5, 1)], [0, 1]),
        group((3,), [(4, 1), (5, 1)], [0, 1], source="external"),
    )
    learned = batch(own, foreign.model_copy(update={"position": 1}))
    metrics = {"learn/logprob_local": -1.0, "time/update": 1.0, "time/generate": 4.0, "time/verify": 1.0}
    one.decide(1)
    one.learned(learned, StepResult(None, {}, None, {1: -2.0}), metrics, 5.0)
    other.load(one.remembered())
    assert other.memory == json.loads(json.dumps(one.memory)) != {}
    assert other.plan() == one.plan()


def test_old_and_narrow_groups_are_drawn_less_and_authors_of_improbable_texts_too() -> None:
    fresh = rule("batch.sampler=fresh", "batch.external=1", "adaptive.tau=1", "adaptive.kappa=1")
    assert isinstance(fresh, Fresh)
    assert fresh.wanted() == 2
    foreign = group((3,), [(4, 1), (5, 1)], [0, 1], source="external", producer="far", position=1)
    for end in range(1, 9):
        result = StepResult(None, {}, None, {1: -9.0})
        fresh.learned(batch(foreign), result, {"learn/logprob_local": -1.0}, float(end))
    assert fresh.memory["gaps"][sha256("far")] == pytest.approx(8.0)
    new = verified("n1", 1, (0.0, 1.0), timestamp=8.5)
    for worse in (
        verified("n1", 2, (0.0, 1.0), timestamp=0.5),
        verified("n1", 3, (0.49, 0.51), timestamp=8.5),
    ):
        draw = Draw((worse, new), {}, (worse, new), 0)
        chosen = Counter(fresh.choose(draw, random.Random(i)).chosen[0].group_id for i in range(50))
        assert chosen[new.group_id] > 45
