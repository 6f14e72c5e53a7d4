"""Each preset against scales worked out by hand from its framework's source; two against that rule on plain numbers.

In a trace ``.`` is a clean step and ``x`` an overflow; the numbers are the scales of the steps that follow each.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.numerics.overflow_check import judge
from tests.loops import each
from tests.scaler.frameworks import deepspeed, fairseq
from tests.scaler.walking import ALL_STARTS, CPU, PRESETS, STARTS, VERDICTS, preset, steps, walk, with_window

FLT_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149  # the smallest positive FP32 number; half of it rounds to 0


# ---- common traces, by hand --------------------------------------------------------------------------------------
# All from 16. Windows are 3 as the framework is told: growth_interval 3, but 4 for NNabla and flax (told 3) below.

NONE, ALL, AT_GROWTH, AFTER_GROWTH, SOME, PAIR, APART = (
    ".........",
    "xxxxxx",
    "..x...",
    "...x....",
    ".x..x...x",
    "xx....x",
    "x.x",
)
#: Every overflow halves; every third clean step in a row doubles.
PLAIN = {
    NONE: [16, 16, 32, 32, 32, 64, 64, 64, 128],
    ALL: [8, 4, 2, 1, 0.5, 0.25],
    AT_GROWTH: [16, 16, 8, 8, 8, 16],
    AFTER_GROWTH: [16, 16, 32, 16, 16, 16, 32, 32],
    SOME: [16, 8, 8, 8, 4, 4, 4, 8, 4],
    PAIR: [8, 4, 4, 4, 8, 8, 4],
    APART: [8, 8, 4],
}
#: The first overflow since the last growth is free; the floor is 1.
FREE_UNTIL_GROWTH = {
    NONE: [16, 16, 32, 32, 32, 64, 64, 64, 128],
    ALL: [16, 8, 4, 2, 1, 1],
    AT_GROWTH: [16, 16, 16, 16, 16, 32],  # free, but it starts the window again
    AFTER_GROWTH: [16, 16, 32, 32, 32, 32, 64, 64],  # growth made the next one free
    SOME: [16, 16, 16, 16, 8, 8, 8, 16, 16],  # the second one, without growth between, halves; the third is free
    PAIR: [16, 8, 8, 8, 16, 16, 16],
    APART: [16, 16, 8],  # a clean step refills nothing
}
#: As above, but the first clean step after the start or an overflow is not counted: (c - 1) % 3 = 0 at c = 4, 7, 10.
DEEPSPEED = {
    NONE: [16, 16, 16, 32, 32, 32, 64, 64, 64],
    ALL: [16, 8, 4, 2, 1, 1],  # at 1 DeepSpeed raises
    AT_GROWTH: [16, 16, 16, 16, 16, 16],  # c = 3 at the end
    AFTER_GROWTH: [16, 16, 16, 16, 16, 16, 16, 32],  # the overflow comes at c = 4 and takes the growth away
    SOME: [16, 16, 16, 16, 8, 8, 8, 8, 4],  # c = 3 before the last: no growth, no hysteresis_reset, it halves
    PAIR: [16, 8, 8, 8, 8, 16, 16],
    APART: [16, 16, 8],
}
#: The plain rule's scales one step later.
MXNET = {
    NONE: [16, 16, 16, 32, 32, 32, 64, 64, 64],
    ALL: [16, 8, 4, 2, 1, 0.5],
    AT_GROWTH: [16, 16, 16, 8, 8, 8],
    AFTER_GROWTH: [16, 16, 16, 32, 16, 16, 16, 32],
    SOME: [16, 16, 8, 8, 8, 4, 4, 4, 8],
    PAIR: [16, 8, 4, 4, 4, 8, 8],
    APART: [16, 8, 8],
}
#: Told 3: the counter is above 3 at the 5th clean step in a row, for then it is 4; after growth it starts at 1: 9th.
NNABLA = {
    NONE: [16, 16, 16, 16, 32, 32, 32, 32, 64],
    ALL: [8, 4, 2, 1, 0.5, 0.25],
    AT_GROWTH: [16, 16, 8, 8, 8, 8],
    AFTER_GROWTH: [16, 16, 16, 8, 8, 8, 8, 8],
    SOME: [16, 8, 8, 8, 4, 4, 4, 4, 2],
    PAIR: [8, 4, 4, 4, 4, 4, 2],
    APART: [8, 8, 4],
    "x.....": [8, 8, 8, 8, 8, 16],
}
#: Told 3: grows at the step that finds 3 finite ones before it, the 4th, then the 8th.
FLAX = {
    NONE: [16, 16, 16, 32, 32, 32, 32, 64, 64],
    ALL: [8, 4, 2, 1, 0.5, 0.25],
    AT_GROWTH: [16, 16, 8, 8, 8, 8],
    AFTER_GROWTH: [16, 16, 16, 8, 8, 8, 8, 16],  # the overflow comes when growth is due
    SOME: [16, 8, 8, 8, 4, 4, 4, 4, 2],
    PAIR: [8, 4, 4, 4, 4, 8, 4],
    APART: [8, 8, 4],
}
# 0.8 in FP32 is 13421773 / 2^24. Twice: 13421773 * 13421773 / 2^24 = 10737418.56, so 10737419; with an exact 0.8 it
# would have been 10737418. Three times: 10737419 * 13421773 / 2^24 = 8589935.33, so 8589935.
ONCE, TWICE, THRICE = 16 * 13421773 / 2**24, 16 * 10737419 / 2**24, 16 * 8589935 / 2**24
#: Every second overflow in a row multiplies by 0.8; a clean step begins another row.
PADDLE = {
    NONE: [16, 16, 32, 32, 32, 64, 64, 64, 128],
    ALL: [16, ONCE, ONCE, TWICE, TWICE, THRICE],
    AT_GROWTH: [16, 16, 16, 16, 16, 32],
    AFTER_GROWTH: [16, 16, 32, 32, 32, 32, 64, 64],
    SOME: [16, 16, 16, 16, 16, 16, 16, 32, 32],  # no two in a row
    PAIR: [16, ONCE, ONCE, ONCE, 2 * ONCE, 2 * ONCE, 2 * ONCE],
    APART: [16, 16, 16],
    "xxx.xx": [16, ONCE, ONCE, ONCE, ONCE, TWICE],  # the third began a row that the clean step broke
}
TABLES = {
    "torch": PLAIN,
    "apex": PLAIN,
    "deepspeed": DEEPSPEED,
    "megatron": FREE_UNTIL_GROWTH,
    "fairseq": PLAIN,  # with its own tolerance, 0
    "colossalai": FREE_UNTIL_GROWTH,
    "keras": PLAIN,
    "mxnet": MXNET,
    "nnabla": NNABLA,
    "flax": FLAX,
    "paddle": PADDLE,
}


@each(("name", "trace"), [(name, trace) for name, table in TABLES.items() for trace in table])
def test_the_scales_are_those_worked_out_by_hand(name, trace):
    scaler = preset(name, init_scale=16.0, growth_interval=3 + (name in ("nnabla", "flax")))
    assert walk(scaler, steps(trace)) == TABLES[name][trace]


@each(
    ("tolerance", "trace", "scales"),
    [
        (0.25, "...x", [16, 16, 32, 16]),  # grown at the 3rd; 1 of 1 since then
        (0.25, "..x.x", [16, 16, 8, 8, 4]),  # 1 of 3; 1 of 2 since then
        (0.5, "..x.x", [16, 16, 16, 16, 16]),  # 1 of 3, 2 of 5
        (0.5, "..x.xx", [16, 16, 16, 16, 16, 8]),  # 3 of 6 is not below a half
        (0.5, "xx", [8, 4]),  # 1 of 1, and 1 of 1 again
        # 1 of 3 is let pass; growth at the 6th forgets the steps, not the overflow: 2 of 3 at the 9th.
        (0.5, "..x.....x", [16, 16, 16, 16, 16, 32, 32, 32, 16]),
        (1.0, ".xxx", [16, 16, 16, 16]),  # the first step was clean: never all of them
        (1.0, "xxx", [8, 4, 2]),
    ],
)
def test_fairseqs_scale_falls_at_its_tolerance_by_hand(tolerance, trace, scales):
    scaler = preset("fairseq", init_scale=16.0, growth_interval=3, tolerance=tolerance)
    assert walk(scaler, steps(trace)) == scales


@pytest.mark.parametrize(
    ("trace", "scales"),
    [
        ("x.x.x", [16, 16, 16, 16, 16]),  # each clean step makes the next overflow free
        ("xxx.xx", [16, 8, 4, 4, 4, 2]),  # but of a row only the first
    ],
)
def test_deepspeeds_consecutive_hysteresis_is_a_refill_on_every_clean_step(trace, scales):
    scaler = preset("deepspeed", init_scale=16.0, growth_interval=3, hysteresis_reset="clean")
    assert walk(scaler, steps(trace)) == scales


# ---- the framework's own window, floor and ceiling ---------------------------------------------------------------

#: Clean steps until the first growth, and (fairseq's window is long) until the second.
WINDOWS = {
    "torch": (2000, 4000),
    "apex": (2000, 4000),
    "deepspeed": (1001, 2001),  # the first step is not counted
    "megatron": (1000, 2000),
    "fairseq": (16384,),
    "colossalai": (1000, 2000),
    "keras": (2000, 4000),
    "mxnet": (2001, 4001),  # one step late
    "nnabla": (2002, 4003),  # N + 2, then N + 1
    "flax": (2001, 4002),  # one more than it is told, each time
    "paddle": (1000, 2000),
}


@each("name", PRESETS)
def test_trap_07_the_scale_doubles_after_its_frameworks_window(name):
    grown_at = WINDOWS[name]
    scales = [STARTS[name], *walk(preset(name), [False] * (grown_at[-1] + 1))]
    changes = [step for step in range(1, len(scales)) if scales[step] != scales[step - 1]]
    assert changes == list(grown_at)
    assert scales[-1] == STARTS[name] * 2 ** len(grown_at)


#: Overflows in a row, scale after them, scale one overflow before. The last one stays for ever.
FLOORS = {
    "torch": (166, 0.0, SMALLEST),  # 2^16 halved 165 times is 2^-149
    "apex": (166, 0.0, SMALLEST),
    "deepspeed": (17, 1.0, 2.0),  # one free, then 16 halvings
    "megatron": (33, 1.0, 2.0),  # one free, then 32
    "fairseq": (20, 2.0**-13, 2.0**-12),  # 2^-14 would be 0.000061, not above 0.0001
    "colossalai": (17, 1.0, 2.0),
    "keras": (165, 0.0, SMALLEST),
    "mxnet": (167, 0.0, SMALLEST),  # one step late
    "nnabla": (153, 0.0, SMALLEST),
    "flax": (142, 2.0**-126, 2.0**-125),
    "paddle": (94, 1.0, None),  # 32768 * 0.8^46 = 1.14, and every second one counts
}


@each("name", PRESETS)
def test_trap_01_overflows_take_the_scale_to_its_frameworks_floor(name):
    count, floor, before = FLOORS[name]
    scales = walk(preset(name), [True] * (count + 40))
    assert set(scales[count - 1 :]) == {floor}
    assert scales[count - 2] == before if before is not None else 1.14 < scales[count - 2] < 1.15


@pytest.mark.parametrize("name", ["torch", "apex", "keras", "nnabla", "mxnet"])
def test_a_scale_of_0_stays_0_as_in_torch(name):
    scaler = preset(name, growth_interval=1)
    state = {**scaler.initial(CPU), "scale": torch.zeros(1)}
    state |= {"decided": torch.zeros(1)} if "decided" in state else {}
    for overflow in (False, False, True, False, False):
        state = scaler.after(state, VERDICTS[overflow])
        assert state["scale"].item() == 0.0


TOP = 2.0**127  # the largest power of two in FP32
#: First scale, trace, scales; the window is the shortest there is, one clean step.
CEILINGS = {
    "torch": (TOP, "...x.", [TOP, TOP, TOP, TOP / 2, TOP]),
    "apex": (2.0**23, "...x.", [2.0**24, 2.0**24, 2.0**24, 2.0**23, 2.0**24]),
    "deepspeed": (TOP, "...", [TOP, TOP, TOP]),
    "megatron": (TOP, "...", [TOP, TOP, TOP]),
    "fairseq": (TOP, "...x.", [TOP, TOP, TOP, TOP / 2, TOP]),
    "colossalai": (2.0**31, "...", [2.0**32, 2.0**32, 2.0**32]),
    "keras": (TOP, "...x.", [TOP, TOP, TOP, TOP / 2, TOP]),
    "mxnet": (2.0**23, "...x..", [2.0**23, 2.0**24, 2.0**24, 2.0**24, 2.0**23, 2.0**24]),
    "nnabla": (TOP, "...x..", [TOP, TOP, TOP, TOP / 2, TOP / 2, TOP]),
    "flax": (TOP, "...x.", [FLT_MAX, FLT_MAX, FLT_MAX, FLT_MAX / 2, FLT_MAX]),  # limits, where torch leaves out
    "paddle": (TOP, "...", [TOP, TOP, TOP]),
}


@each("name", PRESETS)
def test_trap_03_no_preset_grows_beyond_its_ceiling_or_to_inf(name):
    start, trace, scales = CEILINGS[name]
    assert walk(preset(name, init_scale=start, growth_interval=1), steps(trace)) == scales


# ---- oracles -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=50),
    window=st.integers(1, 6),
    tolerance=st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25, 1 / 3, 0.5, 1.0]),
)
def test_fairseqs_tolerance_is_its_own_on_any_trace(overflows, window, tolerance):
    scaler = replace(preset("fairseq"), init_scale=2.0**12, growth_interval=window, tolerance=tolerance)
    assert walk(scaler, overflows) == fairseq(overflows, 2.0**12, window, tolerance=tolerance)


@settings(max_examples=40, deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=50), window=st.integers(1, 5), shift=st.integers(1, 4))
@pytest.mark.parametrize("consecutive", [False, True])
def test_deepspeeds_hysteresis_is_its_own_on_any_trace(consecutive, overflows, window, shift):
    scaler = replace(
        preset("deepspeed"),
        init_scale=2.0**12,
        growth_interval=window,
        hysteresis=shift,
        hysteresis_reset="clean" if consecutive else "growth",
    )
    assert walk(scaler, overflows) == deepspeed(overflows, 2.0**12, window, consecutive=consecutive, shift=shift)


@each("start", [1000.0, 2.0**16, 1.9 * 2.0**126, 3e-38, 3e-45])
@each(("growth", "backoff"), [(2.0, 0.5), (1.3, 0.7)])
def test_torchs_preset_is_torchs_kernel_through_the_whole_of_fp32(start, growth, backoff):
    """With constants that are no powers of two as well, up to the largest FP32 number and down to 0."""
    state = {**preset("torch").initial(CPU), "scale": torch.tensor([start])}
    scaler = preset("torch", growth_interval=2, growth_factor=growth, backoff_factor=backoff)
    generator = torch.Generator().manual_seed(7)
    held, tracker = torch.tensor(start), torch.zeros((), dtype=torch.int32)
    for share in (0.1, 0.5, 0.9):
        for overflow in (torch.rand(300, generator=generator) < share).tolist():
            torch._amp_update_scale_(held, tracker, torch.tensor(float(overflow)), growth, backoff, 2)
            state = scaler.after(state, VERDICTS[overflow])
            assert state["scale"].item() == held.item()


def test_torchs_preset_has_the_defaults_of_gradscaler():
    theirs, ours = torch.amp.GradScaler("cpu"), preset("torch")
    assert (ours.init_scale, ours.growth_factor) == (theirs.get_scale(), theirs.get_growth_factor())
    assert (ours.backoff_factor, ours.growth_interval) == (theirs.get_backoff_factor(), theirs.get_growth_interval())


@each("name", list(ALL_STARTS))
def test_an_applied_overflow_lowers_the_scale_as_a_skipped_one_does(name):
    overflows = steps("..x..xxx....x.xx")
    skipping, applying = with_window(name, 3), with_window(name, 3, on_overflow="apply")
    state, scales = applying.initial(CPU), []
    for overflow in overflows:
        norm = torch.tensor([math.inf if overflow else 1.0], dtype=torch.float64)
        measured = torch.tensor([0.25], dtype=torch.float64)
        applied = judge(norm, torch.ones(1), skip_on_overflow=False, measured=measured)
        state = applying.after(state, applied)
        scales.append(state["scale"].item())
    assert scales == walk(skipping, overflows)
