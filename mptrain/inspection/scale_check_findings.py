"""From evidence about a network in half precision to findings: what is wrong, where, and what to do.

Causes come first. What follows from a cause is not said again: other findings of the same module, and gradients that are wrong
or nowhere finite because of it. What is wrong with other modules is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from mptrain.inspection.findings import Finding, label, operator_name
from mptrain.inspection.scale_check_ranges import (
    EPSILONS,
    ILL_CONDITIONED_OUTPUT,
    ModuleScaling,
    OutputErrors,
    ScalingEvidence,
    scales_of,
)
from mptrain.numerics.formats import scale_in_words
from mptrain.probe.module_trail import LOSS, is_inside
from mptrain.probe.observer import Operation

_NAMES = {"float16": "FP16", "bfloat16": "BF16"}

#: Operators that put a constant in the place of values, as masks do.
_FILLS = frozenset({"masked_fill", "where", "fill", "full", "full_like", "scalar_tensor"})

_FILL = "fill a mask with -inf or torch.finfo(x.dtype).min, or use scaled_dot_product_attention"
_NO_FILL = "use a smaller number; a mask is better filled (masked_fill) than added or multiplied"
_LINEAR = "its backward must be linear in what it is given: look there for a clamp, a constant, a threshold or a cast"
_CONDITION = "look for differences of large numbers, or random numbers that depend on the dtype"
_OPERATOR = (
    "look at that operator: a root, a division or a logarithm needs an epsilon before it, and a branch that is not "
    "taken has a gradient all the same"
)


def findings(evidence: ScalingEvidence) -> list[Finding]:
    """All that is wrong, causes before consequences.

    Kinds: ``constant``, ``value``, ``norm``, ``narrow``, ``cast``, ``output``, ``no_gradient``, ``proportion``, ``fp32``; of
    gradients ``overflow``, ``error``, ``drift``, ``range``; and ``scale``. Where FP32 itself is not finite, nothing is said of
    gradients and scales.
    """
    causes = [*_constants(evidence), *_stored(evidence), *_narrow(evidence), *_casts(evidence)]
    if not evidence.fp32_finite:
        return _with_words([*_not_finite_in_fp32(evidence), *causes, *_no_gradient(evidence)], evidence)
    causes += _outputs(evidence, causes)
    found = [*causes, *_no_gradient(evidence), *_proportion(evidence), *_ill_conditioned(evidence)]
    if evidence.modules:
        found += [*_overflows(evidence), *_errors(evidence, causes), *_drifts(evidence)]
    if evidence.modules and not why_no_range(evidence, found):
        found += _range(evidence) or _configured(evidence)
    return _with_words(found, evidence)


def why_no_range(evidence: ScalingEvidence, found: Sequence[Finding]) -> str:
    """Return why nothing can be said about usable loss scales; empty where it can."""
    kinds = {finding.kind for finding in found}
    if not evidence.fp32_finite:
        return "FP32 itself is not finite, so no loss scale is judged"
    if not evidence.modules:
        return "gradients could not be computed"
    if wrong_outputs(evidence):
        return "while outputs are wrong, gradients say nothing about loss scales"
    if kinds & {"proportion", "drift"}:
        return "gradients do not follow the loss scale, so none is judged"
    if kinds & {"error", "overflow"}:
        return "no loss scale makes all gradients right"
    return ""


def wrong_outputs(evidence: ScalingEvidence) -> list[str]:
    """Return the modules that make their output wrong themselves, by more than rounding explains."""
    tolerance = EPSILONS * evidence.form.epsilon
    return [
        name
        for name, errors in evidence.outputs.items()
        if errors.fp32 <= ILL_CONDITIONED_OUTPUT
        and not errors.half <= errors.allowed(tolerance)
        and errors.own > tolerance
    ]


def wrong_gradients(modules: Sequence[ModuleScaling]) -> tuple[int, list[str]] | None:
    """Return the exponent of a loss scale, and the modules whose gradients are wrong there for no fault of the scale.

    Returns:
        None where a scale suits all.
    """
    judged = [module for module in modules if module.judged]
    if wrong := [module for module in judged if module.wrong or not module.finite]:
        last = wrong[-1]
        return min(last.errors, key=lambda one: last.errors[one]), [module.name for module in wrong]
    if scales_of(modules).good or not judged:
        return None
    highest = min(module.good[-1] if module.good else 0 for module in judged)
    return highest, [module.name for module in judged if highest not in module.good]


def _with_words(found: Sequence[Finding], evidence: ScalingEvidence) -> list[Finding]:
    """Add the words that keep the modules of all findings in FP32, or another precision where that is no remedy."""
    kept = dict.fromkeys(name for finding in found for name in finding.keep)
    outermost = [name for name in kept if not any(is_inside(name, outer) for outer in kept)]
    words = f"precision.keep_fp32=[{','.join(dict.fromkeys([*evidence.keep_fp32, *outermost]))}]"
    if "" in kept or LOSS in kept:
        words = f"precision={'amp_bf16' if evidence.autocast else 'bf16'}"
    return [
        replace(one, hint=f"{one.hint}{'' if one.hint.endswith(':') else ', or write'} {words}") if one.keep else one
        for one in found
    ]


def _keep(evidence: ScalingEvidence, modules: Sequence[str]) -> tuple[str, ...]:
    """Return what to keep in FP32 for outputs to be right: each module, or the one around it whose output fits the format.

    What is kept already, and wrong all the same, is no remedy: then it is the one around it.
    """
    kept = []
    for module in modules:
        if (name := module) != LOSS:
            while name and (_largest(evidence, name) > evidence.form.max or name in evidence.keep_fp32):
                name = name.rpartition(".")[0]
            kept.append(name)
    return tuple(dict.fromkeys(kept))


def _largest(evidence: ScalingEvidence, name: str) -> float:
    """Return the largest magnitude of a module's output; where it hands on what the last module within it says, that one's."""
    within = (one for one in reversed(list(evidence.outputs)) if is_inside(one, name))
    said = evidence.outputs.get(name) or evidence.outputs.get(next(within, ""))
    return said.largest if said else 0.0


def _not_finite_in_fp32(evidence: ScalingEvidence) -> Iterator[Finding]:
    form = _NAMES[evidence.compute]
    if not evidence.breaks_fp32:
        what = f"the step is not finite in FP32 either: this is no matter of {form}"
        yield Finding("fp32", ("",), what, "look at the inputs and the weights: mptrain diagnose with precision=fp32")
        return
    first = evidence.breaks_fp32[0]
    what = (
        f"{first.kind} in FP32 as well, first in {operator_name(first)} of its {first.phase} pass, though all that goes into it "
        f"is finite, up to {first.largest_input:.3g}: this is no matter of {form} or of a loss scale"
    )
    yield Finding("fp32", (first.module,), what, _OPERATOR)


def _constants(evidence: ScalingEvidence) -> Iterator[Finding]:
    form, name = evidence.form, _NAMES[evidence.compute]
    groups: dict[tuple[float, str, str], list[str]] = {}
    for module, operator, value, becomes in evidence.constants:
        groups.setdefault((value, operator, becomes), []).append(module)
    for (value, operator, becomes), modules in groups.items():
        if becomes == "zero":
            attribute = next((f"{evidence.epsilons[one]}=" for one in modules if one in evidence.epsilons), "")
            smallest = f"whose smallest number is {form.smallest_subnormal:.2g} ({operator})"
            what, hint = f"{attribute}{value:g} vanishes in {name}, {smallest}", "write at least 1e-5 there"
        else:
            raised = f"; torch refuses: {evidence.refused}" if evidence.refused else ""
            what = f"{value:g} is beyond {form.max:g}, the largest number of {name} ({operator}){raised}"
            hint = _FILL if _plain(operator) in _FILLS else _NO_FILL
        yield Finding("constant", tuple(modules), what, hint, _keep(evidence, modules))


def _stored(evidence: ScalingEvidence) -> Iterator[Finding]:
    """Parameters and buffers that the format does not hold, and norms that are kept in it."""
    name, norms = _NAMES[evidence.compute], evidence.half_norms
    for tensor, largest in evidence.lost_values.items():
        beyond = f"beyond the largest number of {name}: it is {evidence.form.max:g} there"
        what, hint = (
            f"holds a magnitude of {largest:g}, {beyond}",
            "use smaller values (a mask of True and False, or -inf)",
        )
        yield Finding("value", (tensor,), what, hint, _keep(evidence, [tensor.rpartition(".")[0]]))
    if norms:
        what = f"parameters and statistics of {_count(norms, 'norm')} are {name}"
        yield Finding("norm", tuple(norms), what, "keep them in FP32:", ("norms",))


def _narrow(evidence: ScalingEvidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for module, operator in evidence.narrow:
        groups.setdefault(module, []).append(operator)
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for module, operators in groups.items():
        consequence, first = "", _first_break(evidence, module)
        # Its operators make the output wrong where no other one leaves the range before them.
        if module in wrong_outputs(evidence) and (first is None or _plain(operator_name(first)) in operators):
            own = evidence.outputs[module].own
            consequence = f"{_percent(own)} off FP64" if math.isfinite(own) else "not finite"
            consequence = f"; what it says is {consequence}"
        alike.setdefault((", ".join(sorted(set(operators))), consequence, module == LOSS), []).append(module)
    for (named, consequence, in_loss), modules in alike.items():
        form = f"{_NAMES[evidence.compute]}, which torch's autocast on CUDA has in FP32"
        hint = "compute the loss in FP32: logits.float() before it" if in_loss else "call .float() on what goes in"
        what = f"{named} computed in {form}{consequence}"
        yield Finding("narrow", tuple(modules), what, hint, _keep(evidence, modules))


def _first_break(evidence: ScalingEvidence, module: str) -> Operation | None:
    return next((one for one in evidence.breaks_half if one.module == module), None)


def _plain(operator: str) -> str:
    """Return an operator's name as `mptrain.inspection.scale_check_observation` has it."""
    return operator.strip("_").removesuffix("_forward")


def _casts(evidence: ScalingEvidence) -> Iterator[Finding]:
    """Casts to the half-precision dtype that the mode does not have, which loses bits or range on the way there."""
    modules = tuple(dict.fromkeys(module for module, dtype in evidence.casts if dtype != evidence.compute))
    if modules:
        other = next(dtype for dtype in _NAMES if dtype != evidence.compute)
        loses = "three bits of each value" if other == "bfloat16" else "what lies outside of FP16's range"
        network = f"a network that computes in {_NAMES[evidence.compute]}"
        what = f"casts to {_NAMES[other]} in {network}, which loses {loses}"
        yield Finding("cast", modules, what, "cast to the dtype of what comes in (x.dtype), or to FP32")


def _no_gradient(evidence: ScalingEvidence) -> Iterator[Finding]:
    if names := tuple(evidence.no_gradient):
        what = f"{_count(names, 'parameter')} get{'s' if len(names) == 1 else ''} no gradient"
        hint = "look for detach(), no_grad() or .data on the way to the loss, or freeze them on purpose"
        yield Finding("no_gradient", names, what, hint)


def _proportion(evidence: ScalingEvidence) -> Iterator[Finding]:
    if behind := [module for module in evidence.modules if not module.in_proportion]:
        change = f"change by up to {_percent(max(module.fp32_shift for module in behind))} with it"
        those = f"in FP32 already, those of {_count(behind, 'module')} ({_first(behind)}) {change}"
        where = tuple(evidence.breaks) or (behind[-1].name,)
        yield Finding("proportion", where, f"gradients do not follow the loss scale: {those}", _LINEAR)


def _ill_conditioned(evidence: ScalingEvidence) -> Iterator[Finding]:
    no_matter = f"already: this is no matter of {_NAMES[evidence.compute]}"
    for name, errors in evidence.outputs.items():
        if errors.fp32 > ILL_CONDITIONED_OUTPUT:  # those that follow are fed with it
            what = f"what it says in FP32 is {_percent(errors.fp32)} off FP64 {no_matter}"
            yield Finding("fp32", (name,), what, _CONDITION)
            return
    if wrong := [module for module in evidence.modules[::-1] if module.ill_conditioned]:
        what = f"the backward pass in FP32 gets its gradients wrong by {_percent(wrong[0].fp32)} {no_matter}"
        yield Finding("fp32", _names(wrong), what, _CONDITION)


def _overflows(evidence: ScalingEvidence) -> Iterator[Finding]:
    never = [module for module in evidence.modules[::-1] if module.judged and not module.finite]
    # What is infinite in the forward pass makes the gradients so.
    if never and not any(math.isinf(evidence.outputs[name].own) for name in wrong_outputs(evidence)):
        leaves = f"the backward pass in {_NAMES[evidence.compute]} leaves the range by itself"
        what = f"gradients of {_count(never, 'module')} ({_first(never)}) are not finite at any scale: {leaves}"
        where, hint = tuple(evidence.breaks) or _names(never), "make what multiplies gradients there smaller"
        yield Finding("overflow", where, what, hint, tuple(evidence.keep_backward))


def _outputs(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    """The modules that make their output wrong themselves, where no other finding says why."""
    form = _NAMES[evidence.compute]
    alike: dict[tuple[bool, str], list[tuple[str, OutputErrors, Operation | None]]] = {}
    known = _modules(causes)
    for name in wrong_outputs(evidence):
        errors, module, first = evidence.outputs[name], name, _first_break(evidence, name)
        if first is None:  # the module around it computes what this one is given
            around = [one for one in evidence.breaks_half if is_inside(name, one.module)]
            first = max(around, key=lambda one: len(one.module), default=None)
            module = first.module if first is not None else name
        if module not in known or not _is_known(evidence, module, first):
            key = math.isfinite(errors.half), operator_name(first) if first is not None else ""
            alike.setdefault(key, []).append((module, errors, first))
    for members in alike.values():
        where = tuple(dict.fromkeys(module for module, _, _ in members))
        _, errors, first = max(members, key=lambda one: one[1].half)
        explained = errors.explained if math.isfinite(errors.explained) else EPSILONS * evidence.form.epsilon
        off = f"{_percent(errors.half)} off FP64, where rounding explains {_percent(explained)}"
        beyond = ""
        if first is not None:
            finite = f"though all that goes into it is finite, up to {first.largest_input:.3g}"
            beyond = f": {operator_name(first)} gives {first.kind} there, {finite}"
        elif not math.isfinite(errors.own) and errors.largest > evidence.form.max:
            beyond = f": it reaches {errors.largest:.3g} in FP64"
        what = f"what it says in {form} is {off if math.isfinite(errors.half) else 'not finite'}{beyond}"
        hint = "look for arithmetic in half that ought to be FP32"
        yield Finding("output", where, what, hint, _keep(evidence, where))


def _modules(causes: Sequence[Finding]) -> Collection[str]:
    """Return the modules of findings about modules, parameters or buffers."""
    return {name.rpartition(".")[0] if one.kind == "value" else name for one in causes for name in one.where}


def _is_known(evidence: ScalingEvidence, module: str, first: Operation | None) -> bool:
    """Return whether what is known of a module explains that its output is wrong.

    Args:
        evidence: All of it.
        module: Something is known of it.
        first: The operator that leaves the range first, if one does.
    """
    if module in evidence.half_norms or any(one == module and to == "zero" for one, _, _, to in evidence.constants):
        return True
    operators = {operator for one, operator in evidence.narrow if one == module}
    operators |= {_plain(operator) for one, operator, _, _ in evidence.constants if one == module}
    operators |= {"a cast" for one, _ in evidence.casts if one == module}
    return first is None or _plain(operator_name(first)) in operators


def _errors(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    wrong, known = [module for module in evidence.modules if module.wrong], _modules(causes)
    where = tuple(name for name in evidence.breaks if not any(name == one or is_inside(name, one) for one in known))
    if wrong and (where or not evidence.breaks):
        last = wrong[-1]  # gradients come from behind
        off = f"wrong by {_percent(last.best)} at the best scale, where rounding explains {_percent(last.tolerance)}"
        what = f"the backward pass gets the gradients of {label(last.name)} {off}{_before(wrong)}"
        hint = "look for arithmetic in half there that ought to be FP32"
        yield Finding("error", where or (last.name,), what, hint, tuple(evidence.keep_backward))


def _drifts(evidence: ScalingEvidence) -> Iterator[Finding]:
    if wrong := [module for module in evidence.modules if module.drifts]:
        last, breaks = wrong[-1], tuple(evidence.breaks)
        top = max(last.finite)
        off = f"{_percent(last.best)} off at best and {_percent(last.errors[top])} at 2^{top}, where they are finite"
        those = f"those of {label(last.name)} are {off}{_before(wrong)}"
        what = f"gradients do not follow the loss scale in {_NAMES[evidence.compute]}: {those}"
        yield Finding("drift", breaks or (last.name,), what, _LINEAR, _keep(evidence, breaks))


def _before(wrong: Sequence[ModuleScaling]) -> str:
    return f", and {_count(wrong[:-1], 'module')} before it" if wrong[:-1] else ""


def _range(evidence: ScalingEvidence) -> list[Finding]:
    judged = [module for module in evidence.modules if module.judged and module.good]
    if scales_of(evidence.modules).good:
        return []
    if never := [one for one in evidence.modules[::-1] if one.judged and one.underflows and not one.good]:
        worst = max(never[::-1], key=lambda one: one.best)
        off = f"{_percent(worst.best)} off at 2^{max(worst.finite)}, the highest that is finite"
        those = f"those of {label(worst.name)} are {off}"
        what = f"gradients of {_count(never, 'module')} ({_first(never)}) underflow at every scale: {those}"
        where, hint = _names(never), "make what multiplies gradients on the way to them larger"
    elif judged:
        lowest, highest = max(judged, key=lambda one: one.good[0]), min(judged, key=lambda one: one.good[-1])
        needs = f"{label(lowest.name)} needs 2^{lowest.good[0]} or more"
        what = f"no loss scale suits all modules: {needs}, {label(highest.name)} 2^{highest.good[-1]} or less"
        where, hint = (lowest.name, highest.name), "make what multiplies gradients on the way to the former larger"
    else:
        return []
    return [Finding("range", where, what, hint, tuple(evidence.keep_backward) or ("",))]


def _configured(evidence: ScalingEvidence) -> Iterator[Finding]:
    scales, judged = scales_of(evidence.modules), [module for module in evidence.modules if module.judged]
    for learner, (scale, constant) in evidence.scales.items():
        if not constant or not scales.good or scales.suits(scale) is not False:
            continue
        low, high, best = scales.good[0], scales.good[-1], 2 ** (scales.best or 0)
        if scale > 2.0**high:
            why = f"too high for {label(min(judged, key=lambda one: one.good[-1]).name)}"
        else:
            worst = max(judged, key=lambda one: one.good[0])
            at = min(scales.tried, key=lambda one: abs(one - math.log2(scale)))
            why = f"gradients underflow, first in {label(worst.name)}, by {_percent(worst.shifts[at])}"
        what = f"the configured scale {scale_in_words(scale)} is outside of 2^{low} to 2^{high}: {why}"
        where = "scaler" if learner == "main" else f"learners.{learner}.scaler"
        hint = f"give the learner a scale of {best} ({where}), or a dynamic scaler"
        if learner == "main":
            more = "mptrain recommend knows more steps than the first"
            hint = f"write scaler=static scaler.scale={best}, or use a dynamic scaler; {more}"
        yield Finding("scale", (where,), what, hint)


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "infinity"
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _names(modules: Sequence[ModuleScaling]) -> tuple[str, ...]:
    return tuple(module.name for module in modules)


def _first(modules: Sequence[ModuleScaling]) -> str:
    return ", ".join(label(module.name) for module in modules[:3]) + (", ..." if modules[3:] else "")


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
