from __future__ import annotations

import math

import pytest
import torch
from loops import each

from mptrain.numerics.formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, is_power_of_two, scale_in_words


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_every_derived_property_is_torchs(fmt):
    info = torch.finfo(getattr(torch, fmt.name))
    assert fmt.max == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.epsilon == info.eps
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == info.bits


def test_the_formats_of_the_paper_by_hand():
    assert (FLOAT16.max, FLOAT16.smallest_normal, FLOAT16.smallest_subnormal) == (65504.0, 2.0**-14, 2.0**-24)
    assert (FLOAT16.bias, BFLOAT16.bias, FLOAT32.bias) == (15, 127, 127)
    assert BFLOAT16.epsilon == 2.0**-7
    assert FLOAT32.smallest_subnormal == 2.0**-149


def all_half_values() -> torch.Tensor:
    """The 65,536 bit patterns of FP16, as FP64 numbers."""
    bits = torch.arange(2**16, dtype=torch.int32)
    return torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16).view(torch.float16).double()


def test_the_derived_range_is_that_of_all_65536_half_numbers():
    values = all_half_values()
    finite = values[values.isfinite()]
    assert len(finite) == 2 * 31 * 2**10
    assert finite.max() == FLOAT16.max
    positive = finite[finite > 0]
    assert positive.min() == FLOAT16.smallest_subnormal
    normal = positive[positive >= FLOAT16.smallest_normal]
    subnormal = positive[positive < FLOAT16.smallest_normal]
    assert len(normal) == 30 * 2**10
    assert len(subnormal) == 2**10 - 1
    steps = subnormal.sort().values.diff()
    assert torch.equal(steps, torch.full_like(steps, FLOAT16.smallest_subnormal))


def test_trap_10_a_number_between_two_half_numbers_goes_to_the_nearer_and_a_tie_to_the_even_one():
    values = all_half_values()
    numbers = values[values.isfinite() & (values >= 0)].unique().sort().values
    even = (numbers.half().view(torch.int16) % 2) == 0
    lower, upper, lower_is_even = numbers[:-1], numbers[1:], even[:-1]
    middle = (lower + upper) / 2
    for sign in (1.0, -1.0):
        assert torch.equal((sign * middle).half().double(), sign * torch.where(lower_is_even, lower, upper))
        below, above = middle - (upper - lower) / 8, middle + (upper - lower) / 8
        assert torch.equal((sign * below).half().double(), sign * lower)
        assert torch.equal((sign * above).half().double(), sign * upper)


def test_trap_10_the_edges_of_half_precision():
    half = lambda x: torch.tensor(x).half().item()  # noqa: E731
    assert half(2.0**-24) == 2.0**-24
    assert half(2.0**-25) == 0.0
    assert half(2.0**-25 + 2.0**-48) == 2.0**-24
    assert half(65519.0) == 65504.0
    assert half(65520.0) == math.inf
    assert half(-65520.0) == -math.inf


def test_trap_10_the_edges_are_those_that_the_format_derives():
    below_half_of_the_smallest = torch.tensor([FLOAT16.smallest_subnormal / 2])
    last_before_inf = torch.tensor([FLOAT16.max + 2.0**FLOAT16.bias * FLOAT16.epsilon / 2])
    assert below_half_of_the_smallest.half().item() == 0.0
    assert last_before_inf.item() == 65520.0
    assert last_before_inf.half().isinf().item()
    assert torch.nextafter(last_before_inf, torch.zeros(1)).half().item() == FLOAT16.max


def test_trap_29_half_precision_loses_what_a_master_copy_keeps():
    one, big = torch.tensor(1.0), torch.tensor(2048.0)
    assert (one + 2.0**-11).half() == 1.0
    assert (big + 1.0).half() == 2048.0
    assert one.half() + torch.tensor(2.0**-11).half() == 1.0
    assert one + 2.0**-11 > 1.0
    assert big + 1.0 == 2049.0


@each("exponent", range(-149, 128))
def test_every_fp32_power_of_two_is_one(exponent):
    assert is_power_of_two(2.0**exponent)
    assert not is_power_of_two(-(2.0**exponent))
    assert not is_power_of_two(1.5 * 2.0**exponent)


@each("value", [0.0, -1.0, math.inf, -math.inf, math.nan, 1000.0, 3.0, 65504.0])
def test_these_are_no_powers_of_two(value):
    assert not is_power_of_two(value)


@each("exponent", range(127))
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
