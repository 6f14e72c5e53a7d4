from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import each

from mptrain.numerics.overflow_check import gradient_norms, judge
from mptrain.scaler import DynamicScaler
from mptrain.system.errors import ConfigError

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


def test_growth_2_backoff_a_quarter_interval_2_from_4_gives_4_8_2():
    scaler = DynamicScaler(init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    assert walk(scaler, [False, False, True])[1:] == [4.0, 8.0, 2.0]


def test_four_overflows_take_400_to_25():
    assert walk(DynamicScaler(init_scale=400.0), [True] * 4)[-1] == 25.0


def test_eight_clean_steps_at_period_2_take_2_to_32():
    scales = walk(DynamicScaler(init_scale=2.0, growth_interval=2), [False] * 8)
    assert scales == [2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0]  # eight steps are four windows of two


def test_trap_01_the_scale_never_falls_below_its_floor():
    scales = walk(DynamicScaler(init_scale=2.0**16, min_scale=0.5), [True] * 1000)
    assert scales[17:] == [0.5] * 984
    assert min(scales) == 0.5


def test_trap_01_the_lowest_floor_allowed_still_keeps_the_scale_above_zero():
    floor = torch.finfo(torch.float32).smallest_normal
    scales = walk(DynamicScaler(init_scale=1.0, min_scale=floor), [True] * 300)
    assert scales[-1] == floor > 0


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
def test_trap_07_growth_comes_after_exactly_n_clean_steps_and_again_after_n_more(interval):
    scales = walk(DynamicScaler(init_scale=4.0, growth_interval=interval), [False] * (3 * interval))
    grown_at = [step for step in range(1, len(scales)) if scales[step] != scales[step - 1]]
    assert grown_at == [interval, 2 * interval, 3 * interval]


@each("place", range(7))
def test_trap_07_an_overflow_anywhere_in_the_window_starts_the_count_again(place):
    overflows = [False] * place + [True] + [False] * 7
    scales = walk(DynamicScaler(init_scale=64.0, growth_interval=7), overflows)
    assert scales[place + 1 : -1] == [32.0] * 7
    assert scales[-1] == 64.0


@pytest.mark.parametrize("hysteresis", [2, 3, 5])
def test_trap_08_h_minus_1_overflows_change_nothing_and_the_hth_backs_off(hysteresis):
    scaler = DynamicScaler(init_scale=1024.0, hysteresis=hysteresis)
    assert walk(scaler, [True] * (hysteresis - 1)) == [1024.0] * hysteresis
    assert walk(scaler, [True] * hysteresis)[-1] == 512.0


def test_trap_08_clean_steps_below_a_window_do_not_refill_the_tolerance():
    scaler = DynamicScaler(init_scale=1024.0, hysteresis=2, growth_interval=4)
    assert walk(scaler, [True, False, False, False, True])[-1] == 512.0


def test_trap_08_once_spent_every_further_overflow_backs_off_until_the_scale_has_grown():
    scaler = DynamicScaler(init_scale=1024.0, hysteresis=2, growth_interval=2)
    assert walk(scaler, [True] * 4)[-1] == 128.0
    assert walk(scaler, [True, True, False, False, True])[2:] == [512.0, 512.0, 1024.0, 1024.0]
    assert walk(scaler, [True, True, False, False, True, True])[-1] == 512.0


@settings(max_examples=60, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=60),
    hysteresis=st.integers(1, 4),
    interval=st.integers(1, 5),
    backoff=st.sampled_from([0.5, 0.25]),
)
def test_trap_08_the_rule_is_megatrons_on_any_sequence(overflows, hysteresis, interval, backoff):
    scaler = DynamicScaler(
        init_scale=2.0**10, hysteresis=hysteresis, growth_interval=interval, backoff_factor=backoff, max_scale=2.0**14
    )
    assert walk(scaler, overflows) == megatron(scaler, overflows)


def test_trap_08_the_rule_is_megatrons_on_every_sequence_of_ten_steps():
    scaler = DynamicScaler(init_scale=8.0, hysteresis=2, growth_interval=3, min_scale=2.0, max_scale=16.0)
    for overflows in itertools.product([False, True], repeat=10):
        assert walk(scaler, overflows) == megatron(scaler, overflows)


@pytest.mark.parametrize(
    ("init", "growth", "backoff"),
    [(65536.0, 2.0, 0.5), (1000.0, 1.3, 0.7), (3.7, 2 ** (1 / 10), 0.8), (1e5, 10.0, 1 / 3)],
)
def test_the_scale_sequence_is_torchs_kernels_whatever_the_constants(init, growth, backoff):
    """torch multiplies in FP64 and rounds once; an FP32 product with a rounded factor drifts away from it."""
    scaler = DynamicScaler(
        init_scale=init,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=3,
        min_scale=1e-30,
        max_scale=1e30,
    )
    generator = torch.Generator().manual_seed(3)
    overflows = (torch.rand(400, generator=generator) < 0.3).tolist()
    scale, tracker, expected = torch.tensor(init), torch.zeros((), dtype=torch.int32), []
    for overflow in overflows:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, 3)
        expected.append(scale.item())
    assert walk(scaler, overflows)[1:] == expected


def test_a_scaler_is_a_value_and_leaves_the_state_it_was_given():
    scaler = DynamicScaler(growth_interval=1)
    assert scaler == DynamicScaler(growth_interval=1)
    state = scaler.initial(CPU)
    before = {name: value.clone() for name, value in state.items()}
    for verdict in (CLEAN, BAD):
        after = scaler.after(state, verdict)
        assert all(torch.equal(state[name], before[name]) for name in before)
        assert {name: (value.dtype, value.shape) for name, value in after.items()} == {
            name: (value.dtype, value.shape) for name, value in state.items()
        }


def test_trap_37_a_sequence_taken_up_from_any_saved_state_goes_on_as_if_nothing_had_happened():
    scaler = DynamicScaler(init_scale=64.0, growth_interval=3, hysteresis=2)
    overflows = [False, True, False, False, False, True, True, False, True, False, False, False, False, True]
    whole = walk(scaler, overflows)
    for cut in range(len(overflows)):
        state = scaler.initial(CPU)
        for overflow in overflows[:cut]:
            state = scaler.after(state, BAD if overflow else CLEAN)
        state = {name: torch.tensor(value.tolist(), dtype=value.dtype) for name, value in state.items()}
        for overflow, expected in zip(overflows[cut:], whole[cut + 1 :], strict=True):
            state = scaler.after(state, BAD if overflow else CLEAN)
            assert state["scale"].item() == expected


def saved_state(scale, clean, tolerance):
    return {
        "scale": torch.tensor([scale]),
        "growth_tracker": torch.tensor([clean], dtype=torch.int32),
        "hysteresis_tracker": torch.tensor([tolerance], dtype=torch.int32),
    }


def test_trap_38_a_state_that_fits_is_resumed_bit_for_bit_and_without_a_word():
    saved = saved_state(512.0, 6, 1)
    state, notes = DynamicScaler(growth_interval=7, hysteresis=2).resume(saved, CPU)
    assert notes == []
    assert all(torch.equal(state[key], saved[key]) and state[key].dtype == saved[key].dtype for key in saved)


@pytest.mark.parametrize(
    ("saved", "constants", "expected", "named"),
    [
        ((2.0**30, 0, 1), {}, (2.0**24, 0, 1), "scale continues at 1.67772e+07; it was 1.07374e+09"),
        ((0.25, 0, 1), {}, (1.0, 0, 1), "scale continues at 1; it was 0.25"),
        ((8.0, 900, 1), {"growth_interval": 10}, (8.0, 9, 1), "growth_tracker continues at 9; it was 900"),
        ((8.0, 0, 4), {"hysteresis": 2}, (8.0, 0, 2), "hysteresis_tracker continues at 2; it was 4"),
    ],
)
def test_trap_38_a_saved_value_beyond_the_new_constants_is_brought_within_them_and_said(
    saved, constants, expected, named
):
    scaler = DynamicScaler(**constants)
    state, (note,) = scaler.resume(saved_state(*saved), CPU)
    assert tuple(value.item() for value in state.values()) == expected
    assert named in note
    state = scaler.after(state, CLEAN)  # a count beyond the window would never meet it again
    assert state["growth_tracker"].item() < scaler.growth_interval


def test_trap_39_the_state_of_another_rule_starts_afresh_and_says_so():
    state, (note,) = DynamicScaler(init_scale=64.0).resume({"scale": torch.tensor([8.0])}, CPU)
    assert state["scale"].item() == 64.0
    assert "starts again at 64" in note


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_scale": 0.5}, "scaler.init_scale=0.5 is outside scaler.min_scale=1"),
        ({"init_scale": 2.0**25}, "is outside scaler.min_scale=1 to scaler.max_scale=1.67772e+07"),
        ({"max_scale": 1e39}, "scaler.max_scale=1e+39 is above the largest FP32 number"),
        ({"min_scale": 1e-39}, "scaler.min_scale=1e-39 is below the smallest normal FP32 number"),
    ],
)
def test_trap_40_a_start_outside_floor_and_ceiling_and_limits_outside_fp32_are_refused(arguments, words):
    with pytest.raises(ConfigError, match="scaler") as refusal:
        DynamicScaler(**arguments)
    assert words in str(refusal.value)
    assert refusal.value.hint


def test_trap_40_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as refusal:
        DynamicScaler(init_scale=1.0, min_scale=1e-40, max_scale=1e-39 / 2)
    assert len(refusal.value.problems) == 2


def test_trap_40_a_start_that_is_nan_is_refused():
    with pytest.raises(ConfigError, match="init_scale=nan"):
        DynamicScaler(init_scale=math.nan)


def test_the_rule_in_words_names_every_constant():
    words = DynamicScaler(hysteresis=3).describe()
    for part in ("from 2^16", "x2 every 2000", "x0.5 on overflow after 3 overflows", "1 to 2^24"):
        assert part in words
    assert "after" not in DynamicScaler().describe()
