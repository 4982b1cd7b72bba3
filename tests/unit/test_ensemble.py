"""Ensembles in closed form, worked by hand: posterior, mixture, prior, weights, vote, route, average."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sapo.experiments.ensembles.combine import (
    average,
    measured_prior,
    mixture,
    posterior,
    question_weights,
    route,
    vote,
)


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_the_posterior_of_three_experts_is_that_worked_by_hand() -> None:
    """P(D) = 1/2, 1/4, 1/4; two tokens read at 1/2 · 1/2, 1 · 1/2, 1/4 · 1: joint 1/8, 1/8, 1/16."""
    prior = logs(0.5, 0.25, 0.25)
    read = logs(0.5, 1.0, 0.25) + logs(0.5, 0.5, 1.0)
    assert posterior(prior, read).exp().tolist() == pytest.approx([2 / 5, 2 / 5, 1 / 5])


def test_the_mixture_of_three_experts_is_that_worked_by_hand() -> None:
    """With posteriors 2/5, 2/5, 1/5 the first token has 2/5 · 0.9 + 2/5 · 0.1 + 1/5 · 0.5 = 1/2."""
    each = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]], dtype=torch.float64).log()
    assert mixture(logs(0.4, 0.4, 0.2), each).exp().tolist() == pytest.approx([0.5, 0.5])
    each[2] = logs(0.0, 1.0)
    assert mixture(logs(0.4, 0.4, 0.2), each).exp().tolist() == pytest.approx([0.4, 0.6])


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=5), st.integers(2, 4))
def test_experts_that_find_every_token_alike_keep_an_even_posterior(read: list[float], experts: int) -> None:
    context = torch.full((experts,), math.fsum(read), dtype=torch.float64)
    even = posterior(torch.zeros(experts, dtype=torch.float64), context).exp()
    assert even.tolist() == pytest.approx([1 / experts] * experts)


def test_an_expert_that_gives_a_token_no_probability_is_out_for_good() -> None:
    prior = logs(0.5, 0.25, 0.25)
    read = logs(0.0, 0.5, 0.5)
    assert posterior(prior, read).exp().tolist() == pytest.approx([0.0, 0.5, 0.5])
    read = read + logs(1.0, 0.001, 0.003)
    assert posterior(prior, read).exp().tolist() == pytest.approx([0.0, 0.25, 0.75])
    assert mixture(posterior(prior, read), torch.zeros(3, 1, dtype=torch.float64)).isfinite().all()


def test_where_every_expert_is_ruled_out_the_prior_stands() -> None:
    assert posterior(logs(0.75, 0.25), logs(0.0, 0.0)).exp().tolist() == pytest.approx([0.75, 0.25])


def test_the_prior_is_the_mean_posterior_of_the_texts() -> None:
    """Two texts whose posteriors are 3/4 : 1/4 and 1/2 : 1/2."""
    read = torch.stack([logs(0.3, 0.1), logs(0.2, 0.2)]).float()
    assert measured_prior(read).exp().tolist() == pytest.approx([5 / 8, 3 / 8])


def test_an_answer_weighs_the_prior_times_the_geometric_mean_of_its_question_s_probabilities() -> None:
    """P(D) = 1/5, 4/5; means e^-1 and e^-1/4 of it: 1/5 : 4/5 · 1/4 is even."""
    weights = question_weights(logs(0.2, 0.8), torch.tensor([-1.0, -1.0 - math.log(4)], dtype=torch.float64))
    assert weights.tolist() == pytest.approx([0.5, 0.5])


def test_a_route_goes_to_the_greatest_weight_and_of_equals_to_the_first() -> None:
    assert route([0.2, 0.5, 0.3]) == 1
    assert route([0.4, 0.2, 0.4]) == 0


@pytest.mark.parametrize(
    ("weights", "answers", "chosen"),
    [
        ([0.4, 0.35, 0.25], ["7", "8", "8"], 1),
        ([0.7, 0.2, 0.1], ["7", "8", "8"], 0),
        ([0.25, 0.35, 0.4], ["8", "8", "7"], 1),
        ([1.0, 1.0, 1.0], ["7", "8", "9"], 0),
        ([0.8, 0.1, 0.1], [None, "8", "8"], 1),
        ([0.1, 0.8, 0.1], [None, None, None], 1),
    ],
)
def test_a_vote_takes_the_answer_of_the_greatest_weight_in_all(
    weights: list[float], answers: list[str | None], chosen: int
) -> None:
    assert vote(weights, answers) == chosen


def test_an_average_is_the_mean_of_each_parameter() -> None:
    found = average([{"a": torch.tensor([1.0, 4.0])}, {"a": torch.tensor([3.0, 0.0])}])
    assert found is not None
    assert found["a"].tolist() == [2.0, 2.0]


def test_models_of_another_shape_have_no_average() -> None:
    assert average([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}]) is None
    assert average([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]) is None
