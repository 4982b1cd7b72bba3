"""The outer step: closed forms, equal bits on both sides, contraction, and what a model takes of it."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import batch, group, tiny_model
from torch import Tensor

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch
from sapo.learn.gossip import SlowWeights, mean_of_two, outer_step
from sapo.learn.update import Learner

ALPHA, GAMMA = 0.5, 0.7
finite = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(finite, min_size=1, max_size=8)


def tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# -- closed forms ----------------------------------------------------------------------------------------


def test_without_momentum_and_with_both_rates_1_it_is_the_plain_mean_of_the_weights() -> None:
    slow, momentum, fast = tensor([1.0, 2.0]), tensor([5.0, 5.0]), tensor([0.5, 4.0])
    theirs, their_fast = tensor([3.0, -2.0]), tensor([2.5, 0.0])
    partner = (theirs, theirs - their_fast)
    outer_step(slow, momentum, slow - fast, alpha=0.0, beta=1.0, gamma=1.0, partner=partner)
    assert slow.tolist() == [1.5, 2.0]  # of 0.5 and 2.5, of 4 and 0


def test_alone_it_is_diloco_with_momentum() -> None:
    slow, momentum = tensor([1.0]), tensor([0.0])
    # theta falls by 1 each time: delta = -0.75, then 0.5 * -0.75 - 0.75
    for expected in (0.25, -0.875):
        outer_step(slow, momentum, tensor([1.0]), alpha=0.5, beta=0.75, gamma=0.7)
        assert slow.tolist() == [expected]


def test_alone_with_rate_1_and_no_momentum_nothing_jumps() -> None:
    slow, momentum, fast = tensor([1.0, 0.1]), tensor([0.0, 0.0]), tensor([0.75, 0.35])
    outer_step(slow, momentum, slow - fast, alpha=0.0, beta=1.0, gamma=0.7)
    assert torch.equal(slow, fast)


@given(vectors, vectors, st.sampled_from([0.0, 0.3, 0.5]), st.sampled_from([0.3, 0.7, 1.0]))
def test_equal_replicas_stay_equal_to_the_bit(
    slow: list[float], delta: list[float], alpha: float, gamma: float
) -> None:
    length = min(len(slow), len(delta))
    start, change = tensor(slow[:length]), tensor(delta[:length])
    ours, alone = start.clone(), start.clone()
    for one, partner in ((ours, (start, change)), (alone, None)):
        outer_step(one, torch.zeros(length), change, alpha=alpha, beta=0.7, gamma=gamma, partner=partner)
    assert torch.equal(ours, alone)


@given(vectors, vectors)
def test_both_sides_of_a_pair_compute_the_same_mean(one: list[float], other: list[float]) -> None:
    length = min(len(one), len(other))
    x, y = tensor(one[:length]), tensor(other[:length])
    assert torch.equal(mean_of_two(x, y), mean_of_two(y, x))


# -- contraction (METHODS, section 3) --------------------------------------------------------------------


def test_of_two_replicas_the_difference_decays_by_the_root_of_alpha() -> None:
    slow, momentum = [tensor([1.0]), tensor([0.0])], [tensor([0.0]), tensor([0.0])]
    step = np.array([[1 - GAMMA, ALPHA], [-GAMMA, ALPHA]])  # of the difference and that of the momenta
    values, vectors = np.linalg.eig(step.T)
    assert abs(values[0]) == pytest.approx(math.sqrt(ALPHA))
    sizes = []
    for _ in range(30):
        pair(slow, momentum, 0, 1)
        state = [float(slow[0] - slow[1]), float(momentum[0] - momentum[1])]
        sizes.append(abs(vectors[:, 0] @ state))
    ratios = [after / before for before, after in pairwise(sizes)]
    assert ratios == pytest.approx([math.sqrt(ALPHA)] * 29, rel=1e-3)


def pair(slow: list[Tensor], momentum: list[Tensor], i: int, j: int, gamma: float = GAMMA) -> None:
    """An outer step of two replicas that have learned nothing."""
    before = [slow[i].clone(), slow[j].clone()]
    for own, other in ((i, before[1]), (j, before[0])):
        still = torch.zeros_like(slow[own])
        outer_step(
            slow[own], momentum[own], still, alpha=ALPHA, beta=1.0, gamma=gamma, partner=(other, still)
        )


def second_moments(alpha: float, gamma: float, nodes: float) -> float:
    """By how much the mean square distance from the mean shrinks per outer step, with random pairs.

    The map of E phi², E delta² and E phi delta; a partner is one of the other nodes, whose sum is minus the
    own: E (phi - phi_j)² = 2 E phi² N / (N - 1). At N = inf it is the map of METHODS.
    """
    c = nodes / (nodes - 1) if math.isfinite(nodes) else 1.0
    own = np.array([-gamma / 2 * c, 0.0, alpha])  # of phi with the new delta
    squares = np.array([gamma**2 / 2 * c, alpha**2, -alpha * gamma * c])
    new = np.array([np.array([1.0, 0.0, 0.0]) + 2 * own + squares, squares, own + squares])
    return float(max(abs(np.linalg.eigvals(new))))


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 2.0), (0.3, 1.82), (0.5, 1.5), (0.7, 1.02), (0.9, 0.38)])
def test_the_limit_of_gamma_is_where_replicas_no_longer_come_together(alpha: float, limit: float) -> None:
    assert 2 * (1 - alpha**2) == pytest.approx(limit)
    assert second_moments(alpha, limit - 0.01, math.inf) < 1 < second_moments(alpha, limit + 0.01, math.inf)


@pytest.mark.parametrize(("nodes", "square", "typical"), [(4, 0.628, 0.58), (8, 0.668, 0.65)])
def test_random_pairs_come_together_as_fast_as_the_map_says(
    nodes: int, square: float, typical: float
) -> None:
    """`square` is of the mean of many runs, `typical` of one: what METHODS simulated."""
    runs, warm, steps = 4000, 10, 26
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(nodes, runs, generator=random)
    slow = list(drawn - drawn.mean(0))
    momentum, still = [torch.zeros(runs) for _ in slow], torch.zeros(runs)
    variances = []
    for _ in range(steps):
        variances.append(torch.stack(slow).var(0, correction=0).double())
        order = torch.rand(nodes, runs, generator=random).argsort(0)
        partner = torch.empty_like(order).scatter_(0, order, order.roll(nodes // 2, 0))
        before = torch.stack(slow)
        for i in range(nodes):
            other = before.gather(0, partner[i : i + 1])[0]
            outer_step(
                slow[i], momentum[i], still, alpha=ALPHA, beta=1.0, gamma=GAMMA, partner=(other, still)
            )
    first, last, between = variances[warm], variances[-1], steps - 1 - warm
    of_mean = float(last.mean() / first.mean()) ** (1 / between)
    of_one = math.exp(float((last.log() - first.log()).mean()) / between)
    assert second_moments(ALPHA, GAMMA, nodes) == pytest.approx(square, abs=0.001)
    assert of_mean == pytest.approx(square, abs=0.02)
    assert of_one == pytest.approx(typical, abs=0.02)


def test_two_nodes_shrink_by_alpha_and_very_many_by_0_7() -> None:
    assert second_moments(ALPHA, GAMMA, 2) == pytest.approx(ALPHA)
    assert second_moments(ALPHA, GAMMA, math.inf) == pytest.approx(0.70, abs=0.001)
    assert second_moments(0.9, GAMMA, math.inf) > 1.09


# -- what is refused by distance ---------------------------------------------------------------------------


def weights(values: Sequence[float]) -> SlowWeights:
    return SlowWeights.begin(["w"], [tensor(values)])


@pytest.mark.parametrize("place", [0, 1])
def test_a_value_that_is_not_finite_makes_no_finite_distance(place: int) -> None:
    odd = [tensor([0.0]), tensor([0.0])]
    for value in (math.nan, math.inf):
        odd[place] = tensor([value])
        found = weights([0.0]).distance([tensor([1.0])], lambda name: (odd[0], odd[1]))
        assert not math.isfinite(found.partner)


@pytest.mark.parametrize("reaches", [0.999, 1000.0])
def test_whoever_goes_as_far_as_it_may_moves_a_node_steadily_and_parts_it_from_no_honest_one(
    reaches: float,
) -> None:
    ours, honest, at = weights([0.0, 0.0]), weights([0.0, 0.0]), []
    for step in range(40):
        lesson = tensor([0.0, 1.0 if step % 2 else -1.0])
        fast, reach = [ours.slow[0] + lesson], ours.reach(own=1.0, factor=4.0)
        assert reach == 4.0
        away = tensor([reaches * reach, 0.0])
        far = {"w": (ours.slow[0] + away, -lesson - away)}
        share = min(1.0, reach / ours.distance(fast, far.__getitem__).partner)
        ours.step(fast, alpha=ALPHA, beta=1.0, gamma=GAMMA, partner=far.__getitem__, share=share)
        honest.step([honest.slow[0] + lesson], alpha=ALPHA, beta=1.0, gamma=GAMMA)
        at.append(float(ours.slow[0][0]))
        apart = float(torch.dist(honest.slow[0], ours.slow[0]))
        assert 2 * apart < honest.limit(own=1.0, factor=4.0)
    assert at[39] - at[29] == pytest.approx(at[29] - at[19], rel=0.01)
    assert len(ours.lessons) == 15
    assert ours.reach(own=0.0, factor=4.0) == 4.0
    assert ours.travelled == pytest.approx(40.0)


# -- a model ---------------------------------------------------------------------------------------------


def learner(model: torch.nn.Module, **learn: Any) -> Learner:
    return Learner(model, LearnConfig(lr=1e-2, **learn), temperature=1.0)


def lesson() -> Batch:
    return batch(group([1, 2], [[3, 4], [5, 6]], [1.0, 0.0]))


def test_tied_weights_count_once_and_buffers_and_frozen_weights_stay() -> None:
    model: Any = tiny_model("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    positions = model.transformer.wpe.weight.clone()
    made = learner(model)
    assert "transformer.wte.weight" in made.names
    assert not {"lm_head.weight", "transformer.wpe.weight"} & {*made.names}
    made.begin_outer()
    assert made.outer is not None
    made.outer.step(made.weights(), alpha=0.5, beta=1.0, gamma=0.7, partner=moved_by_1(made.outer))
    made.land()
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert torch.equal(model.transformer.wpe.weight, positions)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def moved_by_1(outer: SlowWeights) -> Callable[[str], tuple[Tensor, Tensor]]:
    """A partner whose weights are those of `outer`, all larger by 1."""
    known = {name: value + 1 for name, value in zip(outer.names, outer.slow, strict=True)}
    return lambda name: (known[name], torch.zeros_like(known[name]))


def test_in_bfloat16_masters_and_weights_both_land_on_the_slow_weights() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    made = learner(model)
    made.begin_outer()
    assert made.step(lesson()).skipped is None
    assert made.outer is not None
    made.outer.step(made.weights(), alpha=0.5, beta=1.0, gamma=0.7, partner=moved_by_1(made.outer))
    jump = made.land()
    assert jump > 1
    for slow, one, parameter in zip(made.outer.slow, made.weights(), model.parameters(), strict=True):
        assert torch.equal(slow, one)
        assert torch.equal(slow.to(torch.bfloat16), parameter)
    assert made.step(lesson()).skipped is None


def test_slow_weights_and_momentum_come_back_with_the_optimiser() -> None:
    one, other = learner(tiny_model()), learner(tiny_model())
    one.begin_outer()
    one.step(lesson())
    assert one.outer is not None
    one.outer.step(one.weights(), alpha=0.5, beta=1.0, gamma=0.7)
    one.land()
    other.model.load_state_dict(one.model.state_dict())
    other.load_state_dict(one.state_dict())
    assert other.outer is not None
    assert other.outer.lessons == one.outer.lessons
    assert len(one.outer.lessons) == 1
    for part in ("slow", "momentum"):
        for a, b in zip(getattr(one.outer, part), getattr(other.outer, part), strict=True):
            assert torch.equal(a, b)
    assert float(other.outer.momentum[0].abs().sum()) > 0
    one.outer = None
    other.load_state_dict(one.state_dict())
    assert other.outer is None
