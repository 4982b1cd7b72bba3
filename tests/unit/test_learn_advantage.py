"""Advantages agree with closed forms, and the filter looks at raw task scores only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sapo.core.config.load import LearnConfig
from sapo.core.types import FinishReason
from sapo.learn.advantage import centred, group_advantages, informative, mean_std

STOP4: list[FinishReason] = ["stop"] * 4
finite_scores = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)


def test_eight_scores_of_a_tenth_have_no_advantage_in_either_definition() -> None:
    scores = [0.1] * 8
    assert centred(scores) == pytest.approx([0.0] * 8, abs=1e-17)
    assert max(map(abs, mean_std(scores, 1e-3))) < 1e-13
    for definition in ("centred", "mean_std"):
        learn = LearnConfig(advantage=definition)
        assert group_advantages(scores, ["stop"] * 8, learn) == [0.0] * 8


def test_seven_against_one_matches_the_closed_form() -> None:
    scores = [1.0] * 7 + [0.0]
    assert centred(scores) == [0.125] * 7 + [-0.875]
    # Unbiased variance: 8 * 7/8 * 1/8 / 7 = 1/8.
    root = math.sqrt(1 / 8)
    assert mean_std(scores, 1e-3) == pytest.approx([0.125 / root] * 7 + [-0.875 / root], rel=1e-14)


def test_the_floor_bounds_what_rounding_residue_can_become() -> None:
    scores = [0.5, 0.5, 0.5 + 1e-9]
    assert max(map(abs, mean_std(scores, 1e-3))) < 1e-6
    assert max(map(abs, mean_std(scores, 1e-12))) > 0.5


def test_one_pass_cancellation_does_not_occur_with_large_offsets() -> None:
    scores = [1e9, 1e9 + 1, 1e9 + 2]
    assert mean_std(scores, 1e-3) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-9)


def test_scores_spread_within_the_tolerance_give_a_group_without_advantage() -> None:
    learn = LearnConfig(zero_tolerance=2**-10)
    assert group_advantages([0.5, 0.5005, 0.5, 0.5], STOP4, learn) == [0.0] * 4
    assert group_advantages([0.5, 0.5 + 2**-10, 0.5, 0.5], STOP4, learn) == [0.0] * 4
    assert any(group_advantages([0.5, 0.502, 0.5, 0.5], STOP4, learn))


def test_zero_reward_does_not_let_an_all_correct_group_through() -> None:
    learn = LearnConfig(truncated="zero_reward")
    assert group_advantages([1.0] * 4, ["stop", "stop", "stop", "length"], learn) == [0.0] * 4


def test_zero_reward_counts_a_truncated_completion_as_zero_in_an_informative_group() -> None:
    learn = LearnConfig(truncated="zero_reward")
    advantages = group_advantages([1.0, 1.0, 0.0, 0.0], ["stop", "length", "stop", "stop"], learn)
    assert advantages == [0.75, -0.25, -0.25, -0.25]
    kept = group_advantages([1.0, 1.0, 0.0, 0.0], ["stop", "length", "stop", "stop"], LearnConfig())
    assert kept == [0.5, 0.5, -0.5, -0.5]


def test_zero_reward_that_levels_a_group_leaves_no_advantage() -> None:
    learn = LearnConfig(truncated="zero_reward")
    assert group_advantages([0.0, 1.0, 0.0, 0.0], ["stop", "length", "stop", "stop"], learn) == [0.0] * 4


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, None, None], [None, None]])
def test_fewer_than_two_scores_give_no_advantage(scores: list[float | None]) -> None:
    assert group_advantages(scores, ["stop"] * len(scores), LearnConfig()) == [0.0] * len(scores)
    assert not informative(scores, 0.0)


def test_equal_scores_in_two_groups_stay_two_groups() -> None:
    # Pooled they would be informative: 1, 1 against 0, 0.
    for scores in ([1.0, 1.0], [0.0, 0.0]):
        assert group_advantages(scores, ["stop"] * 2, LearnConfig()) == [0.0, 0.0]


def test_the_scale_is_the_group_s_own_spread() -> None:
    learn = LearnConfig(advantage="mean_std")
    narrow = group_advantages([0.0, 0.1], ["stop"] * 2, learn)
    wide = group_advantages([0.0, 1.0], ["stop"] * 2, learn)
    assert narrow == pytest.approx(wide)
    assert wide == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_an_unscorable_completion_is_not_a_zero() -> None:
    advantages = group_advantages([1.0, None, 0.0, 1.0], STOP4, LearnConfig())
    assert advantages == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    # The unscorable one shifts nobody: without it the others have the same advantages.
    assert [advantages[i] for i in (0, 2, 3)] == group_advantages([1.0, 0.0, 1.0], STOP4[:3], LearnConfig())


def test_a_list_of_finish_reasons_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        group_advantages([0.0, 1.0], ["stop"], LearnConfig())


@given(finite_scores)
def test_centred_advantages_sum_to_zero_and_keep_differences(scores: list[float]) -> None:
    values = centred(scores)
    size = max(map(abs, scores)) + 1.0
    assert abs(math.fsum(values)) <= 1e-12 * size * len(scores)
    assert values[0] - values[-1] == pytest.approx(scores[0] - scores[-1], abs=1e-9 * size)


@given(finite_scores, st.floats(1e-6, 1.0))
def test_mean_std_is_bounded_by_the_root_of_the_group_s_size(scores: list[float], floor: float) -> None:
    # |a| <= (n - 1) / sqrt(n), whatever the scores; rounding residue over a floor stays far below.
    bound = (len(scores) - 1) / math.sqrt(len(scores))
    assert max(map(abs, mean_std(scores, floor))) <= bound * (1 + 1e-6) + 1e-3
