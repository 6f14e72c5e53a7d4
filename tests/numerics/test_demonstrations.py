"""Every number that recipes take from `mptrain.numerics.demonstrations`, against bits computed another way."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from mptrain.config.targets import PACKAGES, Target
from mptrain.errors import ConfigError
from mptrain.numerics.demonstrations import (
    batch_norm_emulation,
    cross_entropy_of_half_logits,
    sequential_sum,
    update_lost,
)


def as_half(value: float) -> float:
    """IEEE 754 binary16 by Python's own rounding, without torch; beyond its range, inf."""
    try:
        return struct.unpack("<e", struct.pack("<e", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def test_adding_numbers_below_one_in_fp16_sticks_at_2048():
    found = sequential_sum("float16", 10_000)
    assert found["value"] == 2048
    assert found["truth"] > 4900
    assert found["error"] == pytest.approx(1 - 2048 / found["truth"])


def test_more_terms_do_not_move_the_fp16_sum_and_move_the_fp32_sum():
    assert sequential_sum("float16", 6_000)["value"] == sequential_sum("float16", 12_000)["value"]
    assert sequential_sum("float32", 12_000)["value"] > 1.9 * sequential_sum("float32", 6_000)["value"]


def test_the_fp16_sum_is_that_of_an_independent_binary16():
    numbers = torch.rand(5_000, generator=torch.Generator().manual_seed(3)).half().tolist()
    total = 0.0
    for number in numbers:
        total = as_half(total + number)
    assert sequential_sum("float16", 5_000, seed=3)["value"] == total == 2048


def test_the_fp32_sum_is_the_true_one():
    found = sequential_sum("float32", 10_000)
    assert found["value"] == pytest.approx(found["truth"], rel=1e-6)


def test_bf16_sticks_earlier_because_it_has_fewer_bits():
    assert sequential_sum("bfloat16", 10_000)["value"] == 256


def test_the_sum_of_8192_losses_leaves_fp16_and_their_mean_does_not():
    half = cross_entropy_of_half_logits("float16", 8192, 4096)
    assert half["sum"] == math.inf
    assert half["mean"] == math.inf
    assert half["truth"] == pytest.approx(math.log(4096), abs=0.02)
    assert half["truth"] * 8192 > 65504


def test_fp32_has_the_true_mean():
    single = cross_entropy_of_half_logits("float32", 8192, 4096)
    assert single["mean"] == pytest.approx(single["truth"], abs=1e-5)
    assert single["sum"] == pytest.approx(8192 * single["truth"], rel=1e-6)


def test_fewer_losses_stay_within_fp16():
    few = cross_entropy_of_half_logits("float16", 1000, 64)
    assert few["sum"] == pytest.approx(1000 * few["truth"], rel=0.01)


def test_the_true_mean_is_that_of_pure_python():
    found = cross_entropy_of_half_logits("float32", 3, 5, seed=2)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(3, 5, generator=generator) * 0.1).half().tolist()
    targets = torch.randint(5, (3,), generator=generator).tolist()
    losses = [
        math.log(math.fsum(map(math.exp, row))) - row[target] for row, target in zip(logits, targets, strict=True)
    ]
    assert found["truth"] == pytest.approx(math.fsum(losses) / 3, abs=1e-12)


def test_a_variance_from_fp16_sums_is_nan_and_torchs_own_is_right():
    found = batch_norm_emulation(98_304)
    assert found["naive_sum"] == math.inf
    assert found["naive_sum_of_squares"] == math.inf
    assert math.isnan(found["naive_variance"])
    assert found["naive_is_finite"] == 0
    assert found["torch_variance"] == pytest.approx(found["truth"], rel=1e-4)
    assert found["truth"] == pytest.approx(1, abs=0.02)


def test_the_emulation_is_right_where_nothing_overflows():
    found = batch_norm_emulation(1_000, mean=0.0)
    assert found["naive_is_finite"] == 1
    assert found["naive_variance"] == pytest.approx(found["truth"], rel=0.01)


def test_an_update_of_2_to_the_minus_11_is_lost_in_fp16_and_kept_in_fp32():
    found = update_lost()
    assert found["half"] == as_half(1 + 2.0**-11) == 1
    assert found["single"] == 1 + 2.0**-11


def test_an_update_of_2_to_the_minus_10_is_kept():
    assert update_lost(exponent=-10)["half"] == 1 + 2.0**-10


def test_the_smallest_fp16_number_survives_and_half_of_it_does_not():
    found = update_lost()
    assert found["smallest"] == as_half(2.0**-24) == 2.0**-24
    assert found["half_of_smallest"] == as_half(2.0**-25) == 0


@pytest.mark.parametrize("demonstration", [sequential_sum, batch_norm_emulation, update_lost])
def test_a_demonstration_gives_the_same_bits_each_time(demonstration):
    assert repr(demonstration()) == repr(demonstration())


def test_arguments_out_of_range_are_refused_before_anything_is_computed():
    wrong = {"dtype": "float8", "terms": 0, "term": 3}
    target = Target("mptrain.numerics.demonstrations.sequential_sum", wrong, PACKAGES["arithmetic"])
    with pytest.raises(ConfigError) as caught:
        target.check("arithmetic.sum")
    assert [problem.what.partition(":")[0] for problem in caught.value.problems] == [
        "arithmetic.sum.dtype=float8",
        "arithmetic.sum.terms=0",
        "unknown key 'arithmetic.sum.term'",
    ]
