"""The rules that look at more than overflows, against scales worked out by hand and of one against its source on plain numbers."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.numerics.overflow_check import LargestMagnitude, ShareAbove, judge
from tests.loops import each
from tests.scaler.walking import CPU, preset, verdict_of


def walk_measured(scaler, steps) -> list[float]:
    """The scale after each step; a step is what was measured of its gradients at the scale in force, or None: overflow."""
    state, scales = scaler.initial(CPU), []
    for step in steps:
        scale = state["scale"].item()
        measured = math.nan if step is None else step(scale) if callable(step) else step
        state = scaler.after(state, verdict_of(step is None, measured, scale))
        scales.append(state["scale"].item())
    return scales


def largest(value: float):
    """A step whose largest unscaled gradient is that."""
    return lambda scale: value * scale


def fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@each("measure", [LargestMagnitude(), ShareAbove(4.0)])
@each("grads", [[], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(2, 0)]])
def test_a_step_without_gradients_measures_nothing(measure, grads):
    found = measure(grads)
    assert found.tolist() == [0.0]
    assert found.dtype == torch.float64


# ---- LogMax ------------------------------------------------------------------------------------------------------


def logmax_of_openseq2seq(values, overflow=2.0**16, beta1=0.99, beta2=0.999):
    """`LogMaxScaler.update_op` on Python numbers: its own running products in place of powers."""
    x_hat = slow_x_hat = xsquared_hat = 0.0
    b1_correction = b2_correction = 1.0
    scales = []
    for value in values:
        x = overflow if value is None else math.log2(value)
        x_hat = beta1 * x_hat + (1 - beta1) * x
        b1_correction *= beta1
        mu = x_hat / (1 - b1_correction)
        slow_x_hat = beta2 * slow_x_hat + (1 - beta2) * x
        xsquared_hat = beta2 * xsquared_hat + (1 - beta2) * (x * x)
        b2_correction *= beta2
        slow_mu = slow_x_hat / (1 - b2_correction)
        sigma = math.sqrt(max(xsquared_hat / (1 - b2_correction) - slow_mu * slow_mu, 0.0))
        scales.append(min(max(2.0 ** (16 - (sigma * 3.09 + mu)), 1.0), 2.0**14))
    return scales


def test_logmax_leaves_3_09_deviations_of_room_by_hand():
    """Betas of a half: x = 3, 5, 5 weigh 1; 1/3 and 2/3; 1/7, 2/7 and 4/7."""
    scaler = preset("logmax", beta1=0.5, beta2=0.5, max_scale=65536.0)
    scales = walk_measured(scaler, [largest(8.0), largest(32.0), largest(32.0)])
    mean2, deviation2 = 13 / 3, math.sqrt(59 / 3 - (13 / 3) ** 2)  # (9 + 2 * 25) / 3
    mean3, deviation3 = 33 / 7, math.sqrt(159 / 7 - (33 / 7) ** 2)  # (9 + 6 * 25) / 7
    assert scales == pytest.approx(
        [2.0**13, 2 ** (16 - mean2 - 3.09 * deviation2), 2 ** (16 - mean3 - 3.09 * deviation3)], rel=1e-6
    )
    assert scales[1:] == pytest.approx([431.5508, 557.6301], rel=1e-6)


@pytest.mark.parametrize("overflow", [65536.0, 16.0])
@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.one_of(st.none(), st.floats(2.0**-30, 2.0**20)), max_size=60))
def test_logmax_is_the_sources_arithmetic_on_any_trace(overflow, values):
    scaler = preset("logmax", overflow_counts_as=overflow)
    scales = walk_measured(scaler, [None if value is None else largest(value) for value in values])
    assert scales == pytest.approx(logmax_of_openseq2seq(values, overflow), rel=1e-5)


def test_one_overflow_keeps_logmax_at_its_floor_unless_it_counts_16():
    steps = [largest(1.0), largest(2.0)] * 50 + [None] + [largest(1.0), largest(2.0)] * 2500
    assert set(walk_measured(preset("logmax"), steps)[100:]) == {1.0}
    gentle = walk_measured(preset("logmax", overflow_counts_as=16.0), steps)
    assert gentle[100] < gentle[99] / 10
    assert gentle[-1] > gentle[99] / 8


def test_logmax_leaves_a_step_of_zero_gradients_out():
    scaler = preset("logmax")
    with_zero = walk_measured(scaler, [largest(4.0), largest(8.0), 0.0, largest(8.0)])
    without = walk_measured(scaler, [largest(4.0), largest(8.0), largest(8.0)])
    assert with_zero == [without[0], without[1], without[1], without[2]]


def test_a_nan_gradient_counts_as_an_overflow_for_logmax_and_als():
    for name in ("logmax", "als"):
        scaler = preset(name, init_scale=4.0)
        state = scaler.initial(CPU)
        for kind in (math.nan, math.inf):
            norm = torch.tensor([kind], dtype=torch.float64)
            after = scaler.after(state, judge(norm, state["scale"], skip_on_overflow=True, measured=norm))
            assert after["scale"].item() == {"logmax": 1.0, "als": 2.0}[name]
            assert all(value.isfinite().all() for value in after.values())


# ---- Chainer -----------------------------------------------------------------------------------------------------


def test_smooth_doubles_until_the_first_overflow_by_hand():
    steps = [0.0] * 4 + [None] + [0.0] * 4
    root = 2.0**0.25
    assert walk_measured(preset("smooth", interval=4), steps) == [
        2.0, 4.0, 8.0, 16.0, 8.0, fp32(8 * root), fp32(8 * root**2), fp32(8 * root**3), pytest.approx(16.0)
    ]  # fmt: skip
    assert fp32(8 * root) == pytest.approx(9.513657)


def test_smooth_stays_within_1_and_the_largest_fp16_number():
    scales = walk_measured(preset("smooth"), [0.0] * 20 + [None] * 20)
    assert scales[14:20] == [32768.0, 65504.0, 65504.0, 65504.0, 65504.0, 65504.0]
    assert scales[20:23] == [32752.0, 16376.0, 8188.0]
    assert scales[-1] == 1.0


def test_a_thousand_clean_steps_double_the_scale_of_smooth():
    scales = walk_measured(preset("smooth"), [0.0] * 8 + [None] + [0.0] * 1000)
    assert scales[8] == 128.0
    assert scales[-1] == pytest.approx(256.0, rel=1e-9)  # in FP32 alone, a thousand roundings would show


# ---- Graphcore ---------------------------------------------------------------------------------------------------


def test_als_halves_above_the_threshold_and_doubles_otherwise_by_hand():
    steps = [0.0, 0.0, 1e-7, 1.1e-7, 0.5, 0.0, None, 0.0]
    assert walk_measured(preset("als"), steps) == [2.0, 4.0, 8.0, 4.0, 2.0, 4.0, 2.0, 4.0]


def test_als_changes_at_the_end_of_a_period_or_on_overflow():
    scaler = preset("als", update_period=3, init_scale=16.0)
    assert walk_measured(scaler, [0.0] * 6) == [16.0, 16.0, 32.0, 32.0, 32.0, 64.0]
    assert walk_measured(scaler, [0.5] * 6) == [16.0, 16.0, 8.0, 8.0, 8.0, 4.0]
    assert walk_measured(scaler, [None, 0.0, 0.0, 0.0]) == [8.0, 8.0, 16.0, 16.0]


def test_als_keeps_within_its_limits_and_below_inf():
    assert walk_measured(preset("als", max_scale=4.0), [0.0] * 4) == [2.0, 4.0, 4.0, 4.0]
    assert walk_measured(preset("als", min_scale=0.5), [1.0] * 3) == [0.5, 0.5, 0.5]
    assert walk_measured(preset("als", init_scale=2.0**126), [0.0] * 3) == [2.0**127] * 3


# ---- measuring ---------------------------------------------------------------------------------------------------


def test_the_largest_magnitude_is_that_of_all_gradients_of_any_dtype_and_shape():
    grads = [torch.tensor([[1.0, -5.5]]), torch.tensor([3.0, 2.0]).half(), torch.tensor(-1.0), torch.empty(0)]
    assert LargestMagnitude()(grads).tolist() == [5.5]
    assert not LargestMagnitude()([*grads, torch.tensor([math.nan, 1.0])]).isfinite().any()
    assert LargestMagnitude()([*grads, torch.tensor([-math.inf])]).tolist() == [math.inf]


def test_the_share_above_an_edge_counts_what_is_not_finite():
    grads = [torch.tensor([[1.0, -5.5], [8188.0, -9000.0]]), torch.tensor([0.0, 65504.0]).half()]
    assert ShareAbove(8188.0)(grads).tolist() == [2 / 6]
    assert ShareAbove(8188.0)([*grads, torch.tensor([math.nan, -math.inf])]).tolist() == [4 / 8]


def test_rules_say_what_they_need_measured():
    assert preset("logmax").measure == LargestMagnitude()
    assert preset("als").measure == ShareAbove(8188.0)
    assert preset("als", bin_edge=0.5).measure == ShareAbove(32752.0)
    for name in ("torch", "mxnet", "fairseq", "smooth"):
        assert preset(name).measure is None
