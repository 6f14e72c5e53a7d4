"""Intervals, equivalence and power: against scipy, against published numbers, and by simulation."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mptrain.study.comparison.statistics import (
    MOST_PAIRS,
    _student,
    equivalence,
    looks_skewed,
    mean_and_spread,
    mean_interval,
    pairs_for_power,
    ratio_interval,
    rounding_spread,
    tost_p,
    tost_power,
)
from tests.loops import each

# Additional hours of sleep under two drugs (Cushny and Peebles 1905), the example of Student (1908).
SLEEP_1 = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SLEEP_2 = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


@each("n", [2, 3, 8, 50])
@each("level", [0.9, 0.95, 0.99])
def test_the_interval_is_that_of_scipy(n, level):
    values = np.random.default_rng(n).normal(0.9, 0.02, n).tolist()
    found = mean_interval(values, level)
    expected = stats.ttest_1samp(values, 0).confidence_interval(level)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert (found.mean, found.spread) == pytest.approx((np.mean(values), np.std(values, ddof=1)), rel=1e-12)
    assert (found.n, found.level) == (n, level)


def test_students_sleep_data_give_students_interval():
    found = mean_interval([b - a for a, b in zip(SLEEP_1, SLEEP_2, strict=True)])
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)  # as in R's help of t.test
    paired = stats.ttest_rel(SLEEP_2, SLEEP_1).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((paired.low, paired.high), rel=1e-12)


def test_one_value_has_no_interval_and_equal_values_have_a_point():
    alone = mean_interval([0.5])
    assert alone.mean == 0.5
    assert all(math.isnan(value) for value in (alone.low, alone.high, alone.spread))
    equal = mean_interval([0.1, 0.1, 0.1])
    assert (equal.mean, equal.low, equal.high, equal.spread) == (0.1, 0.1, 0.1, 0.0)


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [math.inf]])
def test_what_is_no_sample_is_refused(values):
    with pytest.raises(ValueError, match=r"no value|finite"):
        mean_interval(values)


def test_a_ratio_and_its_inverse_say_the_same():
    above, below = [220.0, 180.0, 205.0], [100.0, 90.0, 102.0]
    found, inverse = ratio_interval(above, below), ratio_interval(below, above)
    assert found.mean == pytest.approx(stats.gmean(np.divide(above, below)))
    assert (inverse.low, inverse.mean, inverse.high) == pytest.approx((1 / found.high, 1 / found.mean, 1 / found.low))
    assert found.spread == pytest.approx(np.std(np.log(np.divide(above, below)), ddof=1))
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([0.0], [1.0])
    with pytest.raises(ValueError, match="shorter"):
        ratio_interval([1.0, 2.0], [1.0])


@pytest.mark.parametrize("shift", [-0.012, 0.0, 0.004, 0.03])
def test_equivalence_is_two_one_sided_tests_of_scipy(shift):
    differences = np.random.default_rng(5).normal(shift, 0.006, 7)
    found = equivalence(differences.tolist(), 0.01)
    above = stats.ttest_1samp(differences, -0.01, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.01, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below), rel=1e-9)
    ends = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high), rel=1e-12)
    assert (found.p < 0.05) == (found.low > -0.01 and found.high < 0.01)


def test_equal_differences_are_equivalent_exactly_inside_the_margin():
    same = equivalence([0.0, 0.0, 0.0], 0.01)
    assert (same.p, same.low, same.high, same.power, same.pairs_for_80) == (0.0, 0.0, 0.0, 1.0, 2)
    assert equivalence([0.02, 0.02], 0.01).p == 1.0
    assert equivalence([0.01, 0.01], 0.01).p == 1.0


def test_one_pair_says_nothing_and_no_spread_everything():
    found = equivalence([0.001], 0.01)
    assert all(math.isnan(value) for value in (found.low, found.high, found.p, found.power))
    assert found.pairs_for_80 is None
    assert tost_power(1.0, 0.0, 3, difference=0.99) == 1.0
    assert tost_power(1.0, 0.0, 3, difference=1.0) == 0.0


@pytest.mark.parametrize("margin", [0.0, -0.01, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin):
    with pytest.raises(ValueError, match="margin"):
        equivalence([0.0, 0.1], margin)


# R's PowerTOST, sampleN.TOST with its defaults: 2x2 crossover, ratio 0.95 within 0.8 to 1.25, power of at least 0.8.
@pytest.mark.parametrize(("cv", "n", "power"), [(0.2, 20, 0.834680), (0.25, 28, 0.807439), (0.3, 40, 0.815845)])
def test_power_is_that_of_powertost(cv, n, power):
    def of(subjects):
        standard_error = math.sqrt(math.log(1 + cv**2)) * math.sqrt(2 / subjects)
        return tost_power(math.log(1.25), standard_error, subjects - 2, 0.05, math.log(0.95))

    assert of(n) == pytest.approx(power, abs=5e-7)
    assert of(n - 2) < 0.8  # so n is the smallest even number that does


def test_a_margin_of_two_spreads_needs_more_than_three_pairs():
    def of(pairs):
        return tost_power(3, 1.5 / math.sqrt(pairs), pairs - 1)

    assert [round(of(pairs), 3) for pairs in (2, 3, 4, 8)] == [0.251, 0.558, 0.828, 0.999]
    assert pairs_for_power(3, 1.5) == 4


@each("difference", [0.0, 0.5, 1.0])
@each("pairs", [2, 3, 8])
def test_power_is_how_often_equivalence_is_found(difference, pairs):
    samples = np.random.default_rng(17).normal(difference, 0.9, (200_000, pairs))
    half = stats.t.ppf(0.95, pairs - 1) * samples.std(axis=1, ddof=1) / math.sqrt(pairs)
    often = np.mean(np.abs(samples.mean(axis=1)) + half < 1)
    assert tost_power(1.0, 0.9 / math.sqrt(pairs), pairs - 1, 0.05, difference) == pytest.approx(often, abs=0.005)


def test_the_number_of_pairs_is_the_smallest_that_suffices():
    for spread in (0.001, 0.01, 0.03):
        found = pairs_for_power(0.01, spread)
        powers = [tost_power(0.01, spread / math.sqrt(pairs), pairs - 1) for pairs in range(2, found + 3)]
        assert all(power < 0.8 for power in powers[: found - 2])
        assert all(power >= 0.8 for power in powers[found - 2 :])
    assert pairs_for_power(0.01, 0.1) == 858
    assert pairs_for_power(0.01, 0.11) is None  # more than anybody trains
    assert tost_power(0.01, 0.11 / math.sqrt(MOST_PAIRS), MOST_PAIRS - 1) < 0.8


@pytest.mark.parametrize("n", [3, 8])
def test_the_interval_covers_the_truth_in_95_of_100_samples(n):
    samples = np.random.default_rng(n).normal(0.9, 0.02, (4_000, n)).tolist()
    covered = sum(found.low <= 0.9 <= found.high for found in map(mean_interval, samples))
    assert covered / 4_000 == pytest.approx(0.95, abs=0.01)


#: 5 % and three standard errors of 10,000 samples.
BY_CHANCE = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 10_000)


@pytest.mark.parametrize(("n", "spread"), [(3, 0.002), (8, 0.005), (8, 0.02)])
def test_a_difference_of_the_margin_is_rarely_called_equivalent(n, spread):
    samples = np.random.default_rng(n).normal(0.01, spread, (4_000, n)).tolist()
    found = [mean_interval(sample) for sample in samples]
    false = sum(tost_p(one.mean, one.spread / math.sqrt(n), n - 1, 0.01) < 0.05 for one in found)
    assert false / 4_000 <= BY_CHANCE
    assert tost_power(0.01, spread / math.sqrt(n), n - 1, difference=0.01) <= 0.05  # exactly, not by simulation


def test_the_spread_of_rounding_is_that_of_simulated_rounding():
    values = np.random.default_rng(1).uniform(0, 1, (2, 200_000))
    errors = np.round(values * 397) / 397 - values
    assert rounding_spread(1 / 397) == pytest.approx(errors.std(), rel=0.01)
    assert rounding_spread(1 / 397, 1 / 397) == pytest.approx((errors[0] - errors[1]).std(), rel=0.01)
    assert rounding_spread(1 / 397, 1 / 397) == pytest.approx(1 / (397 * math.sqrt(6)))
    assert rounding_spread(0.0, 0.0) == 0.0


@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=20))
def test_mean_and_spread_are_those_of_exact_arithmetic(values):
    exact = [Fraction(value) for value in values]
    mean, spread = mean_and_spread(values)
    most = max(map(abs, values))
    assert abs(mean - statistics.mean(exact)) <= 1e-14 * most
    assert spread == pytest.approx(statistics.stdev(exact), rel=1e-12, abs=1e-15 * most)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(2, 50))
def test_equal_values_have_their_mean_and_no_spread(value, count):
    assert mean_and_spread([value] * count) == (value, 0)


@each("n", [4, 5, 12, 100])
def test_values_look_skewed_if_their_skewness_by_scipy_is_beyond_one(n):
    draws = np.random.default_rng(n)
    samples = [draws.exponential(1, n) * sign - 2 for sign in (1, -1) for _ in range(200)]
    found = [looks_skewed(values.tolist()) for values in samples]
    assert found == [abs(stats.skew(values)) > 1 for values in samples]
    assert 0 < sum(found) < len(found)


def test_rounding_is_added_to_the_spread_in_intervals_tests_and_power():
    values, rounding = [0.004, 0.001, 0.002], 0.001
    found, equal = mean_interval(values, 0.95, rounding), equivalence(values, 0.01, rounding=rounding)
    spread = math.hypot(found.spread, rounding)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 2) * spread / math.sqrt(3))
    assert found.spread == pytest.approx(stats.tstd(values))
    assert equal.high - found.mean == pytest.approx(stats.t.ppf(0.95, 2) * spread / math.sqrt(3))
    assert equal.p == tost_p(found.mean, spread / math.sqrt(3), 2, 0.01)
    assert (equal.p < 0.05) == (equal.high < 0.01)
    assert equal.power == tost_power(0.01, spread / math.sqrt(3), 2)
    assert equal.pairs_for_80 == pairs_for_power(0.01, spread)


def test_equal_differences_of_rounded_values_are_no_certainty():
    rounding = rounding_spread(1 / 397, 1 / 397)
    found = mean_interval([-3 / 397, -3 / 397], 0.95, rounding)
    equal = equivalence([0.0025, 0.0025], 0.01, rounding=rounding)
    assert found.low < 0 < found.high
    assert (found.spread, equal.p > 0.01, equal.power < 1) == (0, True, True)


@pytest.mark.long
@each(
    ("samples", "spread", "pairs"),
    [(397, 0.0025, 2), (397, 0.0025, 3), (397, 0.0025, 8), (200, 0.005, 2), (200, 0.005, 5)],
)
def test_of_rounded_metrics_few_differences_are_wrongly_found(samples, spread, pairs):
    def differences(true):
        drawn = np.random.default_rng(pairs).normal(true, spread, (4_000, pairs))
        return (np.round(drawn * samples) / samples).tolist()

    rounding = rounding_spread(1 / samples, 1 / samples)
    zero = [mean_interval(sample, 0.95, rounding) for sample in differences(0.0)]
    assert sum(not found.low <= 0 <= found.high for found in zero) / 4_000 <= BY_CHANCE
    at_margin = [mean_interval(sample, 0.90, rounding) for sample in differences(0.01)]
    assert sum(found.low > -0.01 and found.high < 0.01 for found in at_margin) / 4_000 <= 0.05


def test_without_the_spread_of_rounding_more_would_be_wrong():
    drawn = np.random.default_rng(2).normal(0, 0.0025, (4_000, 2))
    found = [mean_interval(sample) for sample in (np.round(drawn * 397) / 397).tolist()]
    assert sum(not one.low <= 0 <= one.high for one in found) / 4_000 > 0.1


def test_quantiles_of_student_are_those_of_scipys_distribution():
    for df in (*range(1, 40), 100, 1000):
        for quantile in (0.5, 0.9, 0.95, 0.975, 0.995):
            assert _student(quantile, df) == stats.t.ppf(quantile, df)
