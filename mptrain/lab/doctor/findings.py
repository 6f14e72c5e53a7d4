"""Findings (problems for the user) of ``mptrain doctor``, derived from evidence about a network in half precision.

Causes come first. Consequences of a cause are omitted: other findings about the same module, and gradients that are
wrong or not finite at any scale because of it. Independent problems of other modules are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from mptrain.engine.module_trail import LOSS, is_inside
from mptrain.engine.observer import Operation
from mptrain.lab.finding import Finding, label, operator_name
from mptrain.lab.step.module_tensors import HANDED, owner
from mptrain.lab.step.ranges import (
    EPSILONS,
    ModuleScaling,
    OperatorError,
    OutputErrors,
    ScalingEvidence,
    lost_boundary,
    scales_of,
    spoiling_boundary,
)
from mptrain.system.words import listed, scale_in_words, share

_NAMES = {"float16": "FP16", "bfloat16": "BF16"}

#: Operators that replace values by a constant, as masks do.
_FILLS = frozenset({"masked_fill", "where", "fill", "full", "full_like", "scalar_tensor"})

#: Operators of losses, whose gradient is a difference that shrinks as a network learns: half precision rounds it away.
_LOSSES = frozenset(
    {
        "softmax", "log_softmax", "nll_loss", "nll_loss2d", "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "soft_margin_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip

_FILL = "fill a mask with -inf or torch.finfo(x.dtype).min, or use scaled_dot_product_attention"
_NO_FILL = "use a smaller number; apply masks with masked_fill rather than by adding or multiplying"

_LINEAR = "its backward must be linear in the incoming gradient: check for a clamp, a constant, a threshold or a cast"
_CONDITION = "check for differences of large numbers, or random numbers that depend on the dtype"
_OWN_CAST = "leave casts to the precision mode, or compute that operator in FP32"
_OPERATOR = (
    "check that operator: a root, a division or a logarithm needs an epsilon in its input, and a torch.where branch "
    "that is not selected still has a gradient"
)

_ALL_MASKED = "a softmax over a row that is -inf everywhere is 0 / 0: leave one entry of each row unmasked"


def findings(evidence: ScalingEvidence) -> list[Finding]:
    """Return all problems of training a network in a half-precision mode, causes first.

    Their kinds are ``refused``, ``input``, ``constant``, ``value``, ``norm``, ``changed``, ``narrow``, ``cast``,
    ``output``, ``headroom``, ``of_one``, ``no_gradient``, ``zero_gradient``, ``saddle``, ``proportion``, ``fp32``; for
    gradients ``overflow``, ``error``, ``drift``, ``range``; and ``scale``. If the step is not finite in FP32, there are
    no findings on gradients and scales.
    """
    causes = [
        *_refused(evidence),
        *_inputs(evidence),
        *_constants(evidence),
        *_stored(evidence),
        *_narrow(evidence),
        *_casts(evidence),
        *_of_one(evidence),
    ]
    judged, tolerance = [module for module in evidence.modules if module.judged], EPSILONS * evidence.form.epsilon
    agree = all(errors.half <= errors.allowed(tolerance) for errors in evidence.outputs.values())
    if (
        judged and agree and not any(module.wrong or not module.good for module in judged)
    ):  # nothing depends on infinities
        # BF16 has the range of FP32: norms in it lose nothing that the errors do not show.
        harmless = {"constant", "norm"} if evidence.compute == "bfloat16" else {"constant"}
        causes = [
            replace(cause, minor=cause.minor or (cause.kind in harmless and cause.hint != _FILL)) for cause in causes
        ]
    if not evidence.fp32_finite:
        return [*_not_finite_in_fp32(evidence), *causes, *_no_gradient(evidence)]
    causes += _outputs(evidence, causes)
    problems = [*causes, *_no_gradient(evidence), *_proportion(evidence), *_ill_conditioned(evidence)]
    if evidence.modules:
        problems += [*_overflows(evidence), *_errors(evidence, causes), *_drifts(evidence)]
    problems += _headroom(evidence, problems)
    if evidence.modules and not why_no_range(evidence, problems):
        problems += _range(evidence) or _configured(evidence)
    return problems


def why_no_range(evidence: ScalingEvidence, problems: Sequence[Finding]) -> str:
    """Return the reason why the range of usable loss scales cannot be determined, as a phrase; empty if it can."""
    kinds = {finding.kind for finding in problems}
    if not evidence.fp32_finite:
        return "FP32 is not finite either, so loss scales are not evaluated"
    if not evidence.modules:
        return "gradients could not be computed"
    if wrong_outputs(evidence):
        return "outputs are wrong, so loss scales are not evaluated"
    if kinds & {"proportion", "drift"}:
        return "gradients are not proportional to the loss scale, so loss scales are not evaluated"
    if kinds & {"error", "overflow"}:
        return "no loss scale makes all gradients correct"
    return ""


def wrong_outputs(evidence: ScalingEvidence) -> dict[str, str]:
    """Return the modules whose own arithmetic is wrong by more than rounding explains, in an output or between calls.

    Each has the boundary at which it is most wrong, a key of ``evidence.outputs``. Modules that are already wrong in
    FP32, or wrong only because of their inputs, are left out. If there are none, `lost_boundary` or
    `spoiling_boundary` may blame one.
    """
    tolerance, worst = EPSILONS * evidence.form.epsilon, dict[str, str]()
    for boundary, errors in evidence.outputs.items():
        if not errors.half <= errors.allowed(tolerance) and errors.own > tolerance and not errors.ill_conditioned:
            before = worst.get(owner(boundary))
            if before is None or errors.own > evidence.outputs[before].own:
                worst[owner(boundary)] = boundary
    if not worst and (lost := lost_boundary(evidence.outputs, evidence.modules, evidence.form)):
        worst[owner(lost[0])] = lost[0]
    if not worst and (spoiling := spoiling_boundary(evidence.outputs, evidence.modules, evidence.form)) is not None:
        worst[owner(spoiling)] = spoiling
    return worst


def wrong_gradients(modules: Sequence[ModuleScaling]) -> tuple[int, list[str]] | None:
    """Return the exponent of a loss scale, and the names of the modules with wrong gradients at that scale.

    None if one of the scales tried is usable for all modules, or if no module can be judged.
    """
    judged = [module for module in modules if module.judged]
    if wrong := [module for module in judged if module.wrong or not module.finite]:
        last = wrong[-1]
        return min(last.errors, key=lambda exponent: last.errors[exponent]), [module.name for module in wrong]
    if scales_of(modules).good or not judged:
        return None
    highest = min(module.good[-1] if module.good else 0 for module in judged)
    return highest, [module.name for module in judged if highest not in module.good]


def proposals(problems: Sequence[Finding], evidence: ScalingEvidence) -> Iterator[str]:
    """Yield the overrides to try for findings that keep modules in FP32, the least intrusive first."""
    kept = dict.fromkeys(name for finding in problems for name in finding.keep)
    kept |= dict.fromkeys(_keep(evidence, evidence.close) if kept else ())
    outermost = [name for name in kept if name != LOSS and not any(is_inside(name, outer) for outer in kept)]
    if outermost and "" not in kept:
        yield f"precision.keep_fp32=[{','.join(dict.fromkeys([*evidence.keep_fp32, *outermost]))}]"
    wide = f"precision={'amp_dynamic' if evidence.compute == 'float16' else 'amp_bf16'}"
    if evidence.lost_columns:
        yield wide
    if kept and evidence.compute == "float16":
        yield f"precision={'amp_bf16' if evidence.autocast else 'bf16'}"
    if kept and not evidence.autocast:  # the inputs stay FP32
        yield wide


def with_words(
    problems: Sequence[Finding],
    words: str | None,
    advise: Callable[[str], str] = "set {}".format,
    zero: Sequence[str] = (),
) -> list[Finding]:
    """Return findings whose hints name an override that was tried, as ``advise`` puts it; None if none helped.

    ``zero`` names the modules whose gradients are zero on the batch, so that nothing was seen of what it does to them.
    """
    if words is None:
        return list(problems)

    def hint(finding: Finding) -> str:
        unseen = [name for name in zero if any(name == module or is_inside(name, module) for module in finding.where)]
        but = f" (not seen: the gradients of {listed(unseen, 3)} are zero on this batch)" if unseen else ""
        return f"{finding.hint}, or {advise(words)}{but}"

    return [replace(finding, hint=hint(finding)) if finding.keep else finding for finding in problems]


def _keep(evidence: ScalingEvidence, modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to keep in FP32; instead of one that is kept, or whose output does not fit, its parent."""
    kept = []
    for module in modules:
        if (name := module) != LOSS:
            while name and (_largest(evidence, name) > evidence.form.max or name in evidence.keep_fp32):
                name = name.rpartition(".")[0]
            kept.append(name)
    return tuple(dict.fromkeys(kept))


def _largest(evidence: ScalingEvidence, name: str) -> float:
    """Return the largest magnitude of a module's output; if it returns that of its last submodule, of the latter."""
    within = (
        boundary
        for boundary in reversed(list(evidence.outputs))
        if HANDED not in boundary and is_inside(boundary, name)
    )
    errors = evidence.outputs.get(name) or evidence.outputs.get(next(within, ""))
    return errors.largest if errors else 0.0


def _not_finite_in_fp32(evidence: ScalingEvidence) -> Iterator[Finding]:
    form = _NAMES[evidence.compute]
    if not evidence.breaks_fp32:
        what = f"the step is not finite in FP32 either: {form} is not the cause"
        yield Finding("fp32", ("",), what, "check the inputs and weights with mptrain diagnose and precision=fp32")
        return
    first = evidence.breaks_fp32[0]
    if "float16" in (*first.inputs, *(counts.dtype for counts in first.outputs)):
        what = (
            f"{operator_name(first)} in the {first.phase} pass returns {first.kind} in FP16, for {first.given}: "
            "the model computes it there itself, whatever the precision"
        )
        yield Finding("fp32", (first.module,), what, _OWN_CAST, operator=first.operator)
        return
    what = (
        f"{operator_name(first)} in the {first.phase} pass returns {first.kind} in FP32 too, for {first.given}: "
        f"neither {form} nor the loss scale is the cause"
    )
    masked = "softmax" in first.operator and not first.finite_inputs
    yield Finding("fp32", (first.module,), what, _ALL_MASKED if masked else _OPERATOR, operator=first.operator)


def _refused(evidence: ScalingEvidence) -> Iterator[Finding]:
    if evidence.raised_in is not None:
        what = f"raises an error in {_NAMES[evidence.compute]} and not in FP32: {evidence.refused}"
        hint = "check for an index or a size that is computed in half precision before it"
        keep = _keep(evidence, [evidence.raised_in.rpartition(".")[0]])
        yield Finding("refused", (evidence.raised_in,), what, hint, keep)


def _inputs(evidence: ScalingEvidence) -> Iterator[Finding]:
    if evidence.lost_columns:
        what = f"the cast to {_NAMES[evidence.compute]} rounds away most of {evidence.lost_columns}"
        yield Finding("input", ("inputs",), what, "standardise the inputs in the data set", ("",))


def _constants(evidence: ScalingEvidence) -> Iterator[Finding]:
    form, name = evidence.form, _NAMES[evidence.compute]
    groups: dict[tuple[float, str, str], list[str]] = {}
    for module, operator, value, becomes in evidence.constants:
        if becomes != "unneeded" or (module, operator, value, "zero") not in evidence.constants:
            groups.setdefault((value, operator, becomes), []).append(module)
    for (value, operator, becomes), modules in groups.items():
        if becomes != "infinite":
            attribute = next((f"{evidence.epsilons[module]}=" for module in modules if module in evidence.epsilons), "")
            smallest = f"whose smallest number is {form.smallest_subnormal:.2g} ({operator})"
            without = ", which changes no result on this batch" if becomes == "unneeded" else ""
            what, hint = f"{attribute}{value:g} rounds to zero in {name}, {smallest}{without}", "use at least 1e-5"
        else:
            raised = f"; torch raises an error: {evidence.refused}" if evidence.refused else ""
            what = f"{value:g} is beyond {form.max:g}, the largest {name} number ({operator}){raised}"
            hint = _FILL if _plain(operator) in _FILLS else _NO_FILL
        minor = becomes == "unneeded"
        yield Finding("constant", tuple(modules), what, hint, _keep(evidence, modules), operator, minor=minor)


def _stored(evidence: ScalingEvidence) -> Iterator[Finding]:
    name, norms = _NAMES[evidence.compute], evidence.half_norms
    for tensor, largest in evidence.lost_values.items():
        beyond = f"beyond {evidence.form.max:g}, the largest {name} number"
        what, hint = (
            f"contains a magnitude of {largest:g}, {beyond}",
            "use smaller values; for a mask, use booleans or -inf",
        )
        yield Finding("value", (tensor,), what, hint, _keep(evidence, [tensor.rpartition(".")[0]]))
    if norms:
        what = f"parameters and statistics of {_count(norms, 'norm layer')} are {name}"
        yield Finding("norm", tuple(norms), what, "keep them in FP32", ("norms",))
    if changed := [tensor_name for tensor_name in evidence.rounded if tensor_name.rpartition(".")[0] not in norms]:
        what = f"forward passes change {_count(changed, 'tensor')} in {name}, which rounds small changes away"
        keep = _keep(evidence, [tensor_name.rpartition(".")[0] for tensor_name in changed])
        yield Finding("changed", tuple(changed), what, "keep running statistics and counters in FP32", keep)


def _narrow(evidence: ScalingEvidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for module, operator in evidence.narrow:
        groups.setdefault(module, []).append(operator)
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for module, operators in groups.items():
        consequence, first = "", _first_break(evidence, module)
        # These operators make the output wrong unless another one overflows before them.
        wrong, inexact = wrong_outputs(evidence).get(module), evidence.operators.get(module)
        guilty = _plain(operator_name(first)) if first is not None else _plain(inexact.operator) if inexact else ""
        if wrong is not None and (not guilty or guilty in operators):
            own = evidence.outputs[wrong].own
            consequence = f"off by {error_share(own)} against FP64" if math.isfinite(own) else "not finite"
            consequence = f"; the output is {consequence}{_blame(first, inexact) if operators[1:] else ''}"
        alike.setdefault((", ".join(sorted(set(operators))), consequence, module == LOSS), []).append(module)
    for (named, consequence, in_loss), modules in alike.items():
        form = f"{_NAMES[evidence.compute]}, where torch's autocast on CUDA uses FP32"
        hint = "compute the loss in FP32, from logits.float()" if in_loss else "call .float() on the inputs"
        if maker := next((evidence.zeros_by[module] for module in modules if module in evidence.zeros_by), ""):
            hint = f"call .float() on the inputs of {maker}, which rounds values to zero"
        cancels = in_loss and not _LOSSES.isdisjoint(named.split(", "))
        what, minor = f"{named} in {form}{consequence}", not consequence and not cancels
        keep = () if minor else _keep(evidence, modules)
        yield Finding("narrow", tuple(modules), what, hint, keep, named, minor=minor)


def _headroom(evidence: ScalingEvidence, problems: Sequence[Finding]) -> Iterator[Finding]:
    known = _modules([finding for finding in problems if not finding.minor])
    alike: dict[str, list[tuple[str, str, float]]] = {}
    for module, operator, what, ratio in evidence.close_calls:
        if module not in known:
            alike.setdefault(operator, []).append((module, what, ratio))
    for operator, calls in alike.items():
        where = tuple(dict.fromkeys(module for module, _, _ in calls))
        reached = max(calls, key=lambda call: call[2])[1]
        when = f"after {evidence.later} steps in FP32" if evidence.later else "at the first step"
        what = f"{operator} in {_NAMES[evidence.compute]} may leave its range later: {reached}, {when}"
        yield Finding("headroom", where, what, "call .float() on its inputs", _keep(evidence, where), operator)


def _of_one(evidence: ScalingEvidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for module, operator in evidence.of_one:
        groups.setdefault(operator, []).append(module)
    for operator, modules in groups.items():
        stays = "its result is constant, and the gradient of what it is given zero, in every precision"
        what = f"{operator} over single elements: {stays}"
        hint = "normalise over more elements"
        yield Finding("of_one", tuple(modules), what, hint, (), operator, minor=not _without_any(evidence))


def _without_any(evidence: ScalingEvidence) -> bool:
    """Return whether parameters get no gradient other than zero, or zero up to rounding."""
    return bool(evidence.zero_gradient) or any(module.nothing for module in evidence.modules)


def _first_break(evidence: ScalingEvidence, module: str) -> Operation | None:
    return next((op for op in evidence.breaks_half if op.module == module), None)


def _blame(first: Operation | None, inexact: OperatorError | None) -> str:
    """Return the operator that makes an output wrong, as the end of a sentence; empty if it is not known."""
    if first is not None:
        return f": {operator_name(first)} returns {first.kind} for {first.given}"
    return f": rounding {inexact.operator} alone makes it {error_share(inexact.error)} wrong" if inexact else ""


def _plain(operator: str) -> str:
    """Return an operator's name in the form that `mptrain.lab.step.observation` uses."""
    return operator.strip("_").removesuffix("_forward")


def _casts(evidence: ScalingEvidence) -> Iterator[Finding]:
    modules = tuple(dict.fromkeys(module for module, dtype in evidence.casts if dtype != evidence.compute))
    if modules:
        other = next(dtype for dtype in _NAMES if dtype != evidence.compute)
        loses = "three bits of each value" if other == "bfloat16" else "values outside FP16's range"
        network = f"a network that computes in {_NAMES[evidence.compute]}"
        what = f"casts to {_NAMES[other]} in {network}, which loses {loses}"
        yield Finding("cast", modules, what, "cast to the dtype of the input (x.dtype), or to FP32")


def _no_gradient(evidence: ScalingEvidence) -> Iterator[Finding]:
    if names := tuple(evidence.no_gradient):
        what = f"{_count(names, 'parameter')} get{'s' if len(names) == 1 else ''} no gradient"
        hint = "check for detach(), no_grad() or .data on the way to the loss, or freeze them explicitly"
        yield Finding("no_gradient", names, what, hint, minor=True)
    if names := tuple(evidence.zero_gradient):
        what = f"the gradient of {_count(names, 'parameter')} is exactly zero on this batch, in FP64 too"
        yield Finding("zero_gradient", names, what, "", minor=True)
    if names := tuple(evidence.saddles):
        stays = (
            "is exactly zero, in FP64 too, and stays zero while the others train: factors of one product are all zero"
        )
        hint = "initialise all but one of the factors with other numbers than zero"
        yield Finding("saddle", names, f"the gradient of {_count(names, 'parameter')} {stays}", hint)


def _proportion(evidence: ScalingEvidence) -> Iterator[Finding]:
    if behind := [module for module in evidence.modules if not module.in_proportion]:
        change = f"change by up to {error_share(max(module.fp32_shift for module in behind))} with it"
        those = f"even in FP32, those of {_count(behind, 'module')} ({_first(behind)}) {change}"
        where = tuple(evidence.breaks) or (behind[-1].name,)
        what = f"gradients are not proportional to the loss scale: {those}"
        yield Finding("proportion", where, what, _LINEAR, minor=_right_unscaled(evidence))


def _right_unscaled(evidence: ScalingEvidence) -> bool:
    """Return whether no learner scales its loss, and all gradients are right so: what a scale would do is no matter."""
    right = all(
        module.errors.get(0, math.inf) <= module.allowed_loss for module in evidence.modules if not module.nothing
    )
    return right and all(scale == (1.0, True) for scale in evidence.scales.values())


def _ill_conditioned(evidence: ScalingEvidence) -> Iterator[Finding]:
    no_matter = f"against FP64: {_NAMES[evidence.compute]} is not the cause"
    for boundary, errors in evidence.outputs.items():
        if errors.ill_conditioned and boundary != LOSS:  # later modules use this output
            name = owner(boundary)
            if any(module == name for module, _ in evidence.of_one):  # rounding errors of zeros
                return
            what = f"the output is off by {error_share(errors.fp32)} in FP32 already, {no_matter}"
            yield Finding("fp32", (name,), what, _CONDITION)
            return
    if wrong := [module for module in evidence.modules[::-1] if module.ill_conditioned]:
        what = f"the gradients are off by {error_share(wrong[0].fp32)} in FP32 already, {no_matter}"
        yield Finding("fp32", _names(wrong), what, _CONDITION)


def _overflows(evidence: ScalingEvidence) -> Iterator[Finding]:
    never = [module for module in evidence.modules[::-1] if module.judged and not module.finite]
    # Infinities of the forward pass make the gradients infinite.
    if never and not any(math.isinf(evidence.outputs[boundary].half) for boundary in wrong_outputs(evidence).values()):
        leaves = f"the backward pass itself exceeds the range of {_NAMES[evidence.compute]}"
        what = f"gradients of {_count(never, 'module')} ({_first(never)}) are not finite at any scale: {leaves}"
        where, hint = tuple(evidence.breaks) or _names(never), "reduce the factors that multiply gradients there"
        yield Finding("overflow", where, what, hint, tuple(evidence.keep_backward))


def _outputs(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings on modules that make their output wrong themselves, unless another finding explains it."""
    form = _NAMES[evidence.compute]
    alike: dict[tuple[bool, str], list[tuple[str, str, OutputErrors, Operation | None]]] = {}
    known = _modules([cause for cause in causes if not cause.minor])
    for name, boundary in wrong_outputs(evidence).items():
        errors, module, first = evidence.outputs[boundary], name, _first_break(evidence, name)
        if first is None:  # a parent may compute the input of this module
            around = [op for op in evidence.breaks_half if is_inside(name, op.module)]
            first = max(around, key=lambda op: len(op.module), default=None)
            module = first.module if first is not None else name
        if module not in known or not _is_known(evidence, module, first):
            inexact = evidence.operators.get(module)
            operator = operator_name(first) if first is not None else inexact.operator if inexact else ""
            alike.setdefault((math.isfinite(errors.half), operator), []).append((module, boundary, errors, first))
    for (_, operator), members in alike.items():
        where = tuple(dict.fromkeys(module for module, _, _, _ in members))
        worst, boundary, errors, first = max(members, key=lambda member: member[2].half)
        explained = errors.explained if math.isfinite(errors.explained) else EPSILONS * evidence.form.epsilon
        off = f"off by {error_share(errors.half)} against FP64, rounding explains {error_share(explained)}"
        if errors.half <= errors.allowed(EPSILONS * evidence.form.epsilon):
            off = f"off by {error_share(errors.half)} against FP64, {error_share(explained)} by rounding alone"
        if first is None and not math.isfinite(errors.own) and errors.largest > evidence.form.max:
            beyond = f": it reaches {errors.largest:.3g} in FP64"
        else:
            beyond = _blame(first, evidence.operators.get(worst))
        child = boundary.partition(HANDED)[2]
        subject = f"what it hands to {child}" if child else "the output"
        what = f"{subject} in {form} is {off if math.isfinite(errors.half) else 'not finite'}{beyond}"
        hint = "check for half-precision arithmetic that should be FP32"
        if where == (LOSS,):
            what, hint = what.replace("the output", "its value", 1), "compute the loss in FP32, from logits.float()"
        yield Finding("output", where, what, hint, _keep(evidence, where), operator)


def _modules(causes: Sequence[Finding]) -> Collection[str]:
    """Return the modules that findings are about; for a parameter or buffer, its module."""
    return {name.rpartition(".")[0] if cause.kind == "value" else name for cause in causes for name in cause.where}


def _is_known(evidence: ScalingEvidence, module: str, first: Operation | None) -> bool:
    """Return whether earlier findings about a module explain its wrong output; ``first`` overflows first, if any."""
    if module in evidence.half_norms:
        return True
    inexact = evidence.operators.get(module)
    operators = {operator for name, operator in evidence.narrow if name == module}
    if (
        first is not None or inexact is None or math.isinf(inexact.error)
    ):  # numbers that vanish or overflow make infinities
        lost = (constant for constant in evidence.constants if constant[0] == module and constant[3] != "unneeded")
        operators |= {_plain(operator) for _, operator, *_ in lost}
    operators |= {"a cast" for name, dtype in evidence.casts if name == module and dtype != evidence.compute}
    guilty = {_plain(operator_name(first))} if first is not None else set()
    guilty |= {_plain(inexact.operator)} if inexact is not None else set()
    return not guilty or bool(guilty & operators)


def _errors(evidence: ScalingEvidence, causes: Sequence[Finding]) -> Iterator[Finding]:
    wrong, known = [module for module in evidence.modules if module.wrong], _modules(causes)
    where = tuple(
        name for name in evidence.breaks if not any(name == module or is_inside(name, module) for module in known)
    )
    if wrong and (where or not evidence.breaks):
        last = wrong[-1]  # the first one in the backward pass
        off = f"off by {error_share(last.best)} at the best scale, rounding explains {error_share(last.tolerance)}"
        what = f"the gradients of {label(last.name)} are {off}{_before(wrong)}"
        hint = "check its backward pass for half-precision arithmetic that should be FP32"
        minor = all(module.best <= module.allowed_loss for module in wrong)
        keep = () if minor else tuple(evidence.keep_backward)
        yield Finding("error", where or (last.name,), what, hint, keep, minor=minor)


def _drifts(evidence: ScalingEvidence) -> Iterator[Finding]:
    if wrong := [module for module in evidence.modules if module.drifts]:
        last, breaks = wrong[-1], tuple(evidence.breaks)
        top = max(last.finite)
        at_top = f"{error_share(last.errors[top])} at 2^{top}, although finite"
        off = f"off by {error_share(last.best)} at best and by {at_top}"
        those = f"those of {label(last.name)} are {off}{_before(wrong)}"
        what = f"gradients are not proportional to the loss scale in {_NAMES[evidence.compute]}: {those}"
        minor = _right_unscaled(evidence)
        keep = () if minor else _keep(evidence, breaks)
        yield Finding("drift", breaks or (last.name,), what, _LINEAR, keep, minor=minor)


def _before(wrong: Sequence[ModuleScaling]) -> str:
    return f"; {_count(wrong[:-1], 'more module')} affected" if wrong[:-1] else ""


def _range(evidence: ScalingEvidence) -> list[Finding]:
    judged = [module for module in evidence.modules if module.judged and module.good]
    if scales_of(evidence.modules).good:
        return []
    if never := [
        module for module in evidence.modules[::-1] if module.judged and module.underflows and not module.good
    ]:
        worst = max(never[::-1], key=lambda module: module.best)
        off = f"off by {error_share(worst.best)} at 2^{max(worst.finite)}, the highest finite scale"
        those = f"those of {label(worst.name)} are {off}"
        what = f"gradients of {_count(never, 'module')} ({_first(never)}) underflow at every scale: {those}"
        where, hint = _names(never), "increase the factors that multiply their gradients"
    elif judged:
        lowest, highest = (
            max(judged, key=lambda module: module.good[0]),
            min(judged, key=lambda module: module.good[-1]),
        )
        needs = f"{label(lowest.name)} needs 2^{lowest.good[0]} or more"
        what = f"no loss scale is usable for all modules: {needs}, {label(highest.name)} 2^{highest.good[-1]} or less"
        where, hint = (lowest.name, highest.name), "increase the factors that multiply the gradients of the former"
    else:
        return []
    return [Finding("range", where, what, hint, tuple(evidence.keep_backward) or ("",))]


def _configured(evidence: ScalingEvidence) -> Iterator[Finding]:
    scales, judged = scales_of(evidence.modules), [module for module in evidence.modules if module.judged]
    for learner, (scale, constant) in evidence.scales.items():
        where = "scaler" if learner == "main" else f"learners.{learner}.scaler"
        floor = evidence.floors.get(learner, 0.0)
        if not constant and scales.good and floor > 2.0 ** scales.good[-1]:
            top = f"gradients overflow above 2^{scales.good[-1]}"
            what = f"{top}, and {where}.min_scale={scale_in_words(floor)} keeps the loss scale higher"
            low = 2.0 ** max(scales.good[0], scales.good[-1] - 2)
            yield Finding("scale", (where,), what, f"set {where}.init_scale={low!r} {where}.min_scale={low!r}")
            continue
        if not constant or not scales.good or scales.suits(scale) is not False:
            continue
        low, high, best = scales.good[0], scales.good[-1], 2 ** (scales.best or 0)
        if scale > 2.0**high:
            why = f"too high for {label(min(judged, key=lambda module: module.good[-1]).name)}"
        else:
            worst = max(judged, key=lambda module: module.good[0])
            at = min(scales.tried, key=lambda exponent: abs(exponent - math.log2(scale)))
            why = f"gradients underflow, first in {label(worst.name)}, by {error_share(worst.shifts[at])}"
        what = f"the loss scale {scale_in_words(scale)} is outside the usable range 2^{low} to 2^{high}: {why}"
        hint = f"set {where} to a scale of {best}, or use a dynamic scaler"
        if learner == "main":
            more = "mptrain recommend evaluates more steps than the first"
            hint = f"set scaler=static scaler.scale={best}, or use a dynamic scaler; {more}"
        yield Finding("scale", (where,), what, hint)


def error_share(error: float) -> str:
    """Format a relative error as a percentage, or as ``inf``."""
    # `share` shows a dash for infinity, as for what was not measured.
    return "inf" if math.isinf(error) else share(error)


def _names(modules: Sequence[ModuleScaling]) -> tuple[str, ...]:
    return tuple(module.name for module in modules)


def _first(modules: Sequence[ModuleScaling]) -> str:
    return ", ".join(label(module.name) for module in modules[:3]) + (", ..." if modules[3:] else "")


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
