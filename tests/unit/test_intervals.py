"""Intervals of means over questions: closed forms, and what holds whatever the answers are."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sapo.core.intervals import Z, effective, paired_interval, share_interval

PASSES = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)
SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=60)
DIFFERENCES = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=60)


@given(PASSES)
def test_the_interval_of_single_passes_is_wilsons(passes: Sequence[float]) -> None:
    theirs = stats.binomtest(int(sum(passes)), len(passes)).proportion_ci(method="wilson")
    assert share_interval(passes) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(SHARES)
def test_the_interval_of_a_share_has_a_width_and_holds_it(shares: Sequence[float]) -> None:
    low, high = share_interval(shares, samples=4)
    assert 0 <= low <= math.fsum(shares) / len(shares) + 1e-9
    assert math.fsum(shares) / len(shares) - 1e-9 <= high <= 1
    assert high > low


def test_with_many_questions_it_is_the_normal_interval() -> None:
    shares = [0.0, 0.25, 0.25, 0.5, 1.0] * 2000
    half = Z * math.sqrt(0.115 / 10_000)
    assert share_interval(shares, samples=4).half == pytest.approx(half, rel=1e-3)
    differences = [1.0, 0.0, 0.0, 0.0, -1.0, 1.0] * 2000
    low, high = paired_interval(differences)
    spread = 0.5 - 1 / 36
    assert (low + high) / 2 == pytest.approx(1 / 6, rel=1e-3)
    assert (high - low) / 2 == pytest.approx(Z * math.sqrt(spread / 12_000), rel=1e-3)


def test_shares_count_for_no_more_than_their_answers() -> None:
    alike = share_interval([0.5] * 7 + [0.5625], samples=16)
    passes = [1.0] * 65 + [0.0] * 63
    assert alike.half == pytest.approx(share_interval(passes).half, rel=1e-3)


@given(DIFFERENCES)
def test_the_interval_of_a_difference_has_a_width_and_holds_it(differences: Sequence[float]) -> None:
    low, high = paired_interval(differences)
    mean = math.fsum(differences) / len(differences)
    assert -1 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    assert high > low


@pytest.mark.parametrize(("count", "half"), [(4, 0.4620), (16, 0.1540), (1000, 0.002766)])
def test_questions_that_all_agree_leave_room_for_those_that_were_not_asked(count: int, half: float) -> None:
    assert paired_interval([0.0] * count) == pytest.approx((-half, half), rel=1e-3)


def test_the_interval_of_a_difference_is_that_of_bonett_and_price() -> None:
    # 20 questions: 6 that only the first passes, 2 that only the second passes
    first, second = 7 / 22, 3 / 22
    half = Z * math.sqrt((first + second - (first - second) ** 2) / 22)
    expected = (first - second - half, first - second + half)
    assert paired_interval([1.0] * 6 + [-1.0] * 2 + [0.0] * 12) == pytest.approx(expected)


def test_the_effective_number_counts_a_question_that_came_again_for_less() -> None:
    assert effective(["a", "b", "c"]) == 3
    assert effective([0, 0, 1, 1]) == 2
    assert effective([0, 0, 0, 1]) == 1.6
    assert effective([]) == 0


@given(PASSES, st.integers(1, 9))
def test_asking_everything_again_is_no_more_evidence(passes: Sequence[float], times: int) -> None:
    asked = list(range(len(passes))) * times
    assert share_interval(list(passes) * times, asked) == pytest.approx(share_interval(passes))
    assert paired_interval(list(passes) * times, asked) == pytest.approx(paired_interval(passes))
    assert (
        share_interval(list(passes) * times, asked).half >= share_interval(list(passes) * times).half - 1e-9
    )
