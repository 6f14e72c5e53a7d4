"""From what was seen to the cause: each kind is told from the others, with the place where it begins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mptrain.engine.module_trail import LOSS, ModuleCall
from mptrain.engine.observer import CustomFunction, NonfiniteTensor, Observation, Operation, OperatorError
from mptrain.lab.diagnosis.causes import first_cause, module_rows, step_notes, underflows
from mptrain.system.records import ExponentCounts

TYPES = {"": "Net", "conv": "Conv2d", "bn": "BatchNorm2d", "soft": "Softmax"}


def counts(*, dtype="float16", largest=1.0, inf=0, nan=0, zeros=0, lowest=0, values=(8,)):
    return ExponentCounts(dtype, zeros, inf, nan, largest, lowest, values)


def operation(module, operator="mul", phase="forward", *, finite_inputs=True, function="", largest_input=2.0, **out):
    return Operation(phase, module, function, operator, ("float16",), (counts(**out),), finite_inputs, largest_input)


def observation(*operations, loss=1.0, scale=1024.0, gradients=(), **more):
    fields = {
        "ended": (), "functions": (), "refusal": None, "inputs": (), "weights": (), "untrained": {}, **more
    }  # fmt: skip
    return Observation(
        learner="main", step=7, loss_scale=scale, loss=loss, samples=4, operations=operations,
        calls=dict.fromkeys(TYPES, 1), types=TYPES, largest_weight=(1.0, "conv.weight"), gradients=gradients, census={},
        **fields,
    )  # fmt: skip


GONE = (("conv.weight", "inf"),)


HANDED = operation("conv", "where", inf=1, finite_inputs=False)
REFUSAL = OperatorError("backward", "conv", "MixesBackward", "mm", ("float32", "float16"), "RuntimeError: no")


@pytest.mark.parametrize(
    ("seen", "kind", "module", "operator", "what"),
    [
        (
            observation(operation("conv", inf=1), inputs=(NonfiniteTensor("targets", "nan", (2,)),), loss=math.nan),
            "input", None, "", "the batch itself is not finite: targets contain nan in 1 of 4 samples (index 2)",
        ),
        (  # weights come before what they do
            observation(operation("conv", inf=1), weights=(NonfiniteTensor("bn.running_var", "nan"),), loss=math.nan),
            "weights", None, "", "the weights are not finite: bn.running_var (nan)",
        ),
        (  # the first operator
            observation(
                operation("conv", "convolution", inf=3, largest_input=700.0),
                operation("bn", "native_batch_norm", nan=8, finite_inputs=False),
                loss=math.nan, gradients=GONE,
            ),
            "forward", "conv", "convolution",
            "convolution in conv (Conv2d) returns inf in float16 for finite inputs up to 700",
        ),
        (
            observation(operation("conv"), operation(LOSS, "log", dtype="float32", nan=1), loss=math.nan),
            "loss", LOSS, "log", "the model's outputs are finite, the loss is not: log in the loss returns NaN",
        ),
        (  # gradients that meet an infinity of the forward pass
            observation(
                operation("soft", "sum", inf=1),
                operation("soft", "div", "backward", nan=1, finite_inputs=False),
                operation("conv", "mul", "backward", inf=1),
                gradients=GONE,
            ),
            "forward", "soft", "sum", "",
        ),
        (
            observation(operation("soft", "sum", inf=1)),
            "forward", "soft", "sum", "; the loss and the gradients stay finite",
        ),
        (  # a value that is put in on purpose comes out of an operator that it went into
            observation(
                HANDED, loss=math.inf, gradients=GONE,
                ended=(ModuleCall("conv", True, False), ModuleCall("", True, False)),
            ),
            "forward", "conv", "", "",
        ),
        (
            observation(refusal=REFUSAL, loss=math.nan),
            "refused", "conv", "mm",
            "mm of float32 and float16 raises an error in the backward pass of conv (Conv2d) within MixesBackward: "
            "RuntimeError: no",
        ),
        (
            observation(operation("conv", "_to_copy", "backward", nan=1, finite_inputs=False), gradients=GONE),
            "backward", "conv", "", "only gradients are not finite, first in the backward pass of conv (Conv2d), in a cast",
        ),
        (
            observation(operation("conv", "div", "backward", nan=1), gradients=GONE),
            "backward", "conv", "div", "only gradients are not finite: div in the backward pass of conv",
        ),
    ],
)  # fmt: skip
def test_first_cause(seen, kind, module, operator, what):
    cause = first_cause(seen)
    assert (cause.kind, cause.module) == (kind, module)
    assert not operator or cause.operator == operator
    assert what in cause.what


def test_an_overflow_of_gradients_alone_is_found_where_it_begins():
    seen = observation(
        operation("conv"),
        operation("bn", "native_batch_norm_backward", "backward"),
        operation("conv", "convolution_backward", "backward", inf=1, function="LoudBackward"),
        operation("", "mul", "backward", inf=1, finite_inputs=False),
        gradients=GONE,
    )
    cause = first_cause(seen)
    assert (cause.kind, cause.module, cause.phase) == ("backward", "conv", "backward")
    assert "within LoudBackward returns inf in float16 at loss scale 2^10" in cause.what
    assert [row.name for row in module_rows(seen) if row.breaks] == ["conv"]


def test_a_softmax_whose_probabilities_are_too_small_is_worth_knowing():
    tiny = operation("soft", "_softmax", largest=2.0**-16, lowest=-18, values=(4, 3, 1))
    seen = observation(tiny)
    assert underflows(seen) == [tiny]
    assert step_notes(seen)[0].startswith("_softmax in soft (Softmax) loses values to FP16 underflow: 100 %")


@pytest.mark.parametrize(("operator", "lost"), [("exp", True), ("relu", False)])
def test_zeros_are_losses_only_where_an_exact_result_is_never_zero(operator, lost):
    zero = operation("soft", operator, zeros=7, values=(1,))
    assert bool(underflows(observation(zero))) is lost


def test_a_normalisation_with_huge_activations_is_named_before_what_feeds_it():
    seen = observation(
        operation("conv", "convolution", largest=60000.0), operation("bn", "native_batch_norm", largest_input=60000.0)
    )
    first, second = step_notes(seen)
    assert first == "bn (BatchNorm2d) has FP16 values up to 60,000, 91.6 % of 65,504"
    assert second.startswith("conv (Conv2d)")


def test_custom_functions_of_another_dtype_are_worth_knowing():
    corrected = CustomFunction("SquareBackward", "conv", ("float16",), ("float16",), [("float32", "float16")])
    widens = CustomFunction("WideBackward", "", ("float16",), ("float32",))
    first, second = step_notes(observation(functions=(corrected, widens)))
    assert first.startswith("SquareBackward in conv (Conv2d) returns a gradient in float32 for an input in float16")
    assert second.startswith("WideBackward in the model itself (Net) returns float32 for float16")


def test_parameters_that_are_not_trained_are_named():
    notes = step_notes(observation(untrained={"frozen": ["conv.bias"], "no_gradient": ["a", "b", "c", "d"]}))
    assert notes == (
        "1 of the parameters is frozen and not trained: conv.bias",
        "4 of the parameters are without a gradient and not trained: a, b, c and 1 more",
    )


def test_gradients_that_underflow_ask_for_a_higher_scale():
    small = operation("conv", "convolution_backward", "backward", largest=2.0**-15, lowest=-20, values=(9,))
    assert "100 % of the nonzero FP16 gradients are below 2^-14 at loss scale 2^10" in step_notes(observation(small))[0]


def test_rows_stand_in_the_order_of_the_forward_pass_with_the_loss_last():
    seen = observation(operation(LOSS, "mul"), operation("bn"), operation("conv", zeros=8, lowest=-15))
    rows = module_rows(seen)
    assert [row.name for row in rows] == ["conv", "bn", LOSS]
    assert (rows[0].forward.zero, rows[0].forward.subnormal, rows[0].backward) == (0.5, 1.0, None)


def test_zeros_that_went_in_or_that_fp32_has_too_are_not_lost():
    half = replace(operation("soft", "div", zeros=7, values=(1,)), zero_inputs=7)
    assert underflows(observation(half)) == []
    softmax = operation("soft", "_softmax", zeros=7, values=(1,))
    wide = operation("soft", "_softmax", dtype="float32", zeros=7, values=(1,))
    assert underflows(observation(softmax)) == [softmax]
    assert underflows(observation(softmax), observation(wide)) == []
    assert underflows(observation(softmax), observation(replace(wide, module="bn"))) == [softmax]


def test_a_cast_loses_what_was_not_zero_before():
    cast = operation("soft", "_to_copy", zeros=7, values=(1,))
    assert underflows(observation(cast)) == [cast]
    assert underflows(observation(replace(cast, zero_inputs=7))) == []
