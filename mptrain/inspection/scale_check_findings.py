"""From evidence about a network in half precision to findings: what is wrong, where, and what to do.

Causes come first. What follows from a cause is not said again: other findings of the same module, and gradients that are wrong
or nowhere finite because of it. What is wrong with other modules is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from mptrain.inspection.scale_check_ranges import (
    EPSILONS,
    ILL_CONDITIONED_OUTPUT,
    Break,
    Finding,
    ModuleScaling,
    OutputErrors,
    ScalingEvidence,
    scales_of,
)
from mptrain.numerics.formats import FORMATS, scale_in_words
from mptrain.probe.module_trail import LOSS

_LINEAR = "its backward must be linear in what it is given: look there for a clamp, a constant, a threshold or a cast"

_NAMES = {"float16": "FP16", "bfloat16": "BF16"}


def findings(evidence: ScalingEvidence) -> list[Finding]:
    """All that is wrong, causes before consequences.

    Kinds: ``constant``, ``value``, ``norm``, ``narrow``, ``cast``, ``output``, ``no_gradient``, ``proportion``, ``fp32``; of
    gradients ``overflow``, ``error``, ``drift``, ``range``; and ``scale``. Where FP32 itself is not finite, nothing is said of
    gradients and scales.
    """
    causes = [*_constants(evidence), *_values(evidence), *_norms(evidence), *_narrow(evidence), *_casts(evidence)]
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
    tolerance = EPSILONS * FORMATS[evidence.compute].epsilon
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


def _modules(cause: Finding) -> Iterator[str]:
    """The modules of a finding about modules, parameters or buffers."""
    for name in cause.where:
        yield name.rpartition(".")[0] if cause.kind == "value" else name


def _with_words(found: Sequence[Finding], evidence: ScalingEvidence) -> list[Finding]:
    """The findings with the words that keep the modules of them all in FP32, or another precision where that is no remedy."""
    kept = [name for finding in found for name in finding.keep]
    kept = [name for name in dict.fromkeys(kept) if not any(_is_inside(name, outer) for outer in kept)]
    entries = [*evidence.keep_fp32, *(name for name in kept if name not in evidence.keep_fp32)]
    words = f"precision.keep_fp32=[{','.join(entries)}]"
    if "" in kept or LOSS in kept:
        words = f"precision={'amp_bf16' if evidence.autocast else 'bf16'}"
    return [
        replace(one, hint=f"{one.hint}{'' if one.hint.endswith(':') else ', or write'} {words}") if one.keep else one
        for one in found
    ]


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _keep(evidence: ScalingEvidence, module: str) -> tuple[str, ...]:
    """Return what to keep in FP32 for a module's output to be right: it, or the one around it whose output fits the format.

    What is kept already, and wrong all the same, is no remedy: then it is the one around it.
    """
    name, largest = module, FORMATS[evidence.compute].max
    while name and (_largest(evidence, name) > largest or name in evidence.keep_fp32):
        name = name.rpartition(".")[0]
    return (name,)


def _largest(evidence: ScalingEvidence, name: str) -> float:
    """The largest magnitude of a module's output; where it hands on what the last module within it says, that one's."""
    said = name
    if name not in evidence.outputs:
        said = next((one for one in reversed(list(evidence.outputs)) if _is_inside(one, name)), "")
    return evidence.outputs[said].largest if said in evidence.outputs else 0.0


def _not_finite_in_fp32(evidence: ScalingEvidence) -> Iterator[Finding]:
    form = _NAMES[evidence.compute]
    first = next(iter(evidence.breaks_fp32), None)
    if first is None:
        what = f"the step is not finite in FP32 either: this is no matter of {form}"
        yield Finding("fp32", ("",), what, "look at the inputs and the weights: mptrain diagnose with precision=fp32")
        return
    where = "its backward pass" if first.phase == "backward" else "its forward pass"
    yield Finding(
        "fp32",
        (first.module,),
        f"{first.kind} in FP32 as well, first in {first.operator} of {where}, though all that goes into it is finite, up to "
        f"{first.largest:.3g}: this is no matter of {form} or of a loss scale",
        "look at that operator: a root, a division or a logarithm needs an epsilon before it, and a branch that is not "
        "taken has a gradient all the same",
    )


#: Operators that put a constant in the place of values, as masks do.
_FILLS = frozenset({"masked_fill", "where", "fill", "full", "full_like", "scalar_tensor"})


def _constants(evidence: ScalingEvidence) -> Iterator[Finding]:
    form, name = FORMATS[evidence.compute], _NAMES[evidence.compute]
    groups: dict[tuple[float, str, str], list[str]] = {}
    for module, operator, value, becomes in evidence.constants:
        groups.setdefault((value, operator, becomes), []).append(module)
    for (value, operator, becomes), modules in groups.items():
        if becomes == "zero":
            attribute = next((evidence.epsilons[one][0] for one in modules if one in evidence.epsilons), "")
            written = f"{attribute}={value:g}" if attribute else f"{value:g}"
            yield Finding(
                "constant",
                tuple(modules),
                f"{written} vanishes in {name}, whose smallest number is {form.smallest_subnormal:.2g} ({operator})",
                "write at least 1e-5 there",
                _kept_all(evidence, modules),
            )
        else:
            raised = f"; torch refuses: {evidence.refused}" if evidence.refused else ""
            yield Finding(
                "constant",
                tuple(modules),
                f"{value:g} is beyond {form.max:g}, the largest number of {name} ({operator}){raised}",
                "fill a mask with -inf or torch.finfo(x.dtype).min, or use scaled_dot_product_attention"
                if _plain(operator) in _FILLS
                else "use a smaller number; a mask is better filled (masked_fill) than added or multiplied",
                _kept_all(evidence, modules),
            )


def _values(evidence: ScalingEvidence) -> Iterator[Finding]:
    form, name = FORMATS[evidence.compute], _NAMES[evidence.compute]
    for tensor, largest in evidence.lost_values.items():
        yield Finding(
            "value",
            (tensor,),
            f"holds a magnitude of {largest:g}, beyond the largest number of {name}: it is {form.max:g} there",
            "use smaller values (a mask of True and False, or -inf)",
            _kept_all(evidence, [tensor.rpartition(".")[0]]),
        )


def _norms(evidence: ScalingEvidence) -> Iterator[Finding]:
    if evidence.half_norms:
        yield Finding(
            "norm",
            tuple(evidence.half_norms),
            f"parameters and statistics of {_count(evidence.half_norms, 'norm')} are {_NAMES[evidence.compute]}",
            "keep them in FP32:",
            ("norms",),
        )


def _narrow(evidence: ScalingEvidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for module, operator in evidence.narrow:
        groups.setdefault(module, []).append(operator)
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for module, operators in groups.items():
        consequence = _consequence(evidence, module) if _explained_by(evidence, module, operators) else ""
        alike.setdefault((", ".join(sorted(set(operators))), consequence, module == LOSS), []).append(module)
    for (named, consequence, in_loss), modules in alike.items():
        yield Finding(
            "narrow",
            tuple(modules),
            f"{named} computed in {_NAMES[evidence.compute]}, which torch's autocast on CUDA has in FP32{consequence}",
            "compute the loss in FP32: logits.float() before it" if in_loss else "call .float() on what goes in",
            _kept_all(evidence, modules),
        )


def _kept_all(evidence: ScalingEvidence, modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for module in modules if module != LOSS for name in _keep(evidence, module)))


def _explained_by(evidence: ScalingEvidence, module: str, operators: Collection[str]) -> bool:
    """Return whether some of its operators make a module's output wrong: no other one leaves the range before them."""
    first = next((one for one in evidence.breaks_half if one.module == module), None)
    return module in wrong_outputs(evidence) and (first is None or _plain(first.operator) in operators)


def _plain(operator: str) -> str:
    """An operator's name as `mptrain.inspection.half_arithmetic` has it."""
    return operator.strip("_").removesuffix("_forward")


def _consequence(evidence: ScalingEvidence, module: str) -> str:
    errors = evidence.outputs[module]
    if not math.isfinite(errors.own):
        return "; what it says is not finite"
    return f"; what it says is {_percent(errors.own)} off FP64"


def _casts(evidence: ScalingEvidence) -> Iterator[Finding]:
    """Casts to the half-precision dtype that the mode does not have, which loses bits or range on the way there."""
    modules = tuple(dict.fromkeys(module for module, dtype in evidence.casts if dtype != evidence.compute))
    if modules:
        other = next(dtype for dtype in _NAMES if dtype != evidence.compute)
        loses = "three bits of each value" if other == "bfloat16" else "what lies outside of FP16's range"
        yield Finding(
            "cast",
            modules,
            f"casts to {_NAMES[other]} in a network that computes in {_NAMES[evidence.compute]}, which loses {loses}",
            "cast to the dtype of what comes in (x.dtype), or to FP32",
        )


def _no_gradient(evidence: ScalingEvidence) -> Iterator[Finding]:
    if evidence.no_gradient:
        yield Finding(
            "no_gradient",
            tuple(evidence.no_gradient),
            f"{_count(evidence.no_gradient, 'parameter')} get{'s' if len(evidence.no_gradient) == 1 else ''} no gradient",
            "look for detach(), no_grad() or .data on the way to the loss, or freeze them on purpose",
        )


def _proportion(evidence: ScalingEvidence) -> Iterator[Finding]:
    behind = [module for module in evidence.modules if not module.in_proportion]
    if not behind:
        return
    where = tuple(evidence.breaks) or (behind[-1].name,)
    yield Finding(
        "proportion",
        where,
        "gradients do not follow the loss scale: in FP32 already, those of "
        f"{_count(behind, 'module')} ({_first(behind)}) change by up to {_percent(max(map(_fp32_shift, behind)))} with it",
        _LINEAR,
    )


def _ill_conditioned(evidence: ScalingEvidence) -> Iterator[Finding]:
    form = _NAMES[evidence.compute]
    hint = "look for differences of large numbers, or random numbers that depend on the dtype"
    for name, errors in evidence.outputs.items():
        if errors.fp32 > ILL_CONDITIONED_OUTPUT:  # those that follow are fed with it
            what = f"what it says in FP32 is {_percent(errors.fp32)} off FP64 already: this is no matter of {form}"
            yield Finding("fp32", (name,), what, hint)
            return
    if wrong := [module for module in evidence.modules if module.ill_conditioned]:
        off = _percent(wrong[-1].fp32)
        what = f"the backward pass in FP32 gets its gradients wrong by {off} already: this is no matter of {form}"
        yield Finding("fp32", _names(wrong[::-1]), what, hint)


def _overflows(evidence: ScalingEvidence) -> list[Finding]:
    never = [module for module in evidence.modules if module.judged and not module.finite]
    forward = any(math.isinf(evidence.outputs[name].own) for name in wrong_outputs(evidence))
    if not never or forward:  # what is infinite in the forward pass makes the gradients so
        return []
    return [
        Finding(
            "overflow",
            tuple(evidence.breaks) or _names(never[::-1]),
            f"gradients of {_count(never, 'module')} ({_first(never[::-1])}) are not finite at any scale: the backward pass in "
            f"{_NAMES[evidence.compute]} leaves the range by itself",
            "make what multiplies gradients there smaller",
            tuple(evidence.keep_backward),
        )
    ]


def _outputs(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    """The modules that make their output wrong themselves, where no other finding says why."""
    form = _NAMES[evidence.compute]
    alike: dict[tuple[bool, str], list[tuple[str, OutputErrors, Break | None]]] = {}
    for name in wrong_outputs(evidence):
        errors = evidence.outputs[name]
        first = next((one for one in evidence.breaks_half if one.module == name), None)
        module = name
        if first is None:  # the module around it computes what this one is given
            around = [one for one in evidence.breaks_half if _is_inside(name, one.module)]
            first = max(around, key=lambda one: len(one.module), default=None)
            module = first.module if first is not None else name
        if not (any(module in _modules(cause) for cause in causes) and _is_known(evidence, module, first)):
            key = math.isfinite(errors.half), first.operator if first is not None else ""
            alike.setdefault(key, []).append((module, errors, first))
    for members in alike.values():
        where = tuple(dict.fromkeys(module for module, _, _ in members))
        _, errors, first = max(members, key=lambda one: one[1].half)
        explained = (
            errors.explained if math.isfinite(errors.explained) else EPSILONS * FORMATS[evidence.compute].epsilon
        )
        off = f"{_percent(errors.half)} off FP64, where rounding explains {_percent(explained)}"
        beyond = ""
        if first is not None:
            beyond = f": {first.operator} gives {first.kind} there, though all that goes into it is finite, up to {first.largest:.3g}"
        elif not math.isfinite(errors.own) and errors.largest > FORMATS[evidence.compute].max:
            beyond = f": it reaches {errors.largest:.3g} in FP64"
        yield Finding(
            "output",
            where,
            f"what it says in {form} is {off if math.isfinite(errors.half) else 'not finite'}{beyond}",
            "look for arithmetic in half that ought to be FP32",
            _kept_all(evidence, where),
        )


def _is_known(evidence: ScalingEvidence, module: str, first: Break | None) -> bool:
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
    return first is None or _plain(first.operator) in operators


def _errors(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    wrong = [module for module in evidence.modules if module.wrong]
    known = {name for cause in causes for name in _modules(cause)}
    where = [name for name in evidence.breaks if not any(name == one or _is_inside(name, one) for one in known)]
    if not wrong or (evidence.breaks and not where):
        return
    last = wrong[-1]  # gradients come from behind
    others = f", and {_count(wrong[:-1], 'module')} before it" if wrong[:-1] else ""
    yield Finding(
        "error",
        tuple(where) or (last.name,),
        f"the backward pass gets the gradients of {_shown(last.name)} wrong by {_percent(last.best)} at the best scale, where "
        f"rounding explains {_percent(last.tolerance)}{others}",
        "look for arithmetic in half there that ought to be FP32",
        tuple(evidence.keep_backward),
    )


def _drifts(evidence: ScalingEvidence) -> Iterator[Finding]:
    if wrong := [module for module in evidence.modules if module.drifts]:
        last = wrong[-1]
        top = max(last.finite)
        others = f", and {_count(wrong[:-1], 'module')} before it" if wrong[:-1] else ""
        yield Finding(
            "drift",
            tuple(evidence.breaks) or (last.name,),
            f"gradients do not follow the loss scale in {_NAMES[evidence.compute]}: those of {_shown(last.name)} are "
            f"{_percent(last.best)} off at best and {_percent(last.errors[top])} at 2^{top}, where they are finite{others}",
            _LINEAR,
            _kept_all(evidence, evidence.breaks),
        )


def _range(evidence: ScalingEvidence) -> list[Finding]:
    judged = [module for module in evidence.modules if module.judged and module.good]
    if scales_of(evidence.modules).good:
        return []
    if never := [one for one in evidence.modules if one.judged and one.underflows and not one.good]:
        worst = max(never, key=lambda one: one.best)
        return [
            Finding(
                "range",
                _names(never[::-1]),
                f"gradients of {_count(never, 'module')} ({_first(never[::-1])}) underflow at every scale: those of "
                f"{_shown(worst.name)} are {_percent(worst.best)} off at 2^{max(worst.finite)}, the highest that is finite",
                "make what multiplies gradients on the way to them larger",
                tuple(evidence.keep_backward) or ("",),
            )
        ]
    if not judged:
        return []
    lowest, highest = max(judged, key=lambda one: one.good[0]), min(judged, key=lambda one: one.good[-1])
    return [
        Finding(
            "range",
            (lowest.name, highest.name),
            f"no loss scale suits all modules: {_shown(lowest.name)} needs 2^{lowest.good[0]} or more, "
            f"{_shown(highest.name)} 2^{highest.good[-1]} or less",
            "make what multiplies gradients on the way to the former larger",
            tuple(evidence.keep_backward) or ("",),
        )
    ]


def _configured(evidence: ScalingEvidence) -> Iterator[Finding]:
    scales = scales_of(evidence.modules)
    for learner, (scale, constant) in evidence.scales.items():
        if not constant or not scales.good or scales.suits(scale) is not False:
            continue
        low, high = scales.good[0], scales.good[-1]
        if scale > 2.0**high:
            judged = [module for module in evidence.modules if module.judged]
            first = min(judged, key=lambda one: one.good[-1])
            why = f"too high for {_shown(first.name)}"
        else:
            judged = [module for module in evidence.modules if module.judged]
            worst = max(judged, key=lambda one: one.good[0])
            at = min(scales.tried, key=lambda one: abs(one - math.log2(scale)))
            why = f"gradients underflow, first in {_shown(worst.name)}, by {_percent(worst.shifts[at])}"
        whose = "" if learner == "main" else f"learners.{learner}."
        yield Finding(
            "scale",
            (f"{whose}scaler",),
            f"the configured scale {scale_in_words(scale)} is outside of 2^{low} to 2^{high}: {why}",
            f"write {whose}scaler=static {whose}scaler.scale={2 ** (scales.best or 0)}, or use a dynamic scaler; "
            "mptrain recommend knows more steps than the first"
            if not whose
            else f"give the learner a scale of {2 ** (scales.best or 0)} ({whose}scaler), or a dynamic scaler",
        )


def _fp32_shift(module: ModuleScaling) -> float:
    reference = module.distances.reference
    return module.distances.fp32_shift / reference if reference else math.inf


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "infinity"
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _names(modules: Sequence[ModuleScaling]) -> tuple[str, ...]:
    return tuple(module.name for module in modules)


def _shown(name: str) -> str:
    return name or "the model itself"


def _first(modules: Sequence[ModuleScaling]) -> str:
    names = [_shown(module.name) for module in modules]
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
