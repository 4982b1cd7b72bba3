"""Rule B: weights and numbers of groups from bias and variance, against values worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import batch, example, group, tiny_model

from sapo.core.config.load import LearnConfig
from sapo.learn.gradient_bias import SKETCH, Comparison, GroupGradient, compare, counts, sketch, weight
from sapo.learn.update import Learner


def gradient(total: list[float], tokens: int = 1, author: str = "") -> GroupGradient:
    return GroupGradient(0, bool(author), author, tokens, torch.tensor(total))


@given(st.floats(0.01, 100), st.integers(1, 64))
def test_without_bias_and_at_equal_variance_all_groups_count_alike(variance: float, count: int) -> None:
    assert weight(variance, variance, 0.0, count) == 1.0


@given(
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
    st.floats(-1e6, 1e6),
    st.integers(1, 64),
    st.integers(0, 64),
    st.floats(0.01, 100),
)
def test_a_round_has_an_own_group_and_is_never_larger_than_configured(
    local: float, foreign: float, bias: float, own: int, others: int, ratio: float
) -> None:
    mine, theirs = counts(local, foreign, bias, own=own, others=others, cost_ratio=ratio)
    assert mine >= 1
    assert 0 <= theirs <= others
    assert mine + theirs <= own + others
    assert mine * ratio + theirs <= own * ratio + others + 1e-6


def test_variances_and_biases_are_those_worked_by_hand() -> None:
    own = [gradient([1.0, 0.0]), gradient([3.0, 0.0])]
    # mean (2, 0); the parts of two groups in it differ by 1 each: s_l^2 = 4/1 * (1 + 1) / 4 = 2
    others = [gradient([0.0, 2.0], author="a"), gradient([0.0, 4.0], author="b")]
    found = compare([*own, *others])
    # |(2, 0) - (0, 3)|^2 = 13, less 2/2 twice; of a alone |(2, -2)|^2 = 8, less 2/2 and 2/1
    assert found == Comparison(local=2.0, foreign=2.0, bias=11.0, by_author={"a": 5.0, "b": 17.0})


def test_a_sketch_keeps_inner_products() -> None:
    torch.manual_seed(1)
    one, other = torch.randn(300, 100), torch.randn(5_000)
    again = [one + 0.1 * torch.randn(300, 100), other]
    a, b = sketch([one, other], seed=3), sketch(again, seed=3)
    assert a.shape == (SKETCH,)
    exact = float((one * again[0]).sum() + other @ other)
    assert float(a @ b) == pytest.approx(exact, rel=0.1)
    assert float(sketch([one], 3) @ sketch([torch.randn(300, 100)], 3)) == pytest.approx(0, abs=1000)


def test_the_gradients_of_the_groups_make_up_the_updates() -> None:
    learn = LearnConfig(foreign="as_if_own")
    learner = Learner(tiny_model(), learn, temperature=1.0)
    found = learner.group_gradients(example(learn), seed=5)
    assert [(one.position, one.external, one.tokens) for one in found] == [(0, False, 11), (2, True, 8)]
    # a step of plain gradient descent shows the whole gradient: this is the mean over all 19 tokens
    mean = (found[0].total + found[1].total) / 19
    trained = Learner(tiny_model(), learn, temperature=1.0)
    stepped: list[torch.Tensor] = []
    trained._apply = lambda: stepped.append(  # type: ignore[method-assign]
        sketch((p.grad for p in trained.model.parameters() if p.grad is not None), 5)
    )
    norm = trained.step(example(learn)).metrics["learn/grad_norm"]
    assert torch.allclose(stepped[0] * max(1.0, norm), mean, atol=1e-4)


def test_an_author_of_other_answers_is_told_from_noise() -> None:
    """Ten seeds: six own groups, six of an author like oneself, six of one whose scores are reversed."""
    learn, biases = LearnConfig(foreign="as_if_own"), {"same": [], "wrong": []}  # type: ignore[var-annotated]
    for seed in range(10):
        learner = Learner(tiny_model(seed=seed), learn, temperature=1.0)
        prompts = [(3 + i, 4, 5) for i in range(6)]
        answers, right = [(6, 1), (7, 1), (8, 1), (9, 1)], [1.0, 1.0, 0.0, 0.0]
        groups = [group(p, answers, right, position=i, learn=learn) for i, p in enumerate(prompts)]
        for at, (name, scores) in enumerate({"same": right, "wrong": right[::-1]}.items(), start=1):
            groups += [
                group(p, answers, scores, source="external", producer=name, position=6 * at + i, learn=learn)
                for i, p in enumerate(prompts)
            ]
        found = compare(learner.group_gradients(batch(*groups), seed=seed))
        assert found is not None
        keys = {one.producer: one.producer_key for one in groups}
        for name, values in biases.items():
            values.append(weight(found.local, found.foreign, found.by_author[keys[name]], 6))
    assert min(biases["same"]) > 0.9
    assert max(biases["wrong"]) < 0.2
