"""Which gradients of a look FP16 judges, and what two looks say of the steps between them."""

import math

import pytest
from histograms_by_hand import counted, look

from mptrain.numerics.histogram_sample import Largest, anchor, between, gradients_of, largest_of


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
    assert largest_of(gradients_of(look(1, {"a": half}, {"w": through})), 8.0) == Largest(8.0, "w", 2.0)
    assert largest_of(gradients_of(look(1, {"a": half})), 8.0) == Largest(2.0, "a", 2.0)
    assert largest_of(gradients_of(look(1, {}, {"w": through})), 8.0) == Largest(8.0, "w", 0.0)
    assert largest_of(gradients_of(look(1)), 8.0) == Largest(0.0, "", 0.0)


def test_sums_beyond_fp16_in_a_clean_half_step_count_as_its_largest_number():
    half, total = counted([16.0], "float16"), counted([90000.0])
    assert largest_of(gradients_of(look(1, {"a": half}, {"w": total})), 2.0).value == 65504.0 / 2
    assert largest_of(gradients_of(look(1, {}, {"w": total})), 2.0).value == 45000.0  # FP32 throughout


def test_between_two_looks_the_norm_and_the_ratio_to_it_tell():
    one, other = anchor(1, 1.0, 1.0), anchor(9, 4.0, 16.0)
    assert between(one, other, 5, 2000.0) == pytest.approx(1000.0)
    assert between(one, one, 5, 3.0) == pytest.approx(3.0)
    assert between(one, other, 5, math.inf) == pytest.approx(2.0)  # after an overflow: of the largest themselves


@pytest.mark.parametrize(
    ("largest", "norm"), [(0.0, 1.0), (math.inf, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)]
)
def test_a_look_without_gradient_or_norm_tells_nothing_of_others(largest, norm):
    assert anchor(1, largest, norm) is None
