from __future__ import annotations

import math

import pytest
import torch

from mptrain.numerics.formats import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    FORMATS,
)
from mptrain.system.words import is_power_of_two, scale_in_words
from tests.loops import each


@pytest.mark.parametrize("fmt", [*FORMATS.values(), FLOAT8_E4M3, FLOAT8_E5M2], ids=lambda fmt: fmt.name)
def test_every_derived_property_is_torchs(fmt):
    info = torch.finfo(getattr(torch, fmt.name))
    assert fmt.max == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.epsilon == info.eps
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits
    assert fmt.max_exponent == math.floor(math.log2(info.max))


def test_the_formats_of_the_paper_by_hand():
    assert (FLOAT16.max, FLOAT16.smallest_normal, FLOAT16.smallest_subnormal) == (65504.0, 2.0**-14, 2.0**-24)
    assert (FLOAT16.bias, BFLOAT16.bias, FLOAT32.bias) == (15, 127, 127)
    assert BFLOAT16.epsilon == 2.0**-7
    assert FLOAT32.smallest_subnormal == 2.0**-149


def test_the_formats_below_16_bits_by_hand():
    assert (FLOAT8_E4M3.max, FLOAT8_E4M3.smallest_normal, FLOAT8_E4M3.smallest_subnormal) == (448.0, 2.0**-6, 2.0**-9)
    assert (FLOAT8_E5M2.max, FLOAT8_E5M2.smallest_normal, FLOAT8_E5M2.smallest_subnormal) == (
        57344.0,
        2.0**-14,
        2.0**-16,
    )
    assert (FLOAT4_E2M1.max, FLOAT4_E2M1.smallest_normal, FLOAT4_E2M1.smallest_subnormal) == (6.0, 1.0, 0.5)
    assert [fmt.max_exponent for fmt in (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT4_E2M1)] == [8, 15, 2]
    assert [fmt.bits for fmt in (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT4_E2M1)] == [8, 8, 4]


def test_trap_10_the_edges_of_half_precision():
    half = lambda x: torch.tensor(x).half().item()  # noqa: E731
    assert half(2.0**-24) == 2.0**-24
    assert half(2.0**-25) == 0.0
    assert half(2.0**-25 + 2.0**-48) == 2.0**-24
    assert half(65519.0) == 65504.0
    assert half(65520.0) == math.inf
    assert half(-65520.0) == -math.inf


def test_powers_of_two_are_told_from_all_other_numbers():
    for exponent in range(-149, 128):
        found = [is_power_of_two(factor * 2.0**exponent) for factor in (1.0, -1.0, 1.5)]
        assert found == [True, False, False], exponent
    for value in (0.0, math.inf, -math.inf, math.nan, 1000.0, 3.0, 65504.0):
        assert not is_power_of_two(value), value


@each("exponent", range(0, 127, 6))
def test_trap_06_the_reciprocal_of_a_scale_is_exact_and_undoes_it(exponent):
    scale = torch.tensor([2.0**exponent])
    assert scale.reciprocal().item() * 2.0**exponent == 1.0
    gradient = torch.tensor([1.2345678, -3.1415927]) * 2.0**-exponent
    scaled = gradient * scale
    normal = gradient.abs() >= FLOAT32.smallest_normal
    assert torch.equal((scaled / scale)[normal], gradient[normal])
    assert torch.equal(scaled / scale, scaled * scale.reciprocal())


@each(
    ("scale", "words"),
    [(1.0, "1"), (8.0, "8"), (512.0, "512"), (1024.0, "2^10"), (65536.0, "2^16"), (1000.0, "1000"), (0.5, "0.5")],
)
def test_large_powers_of_two_are_written_as_such(scale, words):
    assert scale_in_words(scale) == words
