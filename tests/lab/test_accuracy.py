"""Steps near the bounds that follow from the format, and beyond them."""

from __future__ import annotations

import math

from mptrain.lab.step.accuracy import StepAccuracy
from mptrain.lab.step.ranges import LOST, GradientErrors, OutputErrors, by_module
from mptrain.numerics.formats import BFLOAT16, FLOAT16
from tests.loops import each


def accuracy(outputs=None, error=0.0, *, form=FLOAT16, expected=0.0, fp32=0.0, shift=0.0):
    one = GradientErrors("conv.weight", 4, 1.0, fp32, expected, shift, {10: error}, {10: 0.0})
    return StepAccuracy(form, outputs or {}, by_module([one], form))


@each(
    ("form", "error", "explained", "wrong"),
    [
        (FLOAT16, 2.0**-7, 0.0, False),
        (FLOAT16, 1.01 * 2.0**-7, 0.0, True),
        (FLOAT16, 0.99 * 2.0**-3, 2.0**-4, False),
        (FLOAT16, 1.01 * 2.0**-3, 1.0, True),  # whatever rounding explains, a result is wrong then
        (FLOAT16, 1.01 * 2.0**-5, 2.0**-6, True),
        (FLOAT16, 1.0, math.inf, True),
        (BFLOAT16, 2.0**-4, 0.0, False),
        (BFLOAT16, 1.01 * 2.0**-4, 0.0, True),
        (BFLOAT16, 0.99 * 2.0**-2, 2.0**-3, False),
        (BFLOAT16, 1.01 * 2.0**-2, 1.0, True),
        (FLOAT16, math.inf, 0.0, True),
        (FLOAT16, math.nan, 0.0, True),
    ],
)
def test_an_output_may_be_off_by_what_rounding_explains(form, error, explained, wrong):
    seen = accuracy({"norm": OutputErrors(error, explained, 0.0)}, form=form)
    assert (seen.wrong_output == "norm") is wrong


def test_the_first_output_that_is_wrong_is_named_and_none_behind_one_that_fp32_gets_wrong():
    right, wrong = OutputErrors(1e-3, 1e-3, 1e-7), OutputErrors(1.0, 1e-3, 1e-7)
    assert accuracy({"a": right, "b": wrong, "c": wrong}).wrong_output == "b"
    assert accuracy({"a": OutputErrors(1.0, 1.0, 0.5), "b": wrong}).wrong_output is None
    assert accuracy({"a": OutputErrors(1.0, 1.0, 0.5)}).ill_conditioned == "a"
    assert accuracy({"a": OutputErrors(math.nan, math.nan, math.nan), "b": wrong}).wrong_output == "b"


def test_of_a_module_the_boundary_is_named_to_which_it_adds_most():
    little, most, later = (
        OutputErrors(error, 1e-3, 1e-7, own) for error, own in ((0.01, 0.01), (0.4, 0.4), (1.0, 1.0))
    )
    assert accuracy({"a to b": little, "b": little, "a": most, "c": later}).wrong_output == "a"


@each(
    ("error", "expected", "inexact", "wrong"),
    [
        (2.0**-7, 0.0, False, False),
        (1.01 * 2.0**-7, 0.0, True, False),
        (LOST, 0.0, True, False),
        (1.01 * LOST, 0.0, True, True),
        (0.39, 0.2, False, False),
        (0.41, 0.2, True, True),
        (0.49, 2.0, False, False),
        (0.51, 2.0, True, True),
        (math.inf, 0.0, True, True),
    ],
)
def test_a_gradient_may_be_off_by_what_rounding_and_the_outputs_explain(error, expected, inexact, wrong):
    seen = accuracy(error=error, expected=expected)
    assert (bool(seen.inexact_gradients), bool(seen.wrong_gradients)) == (inexact, wrong)


def test_gradients_that_fp32_gets_wrong_or_that_do_not_follow_the_scale_are_not_blamed_on_half_precision():
    assert not accuracy(error=1.0, fp32=0.5).wrong_gradients
    moving = accuracy(error=1.0, shift=0.5)
    assert (len(moving.disproportionate), moving.wrong_gradients) == (1, ())


def test_a_gate_that_is_closed_loses_its_values_without_harm():
    gone = {"gate": OutputErrors(1.0, 1.0, 0.0)}
    assert accuracy(gone).ruined_output(["gate"]) is None
    assert accuracy(gone, expected=0.9).ruined_output(["gate"]) == "gate"
    assert accuracy(gone, expected=0.9).ruined_output([]) is None
