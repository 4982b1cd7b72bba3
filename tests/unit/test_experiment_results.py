"""From records to results.json: figures, pairing, censoring, what is missing."""

import math

import pytest
from experiment_support import grid, record

from sapo.experiments import metrics, results, statistics
from sapo.experiments.grid import Spread
from sapo.experiments.record import RunRecord
from sapo.experiments.tuning import Choice

Runs = dict[str, dict[int, RunRecord]]


def ending(arm: str, seed: int, last: float, tokens: float = 100.0) -> RunRecord:
    """A run whose two nodes go from 0.1 to `last` on held-out questions, over 0.2 after two rounds or not."""
    middle = (0.1 + last) / 2
    return record(arm, seed, passes={0: [0.1, 0.1], 2: [middle] * 2, 4: [last] * 2}, tokens=tokens)


def three(last: float = 0.3, other: tuple[float, ...] = (0.31, 0.33, 0.35)) -> Runs:
    return {
        "8/0": {seed: ending("8/0", seed, last) for seed in (1, 2, 3)},
        "4/4": {seed: ending("4/4", seed, value, 50.0) for seed, value in zip((1, 2, 3), other, strict=True)},
    }


def test_the_papers_metric_sums_over_nodes_and_rounds() -> None:
    one = record(local=[(0, 0, 0.5, 0.5), (0, 0, 0, 1)], training=[(0.5, 0.5, 0.5, 1), (0, None, 0, 1)])
    found = metrics.figures_of(one)
    assert (found["total/training_set"], found["total/local"]) == (3.5, 2.0)
    assert found["reward/training_set"] == pytest.approx(3.5 / 7)
    assert found["reward/local"] == pytest.approx(0.25)


SPREAD = Spread(trait="worked", to=[1])


def with_trait(*lines: tuple[float | None, ...], seed: int = 1) -> RunRecord:
    """A run whose nodes' answers have a trait by these shares."""
    one = record(seed=seed, local=[(0.0,) * len(line) for line in lines])
    return one.model_copy(update={"series": one.series | {"trait/worked": [list(line) for line in lines]}})


def test_a_node_that_never_comes_there_counts_with_all_its_rounds() -> None:
    assert metrics.rounds_to_half(with_trait((1,) * 4, (0.4,) * 4), SPREAD) == 4
    assert metrics.rounds_to_half(record(), SPREAD) is None
    assert "spread/pass_at_1" not in metrics.figures_of(record())


def test_the_band_of_figure_2_is_the_least_and_the_greatest_agent() -> None:
    two = [record(seed=1, local=[(0, 0.2), (0.4, 0.4)]), record(seed=2, local=[(0.2, 0.4), (0.4, None)])]
    found = metrics.band(two, "reward/local")
    assert found is not None
    assert found.low == [pytest.approx(0.1), pytest.approx(0.3)]
    assert found.high == [pytest.approx(0.4), pytest.approx(0.4)]
    assert found.mean == [pytest.approx(0.25), pytest.approx(0.35)]


def test_an_arm_has_means_with_intervals_over_seeds() -> None:
    found = results.summarise(grid(), three(), {})["arms"]["4/4"]["figures"]["pass_at_1/end"]
    assert found["mean"] == pytest.approx(0.33)
    half = 0.02 / math.sqrt(3) * 4.302653
    assert (found["low"], found["high"]) == (pytest.approx(0.33 - half), pytest.approx(0.33 + half))
    assert found["per_seed"] == {"1": 0.31, "2": 0.33, "3": 0.35}


def test_a_registered_comparison_is_paired_by_seed() -> None:
    row = results.summarise(grid(), three(), {})["comparisons"][0]
    assert row["mean"] == pytest.approx(0.03)
    assert row["n"] == 3
    t = 0.03 / (0.02 / math.sqrt(3))
    assert row["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert row["smallest_difference"] == pytest.approx(0.02 * 3.26404, rel=1e-4)
    assert row["smallest_by_seeds"]["5"] == pytest.approx(0.02 * 1.681997, rel=1e-4)


def test_p_values_are_adjusted_over_all_registered_comparisons() -> None:
    rows = results.summarise(grid(), three(), {})["comparisons"]
    known = sorted(row["p"] for row in rows if row["p"] is not None)
    least = next(row for row in rows if row["p"] == known[0])
    assert least["p_adjusted"] == pytest.approx(min(known[0] * len(known), *known[1:]))


def test_tokens_to_the_target_are_read_off_between_exams() -> None:
    # the silo ends with 0.3 after 400 tokens; at half the tokens a round, 0.5 is at 0.3 two rounds in
    found = results.summarise(grid(), three(other=(0.5, 0.5, 0.7)), {})["target"]
    assert found["pass_at_1"] == pytest.approx(0.3)
    assert found["arms"]["8/0"]["value"] == pytest.approx(400)
    per_seed = found["arms"]["4/4"]["per_seed"]
    assert per_seed["1"] == {"tokens": pytest.approx(100), "reached": True}
    assert per_seed["3"]["tokens"] == pytest.approx(100 * 0.2 / 0.3)


def test_the_target_arms_own_time_says_how_many_times_fewer_tokens() -> None:
    found = results.summarise(grid(), three(other=(0.5, 0.5, 0.5)), {})["target"]
    assert found["tokens_per_node"] == 400
    assert found["arms"]["4/4"]["times_fewer"]["mean"] == pytest.approx(4)
    assert found["arms"]["8/0"]["times_fewer"] is None


def test_a_run_is_held_against_what_the_target_ends_with_in_its_own_seed() -> None:
    made = three(other=(0.5, 0.5, 0.5))
    made["8/0"][2] = ending("8/0", 2, 0.5)
    found = results.summarise(grid(), made, {})["target"]["arms"]["4/4"]["per_seed"]
    assert [found[seed]["tokens"] for seed in ("1", "2", "3")] == pytest.approx([100, 200, 100])


def test_tuning_runs_foretell_what_the_reported_ones_can_show() -> None:
    scores = {
        "8/0": [0.20, 0.22],
        "4/4": [0.30, 0.34],
    }  # at the chosen rates; seeds differ by 0.02 more there
    choices = {
        arm: Choice(arm=arm, lr=2e-4, scores={"0.0001": [0.0, 0.5], "0.0002": values}, at_edge=True)
        for arm, values in scores.items()
    }
    found = results.planned_section(grid(), choices, 5)
    assert found is not None
    assert found["spread"] == pytest.approx(0.02 / math.sqrt(2))
    assert found["alpha"] == pytest.approx(0.05 / 3)  # of three comparisons
    expected = statistics.smallest_difference(found["spread"], 5, 0.05 / 3)
    assert found["smallest_difference"] == pytest.approx(expected)
    assert results.planned_section(grid(), {}, 5) is None


def test_a_run_that_never_reaches_the_target_is_censored_at_its_end() -> None:
    found = results.summarise(grid(), three(other=(0.5, 0.2, 0.2)), {})["target"]["arms"]["4/4"]
    assert found["per_seed"]["2"] == {"tokens": 200.0, "reached": False}
    assert (found["value"], found["reached"], found["n"]) == (None, 1, 3)
    assert found["geometric_mean"] is None
