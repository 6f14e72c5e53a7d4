"""From evidence about a network in half precision to findings: what is wrong, where, and what to do.

Causes come first. Where a cause is known, what follows from it (gradients that are wrong, or nowhere finite) is not said again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mptrain.diagnostics.scaling import EPSILONS, ILL_CONDITIONED_OUTPUT, Finding, ModuleScaling, scales_of
from mptrain.diagnostics.trail import LOSS
from mptrain.numerics.formats import FORMATS, scale_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mptrain.diagnostics.scaling import ScalingEvidence

#: What a module says is right up to so many times the error that rounding explains (measured: see `mptrain.diagnostics.scaling`).
TIMES_ROUNDED = 2.0

_LINEAR = "its backward must be linear in what it is given: look there for a clamp, a constant, a threshold or a cast"

_NAMES = {"float16": "FP16", "bfloat16": "BF16"}


def findings(evidence: ScalingEvidence) -> list[Finding]:
    """All that is wrong, causes before consequences.

    Kinds: ``constant``, ``value``, ``norm``, ``narrow``, ``cast``, ``no_gradient``, ``proportion``, ``fp32``; and where none of the
    first five explains it ``overflow``, ``output``, ``error``, ``drift``, ``range``, ``scale``.
    """
    explained = [*_constants(evidence), *_values(evidence), *_norms(evidence), *_narrow(evidence), *_casts(evidence)]
    found = [*explained, *_no_gradient(evidence), *_proportion(evidence), *_ill_conditioned(evidence)]
    symptoms: list[Finding] = []
    if evidence.modules and not explained:
        symptoms = list(_outputs(evidence) or _overflows(evidence))
        symptoms += [*_errors(evidence), *_drifts(evidence)]
        symptoms = symptoms or _range(evidence)
        found += symptoms
    if evidence.modules and not symptoms:
        found += _configured(evidence)
    return found


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
                "write at least 1e-5 there, or compute this in FP32: name the module in precision.keep_fp32",
            )
        else:
            raised = f"; torch refuses: {evidence.refused}" if evidence.refused else ""
            yield Finding(
                "constant",
                tuple(modules),
                f"{value:g} is beyond {form.max:g}, the largest number of {name} ({operator}){raised}",
                "mask with -inf, torch.finfo(x.dtype).min or scaled_dot_product_attention, or name the module in "
                "precision.keep_fp32",
            )


def _values(evidence: ScalingEvidence) -> Iterator[Finding]:
    form, name = FORMATS[evidence.compute], _NAMES[evidence.compute]
    for tensor, largest in evidence.lost_values.items():
        yield Finding(
            "value",
            (tensor,),
            f"holds a magnitude of {largest:g}, which is infinite in {name} (beyond {form.max:g})",
            "use smaller values (a mask of True and False, or -inf), or name its module in precision.keep_fp32",
        )


def _norms(evidence: ScalingEvidence) -> Iterator[Finding]:
    if evidence.half_norms:
        yield Finding(
            "norm",
            tuple(evidence.half_norms),
            f"parameters and statistics of {_count(evidence.half_norms, 'norm')} are {_NAMES[evidence.compute]}",
            "keep them in FP32: precision.keep_fp32=[norms]",
        )


def _narrow(evidence: ScalingEvidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for module, operator in evidence.narrow:
        groups.setdefault(module, []).append(operator)
    for module, operators in groups.items():
        in_loss = module == LOSS
        yield Finding(
            "narrow",
            (module,),
            f"{', '.join(sorted(set(operators)))} computed in {_NAMES[evidence.compute]}, which torch's autocast on CUDA has in FP32",
            "compute the loss in FP32: logits.float() before it"
            if in_loss
            else "call .float() on what goes in, or name the module in precision.keep_fp32",
        )


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
            f"{_count(evidence.no_gradient, 'parameter')} get no gradient",
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
    if not never:
        return []
    return [
        Finding(
            "overflow",
            _names(never[::-1]),
            f"gradients are not finite at any scale: {_NAMES[evidence.compute]} overflows before the loss is scaled",
            "mptrain diagnose with the same words names the operator; precision.keep_fp32 or precision=bf16 mends it",
        )
    ]


def _outputs(evidence: ScalingEvidence) -> list[Finding]:
    form, tolerance = _NAMES[evidence.compute], EPSILONS * FORMATS[evidence.compute].epsilon
    for name, errors in evidence.outputs.items():  # the first one alone: those that follow are fed with it
        if errors.fp32 > ILL_CONDITIONED_OUTPUT:
            break
        if errors.half > max(tolerance, TIMES_ROUNDED * errors.explained) or not math.isfinite(errors.half):
            off = f"{_percent(errors.half)} off FP64, where rounding explains {_percent(errors.explained)}"
            return [
                Finding(
                    "output",
                    (name,),
                    f"what it says in {form} is {off if math.isfinite(errors.half) else 'not finite'}",
                    "look for arithmetic in half that ought to be FP32, or name the module in precision.keep_fp32",
                )
            ]
    return []


def _errors(evidence: ScalingEvidence) -> Iterator[Finding]:
    if wrong := [module for module in evidence.modules if module.wrong]:
        last = wrong[-1]  # gradients come from behind
        others = f", and {_count(wrong[:-1], 'module')} before it" if wrong[:-1] else ""
        yield Finding(
            "error",
            (last.name,),
            f"the backward pass gets its gradients wrong by {_percent(last.best)} at the best scale, where rounding explains "
            f"{_percent(last.tolerance)}{others}",
            "look at what its output goes through, and at itself, for arithmetic in half that ought to be FP32",
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
        )


def _range(evidence: ScalingEvidence) -> list[Finding]:
    judged = [module for module in evidence.modules if module.judged and module.good]
    if scales_of(evidence.modules).good or not judged:
        return []
    lowest, highest = max(judged, key=lambda one: one.good[0]), min(judged, key=lambda one: one.good[-1])
    return [
        Finding(
            "range",
            (lowest.name, highest.name),
            f"no loss scale suits all modules: {_shown(lowest.name)} needs 2^{lowest.good[0]} or more, "
            f"{_shown(highest.name)} 2^{highest.good[-1]} or less",
            f"name {_shown(highest.name)} in precision.keep_fp32, or use precision=bf16",
        )
    ]


def _configured(evidence: ScalingEvidence) -> Iterator[Finding]:
    scales = scales_of(evidence.modules)
    for learner, (scale, constant) in evidence.scales.items():
        if not constant or not scales.good or scales.suits(scale) is not False:
            continue
        low, high = scales.good[0], scales.good[-1]
        if scale > 2.0**high:
            first = next(module for module in evidence.modules if module.judged and high in module.good[-1:])
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
