from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.numerics import exponents
from mptrain.numerics.exponents import (
    ExponentTails,
    LargestGradient,
    gradients_of,
    interpolate,
    largest_of,
    merged,
    nonzero,
    sample_at,
    ties_below,
    unscaled,
)
from tests.histograms_by_hand import counted, look
from tests.loops import each

SCALES = range(0, 25, 3)


def spread(count=4000, seed=0):
    """Values over FP16's whole range and beyond it, as FP32 numbers; no power of two, which a tie could turn."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 2 ** (torch.rand(count, generator=generator) * 60 - 45)
    return torch.where(torch.rand(count, generator=generator) < 0.2, 0.0, magnitudes)


@each("exponent", SCALES)
def test_shares_are_those_of_a_tensor_that_is_scaled_and_rounded_to_fp16(exponent):
    values = spread()
    counts = counted(values.tolist())
    half = (values * 2.0**exponent).half()
    nonzero, finite = values != 0, half.isfinite()
    assert exponents.lost_share(counts, exponent) == pytest.approx(((half == 0) & nonzero).sum().item() / nonzero.sum().item())  # fmt: skip
    assert exponents.zero_share(counts, exponent) == pytest.approx((half == 0).float().mean().item())
    subnormal = (half.abs() < 2.0**-14) & (values.abs() * 2.0**exponent >= 2.0**-24)
    rounded_up = (values.abs() * 2.0**exponent < 2.0**-14) & (half.abs() == 2.0**-14)  # becomes normal by rounding
    expected = (subnormal | rounded_up).sum().item() / nonzero.sum().item()
    assert exponents.subnormal_share(counts, exponent) == pytest.approx(expected)
    assert (counts.largest * 2.0**exponent >= exponents.INFINITE_FROM) == bool((~finite).any())


def test_a_loss_begins_below_two_to_the_minus_25():
    assert exponents.lost_share(counted([2.0**-25 * 0.999])) == 1
    assert exponents.lost_share(counted([2.0**-25 * 1.001])) == 0
    assert exponents.below_tiniest_share(counted([2.0**-24, 2.0**-24 * 0.999])) == 0.5


def test_headroom_is_counted_in_doublings():
    assert exponents.headroom(65504.0) == 0
    assert exponents.headroom(65504.0 / 8) == 3
    assert exponents.headroom(65504.0 * 2) == -1
    assert exponents.headroom(0.0) == math.inf


def test_nothing_has_no_shares():
    for values in ([], [0.0, 0.0], [math.inf, math.nan]):
        counts = counted(values)
        assert exponents.nonzero(counts) == 0
        assert exponents.total(counts) == len(values)
        assert exponents.lost_share(counts) == exponents.subnormal_share(counts) == 0
        tails = ExponentTails(counts)
        assert tails.share_below(-25) == tails.magnitude_below(-25) == 0
    assert exponents.zero_share(counted([])) == 0
    assert exponents.zero_share(counted([0.0])) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(width=32, min_value=2.0**-126, max_value=2.0**127), max_size=12), max_size=4))
def test_merged_histograms_are_that_of_everything(lists):
    together = merged(counted(values) for values in lists)
    expected = counted([value for values in lists for value in values])
    if lists:
        assert together == expected
    else:
        assert (together.counts, together.dtype) == ((), "mixed")


def test_unscaling_shifts_and_keeps_the_counts():
    values = [0.0, 3.0, 1e-3, math.inf]
    assert unscaled(counted([value * 1024 for value in values]), 1024.0) == counted(values)
    assert merged([counted([1.0], "float16"), counted([1.0])]).dtype == "mixed"
    odd = unscaled(counted([1000.0]), 1000.0)
    assert (odd.lowest, odd.largest) == (-1, 1.0)  # 2^9 / 2^10, the power of two next to 1000
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            unscaled(counted([1.0]), scale)


def test_tails_agree_with_the_shares_and_with_the_values_themselves():
    values = spread(20_000, seed=1)
    counts, tails = counted(values.tolist()), ExponentTails(counted(values.tolist()))
    for exponent in SCALES:
        below = -25 - exponent
        assert tails.share_below(below) == exponents.lost_share(counts, exponent)
        assert tails.zeros_below(below) == pytest.approx(exponents.zero_share(counts, exponent))
        small = values.double()[values < 2.0**below].sum() / values.double().sum()
        assert tails.magnitude_below(below) == pytest.approx(small.item(), rel=0.08, abs=1e-12)


@each("halvings", range(1, 8))
def test_half_numbers_that_a_smaller_scale_turns_into_ties_count_as_lost(halvings):
    """All of FP16's subnormal numbers and some normal ones, each as often as any other of its exponent."""
    values = torch.arange(1, 2**11).double() * 2.0**-24
    counts = counted(values.tolist(), "float16")
    moved = ties_below(counts)
    assert nonzero(moved) == nonzero(counts)
    assert (moved.largest, moved.zeros, moved.dtype) == (counts.largest, counts.zeros, "float16")
    really = ((values * 2.0**-halvings).half() == 0).double().mean().item()
    assert exponents.lost_share(moved, -halvings) == pytest.approx(really)
    assert exponents.lost_share(counts, -halvings) < really
    assert exponents.lost_share(moved) == 0
    for values, lowest in (([0.0, math.inf], 0), ([2.0**-24], -25), ([1.5], 0)):
        assert ties_below(counted(values, "float16")) == replace(counted(values, "float16"), lowest=lowest)


def test_in_a_step_of_half_those_count_that_were_half_numbers_on_their_way():
    half, through, wide = counted([1.0], "float16"), counted([2.0, 2.0**-24]), counted([3.0, 2.0**-25])
    found = gradients_of(look(1, {"conv": half, "norm": through, "loss": wide}, {"w": through, "norm.w": wide}))
    assert (set(found.modules), set(found.parameters), found.half) == ({"conv", "norm"}, {"w"}, True)
    assert set(found.named) == {"conv", "norm", "w"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_step_of_a_wider_format_all_count(dtype):
    wide = counted([3.0, 2.0**-40], dtype)
    found = gradients_of(look(1, {"conv": wide}, {"w": wide}))
    assert (set(found.named), found.half) == ({"conv", "w"}, False)


def test_the_largest_is_without_the_scale_and_says_whether_it_was_kept_in_half():
    half, through = counted([16.0], "float16"), counted([64.0])
    assert largest_of(gradients_of(look(1, {"a": half}, {"w": through})), 8.0) == LargestGradient(8.0, "w", 2.0)
    assert largest_of(gradients_of(look(1, {"a": half})), 8.0) == LargestGradient(2.0, "a", 2.0)
    assert largest_of(gradients_of(look(1, {}, {"w": through})), 8.0) == LargestGradient(8.0, "w", 0.0)
    assert largest_of(gradients_of(look(1)), 8.0) == LargestGradient(0.0, "", 0.0)


def test_sums_beyond_fp16_in_a_clean_half_step_count_as_its_largest_number():
    half, total = counted([16.0], "float16"), counted([90000.0])
    assert largest_of(gradients_of(look(1, {"a": half}, {"w": total})), 2.0).value == 65504.0 / 2
    assert largest_of(gradients_of(look(1, {}, {"w": total})), 2.0).value == 45000.0  # FP32 throughout


def test_between_two_looks_the_norm_and_the_ratio_to_it_tell():
    one, other = sample_at(1, 1.0, 1.0), sample_at(9, 4.0, 16.0)
    assert interpolate(one, other, 5, 2000.0) == pytest.approx(1000.0)
    assert interpolate(one, one, 5, 3.0) == pytest.approx(3.0)
    assert interpolate(one, other, 5, math.inf) == pytest.approx(2.0)  # after an overflow: of the largest themselves


@pytest.mark.parametrize(
    ("largest", "norm"), [(0.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)]
)
def test_a_look_without_gradient_or_norm_tells_nothing_of_others(largest, norm):
    assert sample_at(1, largest, norm) is None
