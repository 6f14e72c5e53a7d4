import math

import pytest

from mptrain.report.run_history import Curve, in_groups, mean_over_runs


def filled(values, most):
    curve = Curve(most)
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    return curve


def test_a_short_curve_is_every_point_as_it_is():
    curve = filled([3.0, 1.0, 2.0], most=10)
    assert curve.extremes() == ([1, 2, 3], [3.0, 1.0, 2.0])
    assert curve.means() == ([1, 2, 3], [3.0, 1.0, 2.0])


def test_a_long_curve_stays_bounded_and_keeps_single_spikes():
    values = [1.0] * 100_000
    values[71_234], values[5] = 99.0, -99.0
    curve = filled(values, most=500)
    steps, drawn = curve.extremes()
    assert len(curve) <= 500
    assert len(drawn) <= 1000
    assert (71_235, 99.0) in zip(steps, drawn, strict=True)
    assert (6, -99.0) in zip(steps, drawn, strict=True)
    assert steps == sorted(steps)


def test_the_mean_over_buckets_is_the_mean_over_steps():
    values = [float(step % 7) for step in range(4096)]
    curve = filled(values, most=64)
    assert curve.width == 64
    assert math.fsum(curve.means()[1]) / len(curve) == pytest.approx(math.fsum(values) / len(values))


def test_values_that_cannot_be_drawn_break_the_line():
    curve = filled([1.0, math.nan, math.inf, 1e300, 2.0], most=10)
    assert curve.lost() == [2, 3, 4]
    assert [math.isnan(value) for value in curve.means()[1]] == [False, True, True, True, False]
    assert curve.finite() == [1.0, 1.0, 2.0, 2.0]
    assert curve.last() == (5, 2.0)


def test_one_lost_value_does_not_take_its_bucket_with_it():
    curve = filled([1.0, math.nan] * 8, most=4)
    assert curve.means()[1] == [1.0] * 4
    assert len(curve.lost()) == 4


def test_smoothing_neither_shortens_nor_shifts():
    curve = filled([float(step) for step in range(1, 201)], most=1000)
    steps, values = curve.smooth(0.05)
    assert len(values) == 200
    assert values[100] == pytest.approx(steps[100])


def test_runs_of_different_length_are_merged_on_wider_buckets():
    short, long = filled([1.0] * 10, most=16), filled([3.0] * 40, most=16)
    steps, means, lows, highs = mean_over_runs([short, long])
    assert long.width == 4
    assert (means[0], lows[0], highs[0], means[-1]) == (2.0, 1.0, 3.0, 3.0)
    assert steps == sorted(steps)
    _, means, _, _ = mean_over_runs([*(filled([1.0] * 5, 99) for _ in range(3)), filled([9.0] * 8, 99)])
    assert means == [3.0] * 5  # one of four does not go on with their mean
    assert mean_over_runs([Curve(), Curve()]) == ([], [], [], [])


def test_a_caption_says_how_many_steps_a_point_stands_for():
    assert in_groups([filled([1.0] * 8, most=8), Curve()], "A point is the mean of") == ""
    assert in_groups([filled([1.0] * 3000, most=8), Curve()], "Of") == " Of 512 steps."
