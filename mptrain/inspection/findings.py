"""From what was seen of a step to what is wrong with it: the causes and their places. Pure: reads observations only.

An operator that makes something infinite, or no number, out of finite values is where a step goes wrong; everything behind it
only hands that on. There may be several such operators, none of which feeds another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mptrain.numerics.formats import scale_in_words
from mptrain.probe.module_trail import LOSS

if TYPE_CHECKING:
    from mptrain.inspection.scale_check_ranges import ModuleScaling
    from mptrain.inspection.step_accuracy import StepAccuracy
    from mptrain.probe.observer import Operation
    from mptrain.probe.step_observation import Faulty, Observation
    from mptrain.runlog.diagnosis import CauseKind

#: Modules that are named in a sentence.
_NAMED = 3

#: A module, an operator, a pass, and which of those it is.
Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Cause:
    """Where a step goes wrong.

    Attributes:
        kind: See `mptrain.runlog.diagnosis.CauseKind`.
        module: In which module; None where in none.
        operator: In which operator; empty where that is not known.
        phase: In which pass; empty where in none.
        sentence: The same in one sentence.
        modules: All modules of that class in which it happens, ``module`` first.
    """

    kind: CauseKind
    module: str | None
    operator: str
    phase: str
    sentence: str
    modules: tuple[str, ...] = ()


def cause_of(seen: Observation) -> Cause:
    """Return the first cause of `causes_of`, or one of kind ``none`` where the step is in order."""
    return next(iter(causes_of(seen)), none(seen))


def none(seen: Observation, accuracy: StepAccuracy | None = None) -> Cause:
    """Return the cause of a step with which nothing is wrong.

    Args:
        seen: The step.
        accuracy: Its comparison with FP64, if there is one.
    """
    at = f"at loss scale {scale_in_words(seen.loss_scale)}" if seen.loss_scale != 1 else "without a loss scale"
    finite = f"step {seen.step:,} is finite, forward and backward, {at}"
    if accuracy is None:
        return Cause("none", None, "", "", finite)
    if (module := accuracy.ill_conditioned) is not None:
        where = place(seen, module)
        found = f"{finite}; but FP32 itself is far from FP64 in {where}, so this is no matter of half precision"
        return Cause("none", module, "", "", found, (module,))
    return Cause("none", None, "", "", f"{finite}, and its outputs and gradients agree with those of FP32")


def causes_of(seen: Observation, exact: Observation | None = None) -> tuple[Cause, ...]:
    """Return everything that is wrong with a step and follows from nothing else that is, in the order of the passes.

    What breaks in the backward pass of a module that breaks in the forward pass follows from that.

    Args:
        seen: The step.
        exact: The same step in FP32. What breaks there as well, and does no harm there, is meant so.
    """
    found: list[Cause] = []
    if seen.inputs:
        found.append(Cause("input", None, "", "", _input(seen)))
    if seen.weights:
        named = ", ".join(f"{one.name} ({one.kind})" for one in seen.weights[:_NAMED])
        more = f" and {len(seen.weights) - _NAMED} more" if len(seen.weights) > _NAMED else ""
        found.append(Cause("weights", None, "", "", f"the weights are not finite: {named}{more}"))
    if found:
        return tuple(found)
    found += _forward(seen, exact)
    broken = {module for one in found for module in one.modules}
    if seen.refusal is not None:
        return (_refused(seen), *found)
    if not math.isfinite(seen.loss):
        return tuple(found) or (_handed_on(seen),)
    return (*found, *(one for one in _backward(seen, exact, found) if one.module not in broken))


def compared(
    seen: Observation, causes: tuple[Cause, ...], accuracy: StepAccuracy, lost: Sequence[Operation]
) -> tuple[Cause, ...]:
    """Return the causes of a step whose loss is finite, once its values are compared with those of FP64.

    Infinities of the forward pass are no cause where all outputs are right and gradients are finite. An output that is wrong is one, unless something
    before it is; and so are gradients that are wrong in a step that is finite.

    Args:
        seen: The step.
        causes: From `causes_of`.
        accuracy: The comparison.
        lost: The operators of the forward pass that lose values to underflow, the worst first.
    """
    forward = [one for one in causes if one.phase == "forward"]
    others = [one for one in causes if one.phase != "forward"]
    wrong = accuracy.wrong_output
    if wrong is not None:
        off = _off(seen, wrong, accuracy)
        order = {name: at for at, name in enumerate(seen.calls)}
        last = max((at for name, at in order.items() if f"{name}.".startswith(f"{wrong}.")), default=0)
        before = [one for one in forward if order.get(one.module or "", 0) <= last]
        if before:
            at = forward.index(before[0])
            forward[at] = replace(before[0], sentence=f"{before[0].sentence}: {off}")
        else:
            forward.insert(0, Cause("forward", wrong, "", "forward", f"{off}, though it is finite", (wrong,)))
        return (*forward, *others)
    if not seen.finite and not others:  # gradients that are not finite follow from the forward pass alone
        return tuple(forward)
    ruined = accuracy.ruined_output([operation.module for operation in lost])
    if ruined is not None:
        worst = lost[0]
        sentence = f"{named(worst)} in {place(seen, worst.module)} loses its values to FP16's underflow: {_off(seen, ruined, accuracy)}"
        return (Cause("forward", worst.module, worst.operator, "forward", sentence, (worst.module,)), *others)
    if seen.finite and seen.loss_scale != 1 and (moving := accuracy.disproportionate):
        others.append(_disproportionate(seen, moving, accuracy.breaks))
    elif seen.finite and (gradients := accuracy.wrong_gradients):
        others.append(_in_backward(seen, _inexact(seen, gradients), accuracy.breaks or (gradients[0].name,)))
    return tuple(others)


def breaks(seen: Observation, phase: str) -> list[Operation]:
    """Return the operators of a pass that make something infinite or no number out of finite values."""
    return [operation for operation in seen.of(phase) if operation.breaks]


def first_break(seen: Observation, phase: str) -> Operation | None:
    """Return the first of `breaks`, if there is one."""
    return next(iter(breaks(seen, phase)), None)


def numbered(operations: Iterable[Operation]) -> Iterator[tuple[Key, Operation]]:
    """Yield operators, each with a key under which it is found in another precision too."""
    met: Counter[tuple[str, str, str]] = Counter()
    for operation in operations:
        name = (operation.module, operation.operator, operation.phase)
        yield (*name, met[name]), operation
        met[name] += 1


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
    return Cause("refused", refusal.module, refusal.operator, refusal.phase, sentence, (refusal.module,))


def _forward(seen: Observation, exact: Observation | None) -> list[Cause]:
    """Return the causes in the forward pass, one for each kind of module and operator."""
    shown = ""
    if math.isfinite(seen.loss):
        shown = "; neither the loss nor the gradients show it"
        if not seen.finite:
            first = next((operation for operation in seen.of("backward") if not operation.finite), None)
            alone = first is not None and first.breaks
            shown = "; the loss does not show it" + ("" if alone else ", the gradients do")
    found: list[Cause] = []
    for group in _groups(seen, "forward", exact):
        kind: CauseKind = "loss" if group[0].module == LOSS else "forward"
        before = "what the model gives is finite, the loss is not: " if kind == "loss" and len(found) == 0 else ""
        found.append(_broken(seen, kind, group, exact, before, shown))
    return found


def _handed_on(seen: Observation) -> Cause:
    """The loss is not finite, though no operator is known to have made that out of finite values."""
    module = next((call.module for call in seen.ended if call.finite_inputs and not call.finite_output), None)
    if module is not None:
        sentence = f"{place(seen, module)} gives values that are not finite, though all that goes into it is"
        return Cause("forward", module, "", "forward", sentence, (module,))
    return Cause("loss", LOSS, "", "forward", f"what the model gives is finite, the loss is {seen.loss}", (LOSS,))


def _backward(seen: Observation, exact: Observation | None, before: list[Cause]) -> list[Cause]:
    """Return the causes in the backward pass of a finite loss, one for each kind of module and operator."""
    if seen.finite:  # what breaks on the way and reaches no parameter does no harm
        return []
    found: list[Cause] = []
    for group in _groups(seen, "backward", exact):
        how = "overflow" if any(counts.inf for counts in group[0].outputs) else "are not finite"
        begins = f"gradients {how}" if before or found else f"only gradients {how}"
        found.append(_broken(seen, "backward", group, exact, f"{begins}: "))
    if found or before:
        return found
    first = next((operation for operation in seen.of("backward") if not operation.finite), None)
    if first is not None:
        sentence = f"only gradients are not finite, first in the backward pass of {place(seen, first.module)}, in {named(first)}"
        return [Cause("backward", first.module, first.operator, "backward", sentence, (first.module,))]
    name, kind = seen.gradients[0]
    module = name.rpartition(".")[0]
    sentence = f"only the gradient of {name} is {kind}: something behind the backward pass made it so"
    return [Cause("backward", module, "", "backward", sentence, (module,))]


def _groups(seen: Observation, phase: str, exact: Observation | None) -> list[list[Operation]]:
    """The operators of a pass that break, those of one name in modules of one class together."""
    meant = {key for key, one in numbered(exact.operations) if one.breaks} if exact and exact.finite else set()
    groups: dict[tuple[str, str, str], list[Operation]] = {}
    for key, operation in numbered(seen.operations):
        if operation.phase == phase and operation.breaks and key not in meant:
            kind = LOSS if operation.module == LOSS else seen.types.get(operation.module, operation.module)
            groups.setdefault((kind, operation.operator, operation.function), []).append(operation)
    return list(groups.values())


def _broken(
    seen: Observation,
    kind: CauseKind,
    group: list[Operation],
    exact: Observation | None,
    before: str,
    behind: str = "",
) -> Cause:
    first = group[0]
    modules = tuple(dict.fromkeys(operation.module for operation in group))
    others = modules[1:]
    more = ""
    if others:
        rest = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        more = f"; the same in {', '.join(name or 'the model itself' for name in others[:_NAMED])}{rest}"
    again = exact is not None and any(
        one.breaks and one.operator == first.operator and one.module == first.module for one in exact.of(first.phase)
    )
    sentence = f"{before}{_sentence(seen, first, in_fp32=again)}{more}{behind}"
    return Cause(kind, first.module, first.operator, first.phase, sentence, modules)


def _off(seen: Observation, module: str, accuracy: StepAccuracy) -> str:
    errors, allowed = accuracy.outputs[module], accuracy.allowed(module)
    if not math.isfinite(errors.half):
        return f"the output of {place(seen, module)} is not finite, and that of FP32 is"
    return f"the output of {place(seen, module)} is {_percent(errors.half)} off that of FP32" + (
        f", where rounding explains {_percent(allowed)}" if errors.half > allowed else ""
    )


def inexact(seen: Observation, accuracy: StepAccuracy) -> list[str]:
    """Return a sentence on gradients that are further off than rounding explains, and good enough to train with."""
    if not seen.finite or accuracy.wrong_gradients or not accuracy.inexact_gradients:
        return []
    gradients = accuracy.inexact_gradients
    return [_in_backward(seen, _inexact(seen, gradients), accuracy.breaks or (gradients[0].name,)).sentence]


def _inexact(seen: Observation, wrong: tuple[ModuleScaling, ...]) -> str:
    worst = max(wrong, key=lambda one: one.best)
    others = f"; those of {len(wrong) - 1} more are off as well" if len(wrong) > 1 else ""
    return (
        f"the gradients of {place(seen, worst.name)} are finite and {_percent(worst.best)} off at loss scale "
        f"{scale_in_words(seen.loss_scale)}, where rounding explains {_percent(worst.allowed)}{others}"
    )


def _disproportionate(seen: Observation, moving: tuple[ModuleScaling, ...], breaks: tuple[str, ...]) -> Cause:
    names = ", ".join(place(seen, one.name) for one in moving[:_NAMED])
    more = f" and {len(moving) - _NAMED} more" if len(moving) > _NAMED else ""
    return _in_backward(
        seen,
        f"gradients do not follow the loss scale, in FP32 neither: those of {names}{more}",
        breaks or (moving[0].name,),
    )


def _in_backward(seen: Observation, sentence: str, modules: tuple[str, ...]) -> Cause:
    where = ", ".join(place(seen, module) for module in modules[:_NAMED])
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    found = f"{sentence}; they go wrong in the backward pass of {where}{more}"
    return Cause("backward", modules[0], "", "backward", found, modules)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _sentence(seen: Observation, operation: Operation, *, in_fp32: bool = False) -> str:
    kinds = [counts for counts in operation.outputs if counts.inf or counts.nan]
    kind = "inf" if any(counts.inf for counts in kinds) else "NaN"
    dtype = " and ".join(dict.fromkeys(counts.dtype for counts in kinds))
    if in_fp32 and dtype != "float32":
        dtype += ", and in FP32 as well"
    function = f" within {operation.function}" if operation.function else ""
    backward = "in the backward pass of" if operation.phase == "backward" else "in"
    scale = ""
    if operation.phase == "backward" and seen.loss_scale != 1 and not in_fp32:
        scale = f" at loss scale {scale_in_words(seen.loss_scale)}"
    return (
        f"{named(operation)} {backward} {place(seen, operation.module)}{function} gives {kind} in {dtype}{scale}, "
        f"though all that goes into it is finite, up to {operation.largest_input:.3g}"
    )
