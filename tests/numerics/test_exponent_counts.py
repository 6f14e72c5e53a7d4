from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mptrain.numerics.tensors import PLACES, count_exponents, read_counts
from tests.histograms_by_hand import counted


def histogram(tensor):
    return read_counts(count_exponents(tensor).tolist(), tensor.dtype)


def all_half_patterns():
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def some_of_every_exponent(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-149, 128).repeat_interleave(5).double()
    values = (1 + torch.rand(len(exponents), generator=generator).double()) * 2**exponents
    return (values * torch.where(torch.rand(len(values), generator=generator) < 0.5, -1, 1)).to(dtype)


def test_all_65536_half_numbers_are_counted_as_they_are():
    values = all_half_patterns()
    found = histogram(values)
    assert found == counted(values.tolist(), "float16")
    assert (found.zeros, found.inf, found.nan, found.largest, found.lowest) == (2, 2, 2 * 1023, 65504.0, -24)
    assert found.counts[10:] == (2048,) * 30


def test_bfloat16_keeps_the_range_of_fp32():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    whole = values[(values.float().abs() >= 2.0**-126) | (values == 0) | ~values.isfinite()]
    assert histogram(whole) == counted(whole.tolist(), "bfloat16")


def test_every_exponent_of_fp32_has_its_place_and_subnormal_ones_share_one():
    values = some_of_every_exponent()
    normal = values[values.abs() >= 2.0**-126]
    assert histogram(normal) == counted(normal.tolist())
    below = values[values.abs() < 2.0**-126]
    found = histogram(below)
    assert (found.lowest, found.counts, found.zeros) == (-127, (len(below),), 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40))
def test_any_list_of_single_numbers_is_counted_as_by_hand(values):
    values = [value for value in values if not 0 < abs(value) < 2.0**-126]
    assert histogram(torch.tensor(values, dtype=torch.float32)) == counted(values)
    assert histogram(torch.tensor(values, dtype=torch.float64)) == replace(counted(values), dtype="float64")


@pytest.mark.parametrize("values", [torch.zeros(0), torch.zeros(3), torch.full((2,), math.nan)])
def test_a_tensor_without_a_finite_value_has_no_bins(values):
    found = histogram(values)
    assert (found.counts, found.lowest, found.largest) == ((), 0, 0.0)
    assert found.zeros + found.nan == len(values)


def test_the_layout_in_memory_does_not_matter():
    values = torch.randn(2, 3, 4, 5).half()
    plain = histogram(values)
    assert histogram(values.to(memory_format=torch.channels_last)) == plain
    assert histogram(values.permute(3, 1, 0, 2)) == plain
    assert histogram(values[:, :, ::2]) == histogram(values[:, :, ::2].contiguous())
    assert histogram(values[0, 0, 0, 0]) == counted([values[0, 0, 0, 0].item()], "float16")


def test_a_tensor_is_counted_in_pieces_as_in_one(monkeypatch):
    values = torch.randn(10, 5, generator=torch.Generator().manual_seed(0)).half()
    values[0], values[9, 4], values[3, 2] = 0.0, float("nan"), 1000.0
    whole = count_exponents(values)
    monkeypatch.setattr("mptrain.numerics.tensors.PIECE", 7)
    assert torch.equal(count_exponents(values), whole)


def test_counting_leaves_the_tensor_alone_and_asks_for_no_gradient():
    values = torch.randn(10, requires_grad=True)
    before = values.detach().clone()
    assert not count_exponents(values).requires_grad
    assert torch.equal(values, before)


def test_two_tensors_add_up_to_the_one_that_holds_both():
    one, other = torch.tensor([0.0, 3.0, math.inf]), torch.tensor([1e-30, -7.0, math.nan])
    both = count_exponents(other, count_exponents(one))
    assert torch.equal(both, count_exponents(torch.cat([one, other])))
    assert both.shape == (PLACES,)
