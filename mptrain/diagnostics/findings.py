"""From what was seen of a step to what is wrong with it: the cause and the place. Pure: reads an observation only.

The first operator that makes something infinite, or no number, out of finite values is where a step goes wrong;
everything behind it only hands that on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mptrain.diagnostics.trail import LOSS
from mptrain.numerics.formats import scale_in_words

if TYPE_CHECKING:
    from mptrain.diagnostics.observation import Faulty, Observation
    from mptrain.diagnostics.observer import Operation
    from mptrain.runlog.diagnosis import CauseKind


@dataclass(frozen=True, slots=True)
class Cause:
    """Where a step goes wrong.

    Attributes:
        kind: See `mptrain.runlog.diagnosis.CauseKind`.
        module: In which module; None where in none.
        operator: In which operator; empty where that is not known.
        phase: In which pass; empty where in none.
        sentence: The same in one sentence.
    """

    kind: CauseKind
    module: str | None
    operator: str
    phase: str
    sentence: str


def cause_of(seen: Observation) -> Cause:
    """Why a step cannot be applied, or that it can."""
    if seen.inputs:
        return Cause("input", None, "", "", _input(seen))
    if seen.weights:
        named = ", ".join(f"{one.name} ({one.kind})" for one in seen.weights[:3])
        more = f" and {len(seen.weights) - 3} more" if len(seen.weights) > 3 else ""
        return Cause("weights", None, "", "", f"the weights are not finite: {named}{more}")
    if seen.refusal is not None:
        return _refused(seen)
    if seen.finite:
        at = f"at loss scale {scale_in_words(seen.loss_scale)}" if seen.loss_scale != 1 else "without a loss scale"
        finite = f"step {seen.step:,} is finite, forward and backward, {at}"
        hidden = first_break(seen, "forward")
        if hidden is None:
            return Cause("none", None, "", "", finite)
        found = f"{finite}; but {_sentence(seen, hidden)}, and neither the loss nor the gradients show it"
        return Cause("none", hidden.module, hidden.operator, "forward", found)
    if not math.isfinite(seen.loss):
        return _not_finite_forward(seen)
    return _not_finite_backward(seen)


def first_break(seen: Observation, phase: str) -> Operation | None:
    """The first operator of a pass that makes something infinite or no number out of finite values."""
    return next((operation for operation in seen.of(phase) if operation.breaks), None)


def place(seen: Observation, module: str) -> str:
    """A module for people: its name and class."""
    if module == LOSS:
        return "the loss"
    return f"{module or 'the model itself'} ({seen.types.get(module, '?')})"


def named(operation: Operation) -> str:
    """An operator for people."""
    return "a cast" if operation.operator == "_to_copy" else operation.operator


def _input(seen: Observation) -> str:
    parts = []
    for one in seen.inputs:
        where = f" in {len(one.samples)} of {seen.samples} samples (place {_places(one)})" if one.samples else ""
        parts.append(f"{one.name} hold {one.kind}{where}")
    wide = any(one.widely_finite for one in seen.inputs)
    cast = "; in FP32 they are finite: they are too large for what the model takes" if wide else ""
    return f"the batch itself is not finite: {'; '.join(parts)}{cast}"


def _places(one: Faulty) -> str:
    shown = ", ".join(str(number) for number in one.samples[:5])
    return f"{shown} ..." if len(one.samples) > 5 else shown


def _refused(seen: Observation) -> Cause:
    refusal = seen.refusal
    assert refusal is not None
    function = f" within {refusal.function}" if refusal.function else ""
    operator = f"{refusal.operator} of {' and '.join(refusal.inputs)}" if refusal.operator else "it"
    pass_name = f"{refusal.phase} pass"
    sentence = (
        f"torch refuses {operator} in the {pass_name} of {place(seen, refusal.module)}{function}: {refusal.message}"
    )
    return Cause("refused", refusal.module, refusal.operator, refusal.phase, sentence)


def _not_finite_forward(seen: Observation) -> Cause:
    broken = first_break(seen, "forward")
    if broken is not None:
        kind: CauseKind = "loss" if broken.module == LOSS else "forward"
        before = "what the model gives is finite, the loss is not: " if kind == "loss" else ""
        return Cause(kind, broken.module, broken.operator, "forward", f"{before}{_sentence(seen, broken)}")
    module = next((call.module for call in seen.ended if call.finite_inputs and not call.finite_output), None)
    if module is not None:
        sentence = f"{place(seen, module)} gives values that are not finite, though all that goes into it is"
        return Cause("forward", module, "", "forward", sentence)
    return Cause("loss", LOSS, "", "forward", f"what the model gives is finite, the loss is {seen.loss}")


def _not_finite_backward(seen: Observation) -> Cause:
    """The loss is finite: a gradient overflows by itself, or meets what broke in the forward pass without reaching the loss."""
    broken = first_break(seen, "backward")
    earlier = first_break(seen, "forward")
    first = next((operation for operation in seen.of("backward") if not operation.finite), None)
    if earlier is not None and (broken is None or first is not broken):
        found = f"{_sentence(seen, earlier)}; the loss does not show it, the gradients do"
        return Cause("forward", earlier.module, earlier.operator, "forward", found)
    if broken is not None:
        return Cause(
            "backward",
            broken.module,
            broken.operator,
            "backward",
            f"only gradients {_how(broken)}: {_sentence(seen, broken)}",
        )
    if first is not None:
        sentence = f"only gradients are not finite, first in the backward pass of {place(seen, first.module)}, in {named(first)}"
        return Cause("backward", first.module, first.operator, "backward", sentence)
    name, kind = seen.gradients[0]
    module = name.rpartition(".")[0]
    sentence = f"only the gradient of {name} is {kind}: something behind the backward pass made it so"
    return Cause("backward", module, "", "backward", sentence)


def _how(operation: Operation) -> str:
    return "overflow" if any(counts.inf for counts in operation.outputs) else "are not finite"


def _sentence(seen: Observation, operation: Operation) -> str:
    kinds = [counts for counts in operation.outputs if counts.inf or counts.nan]
    kind = "inf" if any(counts.inf for counts in kinds) else "NaN"
    dtype = " and ".join(dict.fromkeys(counts.dtype for counts in kinds))
    function = f" within {operation.function}" if operation.function else ""
    backward = "in the backward pass of" if operation.phase == "backward" else "in"
    scale = ""
    if operation.phase == "backward" and seen.loss_scale != 1:
        scale = f" at loss scale {scale_in_words(seen.loss_scale)}"
    return (
        f"{named(operation)} {backward} {place(seen, operation.module)}{function} gives {kind} in {dtype}{scale}, "
        f"though all that goes into it is finite, up to {operation.largest_input:.3g}"
    )
