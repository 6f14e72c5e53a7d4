from __future__ import annotations

import itertools
import math

import pytest
import torch

from mptrain.numerics.overflow_check import gradient_norms, judge
from mptrain.scaler import DynamicScaler
from mptrain.system.errors import ConfigError
from tests.loops import each

CPU = torch.device("cpu")
FLT_MAX = torch.finfo(torch.float32).max


def verdict_of(value: float):
    """The verdict on a gradient that holds this value."""
    return judge(gradient_norms([torch.tensor([1.0, value])]), torch.ones(1), skip_on_overflow=True)


CLEAN, BAD = verdict_of(1.0), verdict_of(math.inf)


def walk(scaler: DynamicScaler, overflows) -> list[float]:
    """The scale before the first step and after each."""
    state, scales = scaler.initial(CPU), [scaler.init_scale]
    for overflow in overflows:
        state = scaler.after(state, BAD if overflow else CLEAN)
        scales.append(state["scale"].item())
    return scales


def megatron(scaler: DynamicScaler, overflows) -> list[float]:
    """Megatron-LM's rule on plain numbers: tolerance is spent by overflows and given back by growth alone."""
    scale, clean, tolerance = scaler.init_scale, 0, scaler.hysteresis
    scales = [scale]
    for overflow in overflows:
        if overflow:
            clean = 0
            tolerance -= 1
            if tolerance <= 0:
                scale = max(scale * scaler.backoff_factor, scaler.min_scale)
        else:
            clean += 1
            if clean == scaler.growth_interval:
                clean, tolerance = 0, scaler.hysteresis
                scale = min(scale * scaler.growth_factor, scaler.max_scale)
        scales.append(scale)
    return scales


def test_every_kind_of_non_finite_gradient_halves_the_scale_down_to_the_floor():
    scaler = DynamicScaler(init_scale=16.0, min_scale=1.0)
    state, scales = scaler.initial(CPU), []
    for value in [math.inf, -math.inf, *[math.nan] * 6]:
        state = scaler.after(state, verdict_of(value))
        scales.append(state["scale"].item())
    assert scales == [8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("uncounted", [0, 1])  # by torch's kernel, and by the rule itself
def test_an_overflow_that_is_applied_backs_off_and_begins_the_window_anew(uncounted):
    scaler = DynamicScaler(init_scale=16.0, growth_interval=2, growth_delay=uncounted, on_overflow="apply")
    clean, bad = (
        judge(gradient_norms([torch.tensor([1.0, value])]), torch.ones(1), skip_on_overflow=False)
        for value in (1.0, math.inf)
    )
    state, scales = scaler.initial(CPU), []
    for verdict in [*[clean] * (1 + uncounted), bad, *[clean] * (2 + uncounted)]:
        state = scaler.after(state, verdict)
        scales.append(state["scale"].item())
    assert scales == [16.0] * (1 + uncounted) + [8.0] * (2 + uncounted) + [16.0]


@each(
    ("constants", "overflows", "scales"),
    [
        (
            {"init_scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 2},
            "..x",
            [4.0, 8.0, 2.0],
        ),
        ({"init_scale": 400.0}, "xxxx", [200.0, 100.0, 50.0, 25.0]),
        ({"init_scale": 2.0, "growth_interval": 2}, "........", [2.0, 4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0]),
        # trap 8: H - 1 overflows are free, and clean steps below a window do not refill what they spend; growth does
        ({"init_scale": 1024.0, "hysteresis": 3}, "xxx", [1024.0, 1024.0, 512.0]),
        ({"init_scale": 1024.0, "hysteresis": 5}, "xxxxx", [1024.0] * 4 + [512.0]),
        ({"init_scale": 1024.0, "hysteresis": 2, "growth_interval": 4}, "x...x", [1024.0] * 4 + [512.0]),
        ({"init_scale": 1024.0, "hysteresis": 2, "growth_interval": 2}, "xxxx", [1024.0, 512.0, 256.0, 128.0]),
        (
            {"init_scale": 1024.0, "hysteresis": 2, "growth_interval": 2},
            "xx..xx",
            [1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0],
        ),
    ],
)
def test_trap_08_the_scales_are_those_worked_out_by_hand(constants, overflows, scales):
    assert walk(DynamicScaler(**constants), [step == "x" for step in overflows])[1:] == scales


@pytest.mark.parametrize("floor", [0.5, torch.finfo(torch.float32).smallest_normal])
def test_trap_01_the_scale_never_falls_below_its_floor(floor):
    scales = walk(DynamicScaler(init_scale=2.0**16, min_scale=floor), [True] * 1000)
    assert min(scales) == scales[-1] == floor > 0


@pytest.mark.parametrize("ceiling", [2.0**24, 65504.0, 3.0, FLT_MAX])
def test_trap_03_growth_never_reaches_inf(ceiling):
    scaler = DynamicScaler(init_scale=2.0, max_scale=ceiling, growth_interval=1)
    scales = walk(scaler, [False] * 200)
    assert scales[-1] == ceiling
    assert all(math.isfinite(scale) for scale in scales)


def test_trap_03_growth_by_the_largest_factor_stops_at_the_ceiling():
    scaler = DynamicScaler(init_scale=2.0**100, max_scale=FLT_MAX, growth_factor=1e300, growth_interval=1)
    assert walk(scaler, [False] * 3)[1:] == [FLT_MAX] * 3


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 2000])
def test_trap_07_growth_comes_after_every_n_clean_steps(interval):
    scales = walk(DynamicScaler(init_scale=4.0, growth_interval=interval), [False] * (3 * interval))
    grown_at = [step for step in range(1, len(scales)) if scales[step] != scales[step - 1]]
    assert grown_at == [interval, 2 * interval, 3 * interval]


@each("place", range(7))
def test_trap_07_an_overflow_anywhere_in_the_window_starts_the_count_again(place):
    overflows = [False] * place + [True] + [False] * 7
    scales = walk(DynamicScaler(init_scale=64.0, growth_interval=7), overflows)
    assert scales[place + 1 : -1] == [32.0] * 7
    assert scales[-1] == 64.0


def test_trap_08_the_rule_is_megatrons_on_every_sequence_of_ten_steps():
    scaler = DynamicScaler(init_scale=8.0, hysteresis=2, growth_interval=3, min_scale=2.0, max_scale=16.0)
    for overflows in itertools.product([False, True], repeat=10):
        assert walk(scaler, overflows) == megatron(scaler, overflows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_scale": 0.5}, "scaler.init_scale=0.5 is outside scaler.min_scale=1"),
        ({"init_scale": 2.0**25}, "is outside scaler.min_scale=1 to scaler.max_scale=1.67772e+07"),
        ({"max_scale": 1e39}, "scaler.max_scale=1e+39 is above the largest FP32 number"),
        ({"min_scale": 1e-39}, "scaler.min_scale=1e-39 is below the smallest normal FP32 number"),
    ],
)
def test_trap_40_a_start_or_limits_out_of_range_are_refused(arguments, words):
    with pytest.raises(ConfigError, match="scaler") as refusal:
        DynamicScaler(**arguments)
    assert words in str(refusal.value)
    assert refusal.value.hint


def test_trap_40_all_problems_are_reported_together_nan_among_them():
    with pytest.raises(ConfigError) as refusal:
        DynamicScaler(init_scale=1.0, min_scale=1e-40, max_scale=1e-39 / 2)
    assert len(refusal.value.problems) == 2
    with pytest.raises(ConfigError, match="init_scale=nan"):
        DynamicScaler(init_scale=math.nan)
