"""Statistics over seeds against figures worked by hand: Student's t has closed forms at 1 and 2 degrees."""

import math

import pytest

from sapo.experiments.statistics import (
    adjusted,
    moving_average,
    oscillation,
    over_seeds,
    paired,
    power,
    ratio,
    rising,
    same_survival,
    smallest_difference,
    spread_beside_seeds,
    survival_median,
    time_to,
    window_of,
)

T_2 = 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
"""Quantile 0.975 of Student's t with two degrees of freedom, 4.3027."""
T_1 = math.tan(math.pi * 0.475)
"""The same with one degree, 12.706: Cauchy's."""


def test_three_seeds_have_students_interval_with_two_degrees() -> None:
    found = over_seeds([1.0, 2.0, 3.0])
    assert (found.mean, found.spread, found.n) == (2.0, 1.0, 3)
    assert found.low == pytest.approx(2 - T_2 / math.sqrt(3))
    assert found.high == pytest.approx(2 + T_2 / math.sqrt(3))


def test_a_pair_is_compared_by_seed_and_not_by_place() -> None:
    found = paired({1: 11.0, 2: 22.0, 3: 33.0}, {3: 30.0, 1: 10.0, 2: 20.0, 9: 500.0})
    assert found is not None
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high == pytest.approx(2 + T_2 / math.sqrt(3))
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))  # two-sided, two degrees: 0.0742


def test_pairing_takes_out_what_seeds_have_in_common() -> None:
    far = paired({1: 100.0, 2: 0.0, 3: -100.0}, {1: 99.0, 2: -1.1, 3: -101.0})
    assert far is not None
    assert far.p is not None
    assert far.p < 0.01


def test_p_values_are_adjusted_as_benjamini_and_hochberg_do() -> None:
    # 0.01 x 3 / 1, 0.03 x 3 / 2 = 0.045 which 0.04 x 3 / 3 undercuts
    assert adjusted([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.04),
        pytest.approx(0.04),
    ]
    assert adjusted([None]) == [None]


def test_power_of_few_pairs_is_that_of_the_noncentral_t_distribution() -> None:
    assert [power(1.0, 1.0, n) for n in (5, 10)] == pytest.approx([0.40139, 0.80310], abs=1e-5)


def test_the_smallest_difference_of_many_seeds_is_that_of_the_normal_distribution() -> None:
    assert smallest_difference(2.0, 40_000) == pytest.approx(2 * (1.959964 + 0.841621) / 200, rel=1e-3)


def test_the_smallest_difference_is_shown_with_that_power() -> None:
    found = smallest_difference(0.3, 5)
    assert found is not None
    assert power(found, 0.3, 5) == pytest.approx(0.8)


def test_censored_runs_are_kept() -> None:
    # at risk 5, 3, 1: S = 4/5 at 2, 4/5 x 2/3 = 0.533 at 4, 0 at 6; without the two censored it would be 4
    found = survival_median([2, 3, 4, 5, 6], [True, False, True, False, True])
    assert (found.value, found.reached, found.n) == (6, 3, 5)


def test_the_band_of_the_median_is_greenwoods() -> None:
    # S = 6/7: exp(ln S x exp(1.96 x 1.00098)) = 0.33 <= 1/2 already at 1; S = 1/7: 0.465, S = 2/7: 0.58
    found = survival_median([1, 2, 3, 4, 5, 6, 7], [True] * 7)
    assert (found.low, found.value, found.high) == (1, 4, 6)


def test_a_median_that_half_the_runs_never_reach_is_unknown() -> None:
    found = survival_median([1, 9, 9, 9], [True, False, False, False])
    assert (found.value, found.reached, found.n) == (None, 1, 4)
    assert survival_median([9, 9], [False, False]).value is None


def test_a_median_is_reached_when_exactly_half_have_ended() -> None:
    # 3/4 x 2/3 is not exactly 1/2 in binary
    assert survival_median([1, 2, 9, 9], [True, True, False, False]).value == 2


def test_runs_that_are_all_sooner_are_one_of_all_arrangements_and_its_mirror() -> None:
    # 20 ways to take 3 of 6 runs; the usual approximation of the log-rank test would say 0.025
    sooner, later = ([1.0, 2.0, 3.0], [True] * 3), ([4.0, 5.0, 6.0], [True] * 3)
    assert same_survival(sooner, later) == pytest.approx(2 / 20)
    assert same_survival(sooner, ([4.0, 5.0, 6.0], [False] * 3)) == pytest.approx(2 / 20)


def test_a_run_that_was_given_up_says_less_than_one_that_got_there() -> None:
    ours, theirs = ([1.0, 2.0, 3.0], [True, True, False]), ([4.0, 5.0, 6.0], [True] * 3)
    assert same_survival(ours, theirs) == same_survival(theirs, ours)
    assert 2 / 20 < (same_survival(ours, theirs) or 0.0) < 1.0


def test_what_seeds_have_in_common_does_not_spread_differences() -> None:
    assert spread_beside_seeds([[1, 5, 2], [11, 15, 12]]) == pytest.approx(0)
    # the differences of two arms over two seeds are 2 and 4: spread sqrt(2)
    assert spread_beside_seeds([[1, 5], [3, 9]]) == pytest.approx(math.sqrt(2))
    assert spread_beside_seeds([[1, 2, 3]]) is None
    assert spread_beside_seeds([[1], [2]]) is None


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    found = ratio({1: 2.0, 2: 8.0, 3: 9.0}, {1: 1.0, 2: 1.0})
    assert found is not None
    assert found.mean == pytest.approx(4)
    # logarithms ln 2 and ln 8 have the mean ln 4, the standard error ln 2
    assert found.high == pytest.approx(4 * 2**T_1)


def test_a_target_is_met_on_the_line_between_two_exams() -> None:
    assert time_to([(0, 0.1), (100, 0.2), (200, 0.4)], 0.25) == (125, True)
    assert time_to([(0, 0.3), (100, 0.2)], 0.25) == (0, True)


def test_a_target_is_met_by_a_share_that_only_rounding_tells_from_it() -> None:
    share, same = 0.4270833333333333, 0.42708333333333337
    assert time_to([(0, 0.1), (100, share), (200, share)], same) == (100, True)
    assert time_to([(0, share)], same) == (0, True)


def test_a_noisy_curve_is_made_to_rise_by_averaging_what_falls() -> None:
    assert rising([(0, 0.1), (1, 0.5), (2, 0.2), (3, 0.6)]) == [(0, 0.1), (1, 0.35), (2, 0.35), (3, 0.6)]


def test_the_moving_average_is_as_wide_as_the_papers_or_a_twentieth() -> None:
    assert [window_of(rounds) for rounds in (4, 200, 2000, 9000)] == [1, 10, 100, 100]
    assert moving_average([1, 2, 6, 1], 3) == [pytest.approx(3), pytest.approx(3)]
    assert moving_average([1, 2], 3) == []


def test_a_smooth_rise_is_no_oscillation_and_a_wave_is() -> None:
    rise = [0.01 * i - 1e-5 * i * i for i in range(400)]
    wave = [value + 0.1 * math.sin(i / 8) for i, value in enumerate(rise)]
    assert oscillation(rise) == pytest.approx(0, abs=1e-12)
    # a sine's root mean square, damped by the 20 rounds' mean: 0.1 / sqrt(2) x sin(1.25) / 1.25
    assert oscillation(wave) == pytest.approx(0.0537, rel=0.05)
