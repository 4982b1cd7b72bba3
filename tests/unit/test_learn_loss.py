"""Losses agree with closed forms worked by hand, and gradients do not flow where they must not."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sapo.core.config.load import Config, LearnConfig
from sapo.learn.loss import LOSSES, Loss, cispo, dapo, dr_grpo, grpo, gspo, normaliser
from sapo.learn.off_policy import correct
from sapo.testing.loss import NAN, PROMISES, gradient, inputs


def test_dapo_is_the_token_mean_of_the_clipped_gain() -> None:
    # Gains: 1.1 * 2, 1.28 * 2 (clipped), 0.9 * -1, and min(-0.5, -0.8) = -0.8 (clipped).
    given = inputs([[1.1, 1.5], [0.9, 0.5]], [2.0, -1.0], count=4.0)
    out = dapo(given)
    assert out.loss.item() == pytest.approx(-(2.2 + 2.56 - 0.9 - 0.8) / 4)
    assert out.metrics["clipped"] == 2
    assert out.metrics["tokens"] == 4
    # d loss / d logp = -ratio * advantage / 4 where the clip did not decide.
    expected = torch.tensor([[-2.2 / 4, 0.0], [0.9 / 4, 0.0]], dtype=torch.float64)
    assert torch.allclose(gradient(dapo, given), expected)


def test_a_bad_ratio_on_the_harmless_side_is_not_clipped() -> None:
    # A gain that is already lower than the clipped one keeps its gradient (the pessimistic minimum).
    given = inputs([[0.5, 1.5]], [1.0], count=2.0)
    assert torch.allclose(gradient(dapo, given), torch.tensor([[-0.25, 0.0]], dtype=torch.float64))
    given = inputs([[0.5, 1.5]], [-1.0], count=2.0)
    assert torch.allclose(gradient(dapo, given), torch.tensor([[0.0, 0.75]], dtype=torch.float64))


def test_grpo_is_the_mean_over_sequences_of_their_token_means() -> None:
    given = inputs([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], [1.0, -1.0], lengths=[4, 1], count=2.0)
    assert grpo(given).loss.item() == pytest.approx((-1.0 + 1.0) / 2)
    expected = torch.tensor([[-1 / 8] * 4, [1 / 2, 0, 0, 0]], dtype=torch.float64)
    assert torch.allclose(gradient(grpo, given), expected)


def test_dr_grpo_divides_by_a_constant_whatever_the_lengths() -> None:
    count = normaliser("dr_grpo", tokens=5, sequences=2, constant=20.0)
    assert count == 20.0
    given = inputs([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], [1.0, -1.0], lengths=[4, 1], count=count)
    assert dr_grpo(given).loss.item() == pytest.approx(-(4 - 1) / 20)
    expected = torch.tensor([[-1 / 20] * 4, [1 / 20, 0, 0, 0]], dtype=torch.float64)
    assert torch.allclose(gradient(dr_grpo, given), expected)


def test_cispo_is_the_clipped_ratio_times_the_log_probability() -> None:
    given = inputs([[1.1, 2.0, 0.1]], [3.0], count=3.0)
    logprobs = [math.log(1.1) - 1, math.log(2.0) - 1, math.log(0.1) - 1]
    weights = [1.1, 1.28, 0.1]
    expected = -sum(w * 3.0 * p for w, p in zip(weights, logprobs, strict=True)) / 3
    assert cispo(given).loss.item() == pytest.approx(expected)
    assert cispo(given).metrics["clipped"] == 1


def test_cispo_has_no_gradient_through_its_ratio_and_one_for_clipped_tokens() -> None:
    given = inputs([[1.1, 2.0, 0.1]], [3.0], count=3.0)
    # Just -weight * advantage / 3: through the ratio it would be larger by the factor 1 + logprob.
    expected = torch.tensor([[-1.1, -1.28, -0.1]], dtype=torch.float64)
    assert torch.allclose(gradient(cispo, given), expected)


def test_gspo_clips_one_ratio_per_sequence() -> None:
    # Mean log-ratios: (ln 1.2 + ln 1.0) / 2 = ln sqrt(1.2), and ln 2, which is clipped at 1.28.
    given = inputs([[1.2, 1.0], [2.0, 2.0]], [1.0, 1.0], count=2.0)
    ratio = math.sqrt(1.2)
    out = gspo(given)
    assert out.loss.item() == pytest.approx(-(ratio + 1.28) / 2)
    assert out.metrics["clipped"] == 2
    expected = torch.tensor([[-ratio / 4, -ratio / 4], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(gradient(gspo, given), expected)


def test_gspo_gives_each_token_its_own_advantage_at_the_ratio_of_the_sequence() -> None:
    ratio = math.sqrt(1.2)
    given = replace(inputs([[1.2, 1.0]], [0.0]), advantages=torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    assert gspo(given).loss.item() == pytest.approx(ratio / 2)
    expected = torch.tensor([[-ratio / 2, ratio]], dtype=torch.float64)
    assert torch.allclose(gradient(gspo, given), expected)


def test_gspo_s_own_bounds_clip_what_the_token_bounds_would_not() -> None:
    learn = LearnConfig(loss="gspo")
    bounds: dict[str, Any] = {"clip_low": learn.gspo_clip_low, "clip_high": learn.gspo_clip_high}
    assert gspo(inputs([[1.01, 1.01]], [1.0])).metrics["clipped"] == 0
    assert gspo(inputs([[1.01, 1.01]], [1.0], **bounds)).metrics["clipped"] == 2


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_keeps_what_all_promise(name: str, promise: Callable[[Loss], None]) -> None:
    promise(LOSSES[name])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_at_ratio_one_every_loss_has_the_policy_gradient(name: str) -> None:
    given = inputs([[1.0, 1.0], [1.0, 1.0]], [1.5, -0.5], count=4.0)
    per_sequence = name in ("grpo", "gspo")
    expected = torch.tensor([[-1.5] * 2, [0.5] * 2], dtype=torch.float64) / 4 / (2 if per_sequence else 1)
    assert torch.allclose(gradient(LOSSES[name], given), expected)


def test_the_upper_bound_is_its_own() -> None:
    learn = LearnConfig()
    assert (learn.clip_low, learn.clip_high) == (0.2, 0.28)
    given = inputs([[1.27, 1.29, 0.81, 0.79]], [1.0], clip_low=learn.clip_low, clip_high=learn.clip_high)
    assert dapo(given).loss.item() == pytest.approx(-(1.27 + 1.28 + 0.81 + 0.79))
    assert LearnConfig(clip_high=0.5).clip_high == 0.5


def test_a_kl_weight_is_an_unknown_key_rather_than_silently_zero() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        LearnConfig.model_validate({"kl": 0.1})


@pytest.mark.parametrize(
    ("loss", "expected"), [("dapo", 30.0), ("cispo", 30.0), ("grpo", 4.0), ("gspo", 4.0), ("dr_grpo", 64.0)]
)
def test_the_normaliser_counts_what_the_loss_is_a_mean_over(loss: str, expected: float) -> None:
    assert normaliser(loss, tokens=30.0, sequences=4.0, constant=64.0) == expected


# -- foreign tokens --------------------------------------------------------------------------------------

OWN = torch.tensor([[-1.0, -9.0], [-1.0, -9.0]])
EXTERNAL = torch.tensor([False, True])
ALL = torch.ones(2, 2).bool()
NOTHING = torch.zeros(2, 2)
NOBODY = torch.zeros(2).bool()
EVEN = torch.zeros(2)


def test_as_if_own_changes_nothing() -> None:
    result = correct(LearnConfig(foreign="as_if_own"), OWN, ALL, EXTERNAL, NOTHING, NOBODY, EVEN)
    assert torch.equal(result.mask, ALL)
    assert torch.equal(result.weights, torch.ones(2, 2))


def test_bounded_masks_only_foreign_tokens_below_the_floor_and_counts_them() -> None:
    result = correct(
        LearnConfig(foreign="bounded", foreign_floor=-7.0), OWN, ALL, EXTERNAL, NOTHING, NOBODY, EVEN
    )
    assert result.mask.tolist() == [[True, True], [True, False]]
    assert result.metrics["foreign_masked"] == 1


def test_positive_admits_only_completions_above_their_group_s_mean() -> None:
    learn = LearnConfig(foreign="positive")
    assert [learn.admits(advantage, 0, told=True) for advantage in (0.5, 0.0, -0.5)] == [True, False, False]
    assert LearnConfig(foreign="as_if_own").admits(-0.5, 0, told=False)


def test_positive_is_the_default_for_foreign_completions() -> None:
    assert not LearnConfig().admits(-0.5, 0, told=True)


def test_positive_late_leaves_out_the_failures_of_stale_groups_only() -> None:
    learn = LearnConfig(foreign="positive_late", foreign_late=2)
    found = [learn.admits(-0.5, staleness, told=False) for staleness in (-7, 0, 2, 3)]
    assert found == [False, True, True, False]
    assert learn.admits(0.5, 3, told=False)


def test_foreign_tokens_weigh_what_the_setting_says_and_own_ones_all_there_is() -> None:
    result = correct(LearnConfig(foreign_weight=0.25), OWN, ALL, EXTERNAL, NOTHING, NOBODY, EVEN)
    assert result.weights.tolist() == [[1.0, 1.0], [0.25, 0.25]]
    assert torch.equal(result.mask, ALL)


def test_the_weight_of_foreign_tokens_comes_on_top_of_their_mode() -> None:
    learn = LearnConfig(foreign="behaviour", trusted_peers=["n1"], foreign_weight=0.5)
    behaviour = torch.full((2, 2), -1.0 - math.log(2))
    result = correct(
        learn, torch.full((2, 2), -1.0), ALL, EXTERNAL, behaviour, torch.tensor([True, True]), EVEN
    )
    assert result.weights[0].tolist() == [1.0, 1.0]
    assert result.weights[1].tolist() == pytest.approx([1.0, 1.0])


def test_behaviour_weighs_by_the_true_ratio_truncated_both_ways() -> None:
    learn = LearnConfig(foreign="behaviour", foreign_ratio_cap=3.0, trusted_peers=["n1"])
    own = torch.tensor([[-1.0] * 4, [-1.0] * 4])
    behaviour = torch.tensor([[-5.0] * 4, [-1.0, -1.0 - math.log(2), -9.0, -0.01]])
    mask = torch.ones(2, 4).bool()
    result = correct(learn, own, mask, EXTERNAL, behaviour, torch.tensor([True, True]), EVEN)
    # The local sequence keeps weight 1 although the engine's values are known.
    assert result.weights[0].tolist() == [1.0] * 4
    assert result.weights[1].tolist() == pytest.approx([1.0, 2.0, 3.0, math.exp(-0.99)])
    assert result.metrics["ratio_truncated"] == 1
    low = correct(learn, own - 4, mask, EXTERNAL, behaviour, torch.tensor([True, True]), EVEN)
    assert low.weights[1, 0].item() == pytest.approx(1 / 3)


def test_behaviour_treats_a_producer_that_is_not_known_as_if_own() -> None:
    learn = LearnConfig(foreign="behaviour", trusted_peers=["n1"])
    result = correct(learn, OWN, ALL, EXTERNAL, torch.full((2, 2), -3.0), NOBODY, EVEN)
    assert torch.equal(result.weights, torch.ones(2, 2))
    assert torch.equal(result.mask, ALL)


def test_behaviour_leaves_out_and_counts_tokens_without_a_usable_value() -> None:
    learn = LearnConfig(foreign="behaviour", trusted_peers=["n1"])
    behaviour = torch.tensor([[0.0, 0.0], [NAN, -9.0]])
    result = correct(learn, OWN, ALL, EXTERNAL, behaviour, torch.tensor([False, True]), EVEN)
    assert result.mask.tolist() == [[True, True], [False, True]]
    assert result.metrics["nonfinite"] == 1
    assert result.weights.isfinite().all()


def test_behaviour_survives_an_absurd_claim() -> None:
    learn = LearnConfig(foreign="behaviour", trusted_peers=["n1"])
    behaviour = torch.tensor([[0.0, 0.0], [-1e30, 1e30]])
    result = correct(learn, OWN, ALL, EXTERNAL, behaviour, torch.tensor([False, True]), EVEN)
    assert result.weights[1].tolist() == pytest.approx([3.0, 1 / 3])
    assert result.metrics["clamped"] == 2


@pytest.mark.parametrize("mode", ["behaviour", "f_tis"])
def test_ratios_are_refused_when_not_every_token_could_be_drawn_or_nobody_is_trusted(mode: str) -> None:
    learn = {"foreign": mode, "trusted_peers": ["n1"]}
    with pytest.raises(ValidationError, match=f"{mode}.* needs top_p 1"):
        Config.model_validate({"learn": learn, "generate": {"top_p": 0.8}})
    with pytest.raises(ValidationError, match=f"{mode}.* needs trusted_peers"):
        LearnConfig.model_validate({"foreign": mode})
