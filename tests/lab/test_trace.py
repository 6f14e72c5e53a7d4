"""What a record tells about scales that it did not use, on traces and histograms written by hand."""

import math
import random

import pytest

from mptrain.lab.trace import Trace
from mptrain.numerics.forecast import GradientHistory
from mptrain.numerics.overflow_check import LargestMagnitude, ShareAbove
from mptrain.system.records import ExponentCounts, HistogramRecord, StepRecord
from tests.loops import each


def step(number, scale, overflow=False, loss=1.0, norm=1.0):
    return StepRecord("main", number, number, 0, loss, scale, overflow, overflow, math.inf if overflow else norm, 0.1)


def counts(largest, lowest=-24, bins=(1,), dtype="float16", zeros=0, inf=0):
    return ExponentCounts(dtype, zeros, inf, 0, largest, lowest, tuple(bins))


def look(number, scale, activations=(), weights=(), overflow=False):
    tensors = {
        "activation_gradients": {str(at): one for at, one in enumerate(activations)},
        "weight_gradients": {str(at): one for at, one in enumerate(weights)},
    }
    return HistogramRecord("main", number, scale, overflow, tensors, {})


def trace(steps, looks=(), half=True):
    found = Trace(half)
    for record in looks:
        found.add_histograms(record)
    for record in steps:
        found.add(record)
    return found


CLEAN, OVER, LOST = step(5, 64.0), step(5, 64.0, overflow=True), step(5, 64.0, overflow=True, loss=math.nan)


@each(
    ("record", "scale", "expected"),
    [
        (CLEAN, 64.0, (False, "known")),
        (OVER, 64.0, (True, "known")),
        (CLEAN, 32.0, (False, "known")),  # clean there, so clean below
        (OVER, 128.0, (True, "known")),  # overflowed there, so above
        (LOST, 1.0, (True, "known")),  # no scale makes that loss finite
        (CLEAN, 0.0, (True, "known")),  # nothing can be unscaled by it
        (CLEAN, 128.0, (False, "unknown")),
        (OVER, 32.0, (True, "unknown")),
        (step(5, 0.0, overflow=True), 8.0, (True, "unknown")),  # the scale itself was the overflow
    ],
)
def test_a_steps_own_verdict_tells_about_other_scales_on_its_side(record, scale, expected):
    assert trace([record]).would_overflow(record, scale) == expected


@pytest.mark.parametrize(
    ("record", "scale", "expected"),
    [
        (OVER, 32.0, (False, "estimated")),  # step 6 was clean at 32
        (OVER, 16.0, (False, "estimated")),
        (OVER, 48.0, (True, "unknown")),
        (step(9, 8.0), 64.0, (True, "estimated")),  # step 5 overflowed at 64
        (step(9, 8.0), 32.0, (False, "unknown")),
    ],
)
def test_without_histograms_the_nearest_step_with_the_other_verdict_tells(record, scale, expected):
    steps = [step(1, 1.0), step(4, 128.0, overflow=True, loss=math.inf), OVER, step(6, 32.0), step(9, 8.0)]
    assert trace(steps).would_overflow(record, scale) == expected


def test_the_largest_half_gradient_of_a_step_says_from_which_scale_it_overflows():
    """2047 at a scale of 64: at 2048, 65504; at 4096 beyond 65520."""
    steps = [step(1, 64.0), step(2, 64.0), step(9, 64.0)]
    found = trace(steps, [look(2, 64.0, [counts(2047.0), counts(3.0)])])
    assert found.would_overflow(steps[1], 2048.0) == (False, "known")
    assert found.would_overflow(steps[1], 4096.0) == (True, "known")
    assert found.would_overflow(steps[0], 4096.0) == (True, "estimated")
    assert found.would_overflow(steps[2], 2048.0) == (False, "estimated")


def test_what_is_rounded_to_infinity_overflows():
    steps = [step(1, 1.0)]
    assert trace(steps, [look(1, 1.0, [counts(65519.0 / 2)])]).would_overflow(steps[0], 2.0) == (False, "known")
    assert trace(steps, [look(1, 1.0, [counts(65520.0 / 2)])]).would_overflow(steps[0], 2.0) == (True, "known")


def test_fp32_gradients_count_where_they_were_half_numbers_on_their_way():
    """A cast or a sum of FP16 numbers has nothing below 2^-24; a gradient that was FP32 all along does."""
    steps = [step(1, 1.0)]
    half = look(1, 1.0, [counts(1.0)], [counts(60000.0, lowest=-24, dtype="float32")])
    whole = look(1, 1.0, [counts(1.0)], [counts(60000.0, lowest=-25, dtype="float32")])
    assert trace(steps, [half]).would_overflow(steps[0], 4.0) == (True, "estimated")  # it only seems so
    assert trace(steps, [half]).would_overflow(steps[0], 2.0**16) == (
        True,
        "known",
    )  # the one that is kept in FP16 does
    assert trace(steps, [whole]).would_overflow(steps[0], 4.0) == (False, "known")


def test_a_step_that_overflowed_tells_nothing_about_its_largest_gradient():
    steps = [step(1, 8.0), step(2, 64.0, overflow=True)]
    looks = [look(1, 8.0, [counts(1.0)]), look(2, 64.0, [counts(60000.0, inf=3)], overflow=True)]
    found = trace(steps, looks)
    assert found.looked_at == 2
    assert found.would_overflow(steps[1], 32.0) == (False, "estimated")  # by step 1
    only = trace(steps[1:], looks[1:])
    assert not only.tells_gradients()
    assert only.would_overflow(steps[1], 32.0) == (True, "unknown")


def test_a_clean_step_is_clean_at_its_own_scale_whatever_its_sums_are():
    """FP32 sums over micro-batches may exceed what each of them held."""
    steps = [step(1, 8.0), step(2, 4.0)]
    found = trace(steps, [look(1, 8.0, [counts(1.0)], [counts(90000.0, dtype="float32")])])
    assert found.would_overflow(steps[1], 8.0) == (False, "estimated")
    assert found.would_overflow(steps[1], 16.0) == (True, "estimated")


def test_between_two_looks_the_largest_gradient_follows_the_norm():
    """Ratios to the norm of 1 at step 1 and of 1/4 at step 9: 1/2 half-way, so 1000 at a norm of 2000."""
    steps = [step(1, 1.0), step(5, 1.0, norm=2000.0), step(9, 1.0, norm=16.0), step(10, 1.0, norm=0.0)]
    found = trace(steps, [look(1, 1.0, [counts(1.0)]), look(9, 1.0, [counts(4.0)])])
    assert found.would_overflow(steps[1], 65.0) == (False, "estimated")
    assert found.would_overflow(steps[1], 66.0) == (True, "estimated")
    assert found.would_overflow(steps[3], 2.0**24) == (False, "estimated")  # without gradient


def test_a_run_in_a_wider_format_knows_nothing_of_fp16():
    """Its own verdict is not that of FP16: 70000 is clean in FP32."""
    steps = [
        step(1, 1.0),
        step(2, 1.0, norm=0.25),
        step(3, 1.0, overflow=True),
        step(4, 1.0, overflow=True, loss=math.inf),
    ]
    wide = counts(70000.0, lowest=-30, dtype="float32")
    found = trace(steps, [look(1, 1.0, [wide])], half=False)
    assert found.would_overflow(steps[0], 1.0) == (True, "estimated")
    assert found.would_overflow(steps[0], 0.5) == (False, "estimated")
    assert found.would_overflow(steps[1], 2.0) == (False, "estimated")
    assert found.would_overflow(steps[1], 4.0) == (True, "estimated")
    assert found.would_overflow(steps[2], 1.0) == (True, "estimated")
    assert found.would_overflow(steps[3], 1.0) == (True, "known")
    assert trace(steps, half=False).would_overflow(steps[0], 0.5) == (False, "unknown")
    assert found.measured(LargestMagnitude(), 1, 1.0) is not None
    measured = trace(steps, [look(1, 1.0, [], [wide])], half=False).measured(LargestMagnitude(), 1, 1.0)
    assert measured == (70000.0, "estimated")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_replay_and_a_forecast_of_one_run_agree_on_every_step_and_scale(dtype):
    """Steps of many norms and scales, some of which overflowed, and looks at some of them."""
    generator = random.Random(3)
    half = dtype == "float16"
    steps = []
    for number in range(1, 61):
        scale = 2.0 ** generator.randrange(6, 14) if half else 1.0
        over = half and generator.random() < 0.2
        steps.append(step(number, scale, over, norm=2.0 ** generator.uniform(-3, 5)))
    looks = []
    for one in steps[::7]:
        if not one.overflow:
            largest = min(one.grad_norm * one.loss_scale * generator.uniform(0.05, 1), 65504.0)
            through = counts(min(3 * largest, 90000.0), lowest=-24, dtype="float32")
            looks.append(look(one.step, one.loss_scale, [counts(largest, dtype=dtype)], [through]))
    history, found = GradientHistory(), trace(steps, looks, half)
    for one in looks:
        history.add(one)
    forecast = history.forecast(steps)
    for at in forecast.scales:
        overflowing = [found.would_overflow(one, 2.0**at.exponent)[0] for one in steps]
        assert at.overflow_share == sum(overflowing) / len(steps)
    assert len({at.overflow_share for at in forecast.scales}) > 4


def test_the_largest_gradient_is_that_of_the_parameters_at_the_scale_that_is_asked_about():
    found = trace([step(1, 8.0)], [look(1, 8.0, [counts(500.0)], [counts(3.0), counts(40.0)])])
    assert found.measured(LargestMagnitude(), 1, 8.0) == (40.0, "known")
    assert found.measured(LargestMagnitude(), 3, 64.0) == (320.0, "estimated")
    assert trace([step(1, 8.0)]).measured(LargestMagnitude(), 1, 8.0) is None
    assert found.measured(lambda grads: grads[0], 1, 8.0) is None  # a measure of somebody's own


@each(
    ("edge", "scale", "share"),
    [
        (4.0, 1.0, 24 / 100),  # all of [4, 8) and of [8, 16)
        (8.0, 1.0, 8 / 100),
        (12.0, 1.0, 4 / 100),  # half of [8, 16)
        (8.0, 2.0, 24 / 100),  # twice as large
        (8.0, 0.5, 1 / 100),  # [16, 32) is empty by the bins, and the largest is 16: at least that one
        (16.0, 1.0, 1 / 100),
        (17.0, 1.0, 0.0),
        (0.5, 1.0, 90 / 100),  # but for the zeros
    ],
)
def test_the_share_above_an_edge_comes_from_whole_powers_of_two_and_the_largest_value(edge, scale, share):
    """10 zeros, 66 in [2, 4), 16 in [4, 8), 8 in [8, 16); the largest is said to be 16 and a little."""
    found = trace([step(1, 1.0)], [look(1, 1.0, [], [counts(16.5, lowest=1, bins=(66, 16, 8), zeros=10)])])
    measured, basis = found.measured(ShareAbove(edge), 1, scale)
    assert measured == pytest.approx(share)
    assert basis == "known"
