"""Foreign mode `f_tis`: the truncated ratio, and the filter of what failed far from the own policy."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn_support import assert_close, batch, gradients, group, learner, parameters, plain_logprobs, same
from pydantic import ValidationError

from sapo.core.config.load import LearnConfig
from sapo.learn.off_policy import OffPolicyCorrection, correct

ANSWERS = [(13, 14), (16, 1, 9), (16, 8)]
REWARDS = [0.0, 1.0, 0.0]
PROMPT = (5, 6)


def mode(foreign: str = "f_tis", **settings: Any) -> LearnConfig:
    trusted = {"trusted_peers": ["n1"]} if foreign == "f_tis" else {}
    return LearnConfig.model_validate(
        {"foreign": foreign, "foreign_bound": "none", "grad_clip": 1e9, "loss": "grpo"} | trusted | settings
    )


def corrected(
    own: list[list[float]], wrote: list[list[float]], advantages: list[float], **settings: Any
) -> OffPolicyCorrection:
    """Of probabilities; the first sequence is an own one."""
    mask, count = torch.ones(len(own), len(own[0])).bool(), len(own)
    external = torch.arange(count) > 0
    logs = [torch.tensor(values).log() for values in (own, wrote)]
    return correct(
        mode(**settings), logs[0], mask, external, logs[1], torch.ones(count).bool(), torch.tensor(advantages)
    )


def test_the_ratio_is_of_each_token_and_truncated_from_above_alone() -> None:
    found = corrected([[0.5, 0.1, 0.6]] * 2, [[0.1, 0.1, 0.1], [0.25, 0.4, 0.1]], [1.0, 1.0])
    assert found.weights[0].tolist() == [1.0] * 3, "an own completion is as it is"
    assert found.weights[1].tolist() == pytest.approx([2.0, 0.25, 2.0])
    assert found.metrics["ratio_truncated"] == 1
    wider = corrected([[0.5, 0.1, 0.6]] * 2, [[0.25, 0.4, 0.1]] * 2, [1.0, 1.0], foreign_tis_cap=7.0)
    assert wider.weights[1].tolist() == pytest.approx([2.0, 0.25, 6.0])


@pytest.mark.parametrize(
    ("advantage", "most", "kept"),
    # the KL: a half, four and a sixth, each less its logarithm and 1, are 0.193, 1.614 and 0.958
    [(-0.5, 0.92, False), (-0.5, 0.93, True), (0.5, 0.0, True), (0.0, 0.0, True), (-0.5, 0.0, False)],
)
def test_what_failed_is_left_out_where_the_mean_kl_of_its_tokens_is_above_the_limit(
    advantage: float, most: float, kept: bool
) -> None:
    probabilities = [[0.5, 0.1, 0.6]] * 2, [[0.25, 0.4, 0.1]] * 2
    found = corrected(*probabilities, [advantage, advantage], foreign_tis_kl=most)
    assert found.mask.tolist() == [[True] * 3, [kept] * 3]
    assert found.metrics["foreign_masked"] == 3 * (not kept)


SHARES = st.floats(1e-30, 1.0)


@given(
    st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=3),
    st.sampled_from([-0.5, 0.0, 0.5]),
    st.floats(1.0, 10.0),
    st.floats(0.0, 100.0),
)
def test_no_weight_is_above_the_cap_and_a_higher_limit_leaves_out_no_more(
    tokens: list[tuple[float, float]], advantage: float, cap: float, most: float
) -> None:
    own, wrote = ([[pair[side] for pair in tokens]] * 2 for side in (0, 1))
    found = [
        corrected(own, wrote, [advantage] * 2, foreign_tis_cap=cap, foreign_tis_kl=limit)
        for limit in (most, 2 * most)
    ]
    for one in found:
        assert one.weights.isfinite().all()
        assert (one.weights >= 0).all()
        assert (one.weights <= torch.tensor(cap)).all()
        assert one.mask[0].all()
        assert one.mask[1].unique().numel() == 1
    assert (found[0].mask <= found[1].mask).all()
    at_home = corrected(own, own, [advantage] * 2, foreign_tis_cap=cap, foreign_tis_kl=0.0)
    assert at_home.mask.all()
    assert (at_home.weights == 1.0).all()


@pytest.mark.parametrize(
    ("less", "most", "like", "scale"),
    [
        (0.0, 50.0, "as_if_own", 1.0),
        (math.log(1.5), 50.0, "as_if_own", 1.5),
        (math.log(1.5), 0.0, "positive", 1.5),
        (math.log(4), 0.0, "positive", 2.0),
    ],
    ids=["on-policy", "weighed", "filtered", "filtered and truncated"],
)
def test_the_gradient_is_that_of_what_remains_times_the_ratio(
    less: float, most: float, like: str, scale: float
) -> None:
    made, plain = learner(mode(foreign_tis_kl=most)), learner(mode(like))
    told = [[value - less for value in plain_logprobs(made.model, PROMPT, ids)] for ids in ANSWERS]
    foreign = group(PROMPT, ANSWERS, REWARDS, source="external", producer="n1", behaviour=told)
    made.step(batch(foreign))
    plain.step(batch(foreign))
    assert_close(gradients(plain), gradients(made), scale=scale)


@pytest.mark.parametrize(
    ("producer", "behaviour", "missing"),
    [("n1", None, 3.0), ("n7", [[-1.0] * len(ids) for ids in ANSWERS], 0.0)],
)
def test_without_log_probabilities_of_a_trusted_author_nothing_is_learned(
    producer: str, behaviour: list[list[float]] | None, missing: float
) -> None:
    made = learner(mode())
    before = parameters(made.model)
    told = group(PROMPT, ANSWERS, REWARDS, source="external", producer=producer, behaviour=behaviour)
    result = made.step(batch(told))
    assert (result.skipped, result.metrics["learn/excluded_foreign"]) == ("no trained token", 3.0)
    assert result.metrics["learn/behaviour_missing"] == missing
    assert same(parameters(made.model), before)


@pytest.mark.parametrize(
    "bad", [{"foreign_tis_cap": 0.99}, {"foreign_tis_kl": -1}, {"foreign_tis_kl": math.inf}]
)
def test_settings_that_are_no_cap_and_no_limit_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        mode(**bad)
