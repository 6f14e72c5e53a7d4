"""Check of whether a model's first training step is correct in a precision, for ``mptrain doctor``. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from mptrain.config.schema import Config
from mptrain.engine.module_trail import LOSS
from mptrain.engine.observer import Operation
from mptrain.engine.parts import Parts
from mptrain.engine.rehearsal import rehearse
from mptrain.lab.doctor.findings import (
    error_share,
    findings,
    proposals,
    why_no_range,
    with_words,
    wrong_gradients,
    wrong_outputs,
)
from mptrain.lab.doctor.headroom import CloseCall, after_some_steps, close_calls, worth_a_look
from mptrain.lab.evaluation_check import check_evaluation
from mptrain.lab.finding import CLOSE, Finding, label, operator_name
from mptrain.lab.step import gradients
from mptrain.lab.step.accuracy import largest_errors, why_worse
from mptrain.lab.step.gradients import Gradients, runs_in_float64, scaled_gradients
from mptrain.lab.step.module_tensors import HANDED, Outputs
from mptrain.lab.step.observation import StepInspection, half_weights, inspect_step, lost_columns
from mptrain.lab.step.ranges import (
    NOTHING,
    ModuleScaling,
    ScalingEvidence,
    UsableScales,
    by_module,
    is_spoiled,
    result_error,
    scales_of,
)
from mptrain.lab.step.repetition import with_overrides
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.apply import DTYPES
from mptrain.precision.census import dtype_name
from mptrain.precision.policy import FP32
from mptrain.precision.support import require_support, resolve_device, unaligned_in_words
from mptrain.run.build.parts import build
from mptrain.system.errors import ConfigError, DataError, EnvironmentRefused
from mptrain.system.words import counted, listed, percent, scale_in_words
from mptrain.workloads.base.batch import Batch

#: Highest exponent of the scales tried, from 2^0 on; seconds per pass above which only every second scale is tried.
HIGHEST, SLOW = 24, 5.0

#: Maximum number of values in all module outputs of the step; of larger batches, fewer samples are examined. The FP64
#: passes take about 50 bytes for each value.
MOST_VALUES = 2**27


@dataclass(frozen=True)
class ScalingReport:
    """Result of `check_scaling`: errors of outputs and gradients in half precision, and usable loss scales.

    Attributes:
        evidence: Measurements and observations from which the findings are derived.
        findings: Problems found, causes first, without minor ones, which are among the notes; empty if there is none.
        modules: Gradient errors by module in call order; empty if the passes failed.
        reference: Dtype of the reference gradients: ``float64`` or ``float32``; empty if the passes failed.
        samples: Number of samples in the batch.
        notes: Differences from training, and the minor findings, one sentence each.
        minor: The minor findings.
    """

    evidence: ScalingEvidence
    findings: Sequence[Finding]
    modules: Sequence[ModuleScaling]
    reference: str
    samples: int
    notes: tuple[str, ...]
    minor: tuple[Finding, ...] = ()


def check_scaling(
    config: Config, tell: Callable[[str], None], advise: Callable[[str], str] = "set {}".format
) -> ScalingReport:
    """Compare the first step's gradients in a configuration's precision with those in FP64, at many loss scales.

    The scales are the powers of two from 2^0 to 2^24, or from 2^-24 if the gradient of the loss overflows at 2^0. No
    weight is updated. An override is part of a hint only if the same check finds no such problem with it. ``tell`` is
    called with progress messages, and ``advise`` makes an override a part of a hint.

    Raises:
        ConfigError: The precision is not half precision, or the configuration is inconsistent.
        EnvironmentRefused: The device does not support the precision.
        DataError: The data is missing or unusable.
    """
    policy = config.precision
    if not policy.half:
        raise ConfigError(
            f"precision={policy.name} computes nothing in half precision: there is nothing to check",
            "mptrain formats compares the gradients of a step in emulated formats with those in FP32"
            if policy.emulate is not None
            else "choose a half-precision mode, for example precision=amp_dynamic or precision=fp16_dynamic",
        )
    if config.inject.step is not None:
        raise ConfigError(
            f"inject.step={config.inject.step}: doctor checks a model without injected faults",
            "remove the inject options, or examine the step with the fault with mptrain diagnose",
        )
    require_support(policy, resolve_device(config.device))
    report = _check(config, tell)
    words = next(
        (
            override
            for override in proposals(report.findings, report.evidence)
            if _helps(config, override, report, tell)
        ),
        None,
    )
    if report.modules and not any(finding.kind == "fp32" for finding in report.findings):
        words = words or "precision=fp32"  # in which the check computed the step too
    zero = [module.name for module in report.modules if module.reference == 0]
    return replace(report, findings=with_words(report.findings, words, advise, zero))


def _helps(config: Config, words: str, report: ScalingReport, tell: Callable[[str], None]) -> bool:
    """Return whether an override removes all findings that it is proposed for, without large errors of its own."""
    try:
        changed = with_overrides(config, words)
        require_support(changed.precision, resolve_device(changed.device))
        after = _check(changed, lambda sentence: tell(f"with {words}: {sentence}"))
    except (ConfigError, EnvironmentRefused):
        return False
    before = largest_errors(report.evidence.outputs, report.modules) if report.modules else None
    stay = {(finding.kind, finding.where) for finding in report.findings if not finding.keep}
    new = {
        (finding.kind, finding.where) for finding in after.findings if finding.kind != "fp32"
    } - stay  # FP32 has the others too
    errors = largest_errors(after.evidence.outputs, after.modules)
    coarser = after.evidence.form.epsilon / report.evidence.form.epsilon
    return after.evidence.fp32_finite and not new and not why_worse(before, errors, coarser)


@dataclass(frozen=True)
class _HalfStep:
    """The first step in half precision, as the stages of `_check` share it.

    Attributes:
        batch: The prepared batch.
        operators: Its operators, in the order of their calls.
        in_fp32: Builds the network in FP32 again, and the batch, whose values are rounded as those of the step are.
    """

    parts: Parts
    batch: Batch
    form: Format
    inspection: StepInspection
    operators: Sequence[Operation]
    in_fp32: Callable[[], tuple[Parts, Batch]]


def _check(config: Config, tell: Callable[[str], None]) -> ScalingReport:
    """Check the first step in stages, each of which adds to the evidence; one that finds nothing usable is the last."""
    policy, form = config.precision, FORMATS[config.precision.compute]
    tell(f"one step in {policy.name}")
    batch, inspection, seconds, fewer = _inspect_first_step(config, form)
    evidence, half = inspection.evidence, DTYPES[policy.parameters]
    if evidence.refused:
        if evidence.raised_in is not None:  # an error in FP32 too is that of a model and a task that do not fit
            wide, _ = build(replace(config, precision=FP32))
            wide.model.train()
            rehearse(wide, wide.prepare(batch))
        return _report(evidence, findings(evidence), batch, fewer)

    tell("its gradients in FP32 and FP64")
    evidence, reference = _with_reference(config, batch, inspection, form)
    if reference is None:
        return _report(evidence, findings(evidence), batch, fewer)

    def in_fp32() -> tuple[Parts, Batch]:
        wide, _ = build(replace(config, precision=FP32))
        return wide, wide.prepare(batch).cast(half).cast(torch.float32)

    tell("its gradients at loss scales from 2^0 to 2^24")
    parts, _ = build(config)
    prepared = parts.prepare(batch)
    step = _HalfStep(parts, prepared, form, inspection, gradients.operators(parts, prepared), in_fp32)
    every = 2 if seconds > SLOW else 1
    evidence, breaks = _with_scales(step, reference, every, evidence)
    evidence = _with_wrong_outputs(step, evidence)
    evidence = _with_lost_values(step, reference, evidence)
    evidence = _with_backward(step, breaks, evidence)

    values = sum(tensor.numel() for several in inspection.outputs.values() for tensor in several)
    values += sum(param.numel() for param in parts.model.parameters())
    unseen: tuple[str, ...] = ()
    if not wrong_outputs(evidence):  # what follows from wrong values says nothing
        calls, later, unseen = _headroom(config, step.operators, form, values, tell)
        evidence = replace(evidence, close_calls=calls, later=later)
    notes = reference.notes if every == 1 else (*reference.notes, "only every second scale was tried: steps are slow")
    notes = (*fewer, *notes, *unseen, *_near_the_top(reference, inspection.outputs, form))
    notes += (odd,) if (odd := unaligned_in_words(parts.model)) else ()
    problems = findings(evidence)
    wide_batch = prepared.cast(torch.float32)
    faulty = None if evidence.breaks_half else check_evaluation(parts, lambda: in_fp32()[0], wide_batch)
    problems += [faulty[0]] if faulty is not None else []
    return _report(evidence, problems, batch, notes, evidence.modules, reference.dtype)


def _with_reference(
    config: Config, batch: Batch, inspection: StepInspection, form: Format
) -> tuple[ScalingEvidence, gradients.Reference | None]:
    """Add what FP32 shows, and return the reference gradients; None if nothing can be compared with them."""
    evidence, half = inspection.evidence, DTYPES[config.precision.parameters]
    wide, _ = build(replace(config, precision=FP32))
    unrounded = wide.prepare(batch)
    half_inputs = unrounded.cast(half).inputs
    if columns := lost_columns(unrounded, half):
        evidence = replace(evidence, lost_columns=columns)
    if not half_inputs.isfinite().all() and unrounded.inputs.isfinite().all():
        return evidence, None
    if not gradients.is_finite(wide, wide.prepare(batch)):
        breaking = [op for op in gradients.operators(wide, wide.prepare(batch)) if op.breaks]
        return replace(evidence, fp32_finite=False, breaks_fp32=breaking), None
    prepared = wide.prepare(batch)
    return evidence, gradients.compute_reference(wide, prepared, form, inspection.outputs, inspection.weights, half)


def _with_scales(
    step: _HalfStep, reference: gradients.Reference, every: int, evidence: ScalingEvidence
) -> tuple[ScalingEvidence, tuple[str, ...]]:
    """Add the errors of gradients at every so many powers of two as loss scale, and return where gradients break."""
    broken = next((op for op in step.operators if op.breaks), None)
    lowest = -HIGHEST if broken and (broken.phase, broken.module) == ("backward", LOSS) else 0
    measured = gradients.compare_scales(step.parts, step.batch, reference, range(lowest, HIGHEST + 1, every))
    modules = by_module(measured, step.form, step.inspection.order)
    breaks = reference.breaks or _breaks_in_half(step.parts, step.batch, modules)
    zero = [
        name
        for name, errors in reference.distances.items()
        if errors.elements and errors.reference == 0 == errors.expected
    ]
    saddles, dead = without_gradient(*step.in_fp32(), zero) if zero else ((), ())
    outputs = reference.outputs
    return replace(evidence, modules=modules, outputs=outputs, saddles=saddles, zero_gradient=dead), breaks


def _with_wrong_outputs(step: _HalfStep, evidence: ScalingEvidence) -> ScalingEvidence:
    """Add the operators that make outputs wrong, if any output is."""
    if not (wrong := wrong_outputs(evidence)):
        return evidence
    operations = [op for op in step.operators if op.phase == "forward"]
    return replace(
        evidence,
        breaks_half=[op for op in operations if op.breaks],
        close=_close(step.parts, operations, step.form),
        operators=gradients.operator_errors(
            (step.parts, step.batch), step.in_fp32, step.inspection.outputs, wrong, step.form
        ),
        zeros_by=_zeros_by(operations),
    )


def _with_lost_values(step: _HalfStep, reference: gradients.Reference, evidence: ScalingEvidence) -> ScalingEvidence:
    """Add values that FP32 holds and the format cannot, in tensors stored in the format: clamped or infinite."""
    lost = {
        name: exact
        for name, value in step.inspection.values.items()
        if step.form.max < (exact := reference.values.get(name, math.inf)) < math.inf and value != exact
    }
    return replace(evidence, lost_values=lost)


def _with_backward(step: _HalfStep, breaks: tuple[str, ...], evidence: ScalingEvidence) -> ScalingEvidence:
    """Add the modules in which gradients break, sought by themselves if gradients are wrong and none is known."""
    if breaks or not (suspects := wrong_gradients(evidence.modules)):
        return replace(evidence, breaks=breaks)
    scale, weights = 2.0 ** suspects[0], half_weights(step.parts.model)
    breaks, right = gradients.compare_backward(
        (step.parts, step.batch),
        step.in_fp32,
        step.inspection.outputs,
        scale,
        suspects[1],
        step.form,
        weights,
    )
    keep = tuple(dict.fromkeys(gradients.holding_gradients(right, name, scale, step.form) for name in breaks))
    return replace(evidence, breaks=breaks, keep_backward=keep)


def _report(
    evidence: ScalingEvidence,
    problems: Sequence[Finding],
    batch: Batch,
    notes: tuple[str, ...],
    modules: Sequence[ModuleScaling] = (),
    reference: str = "",
) -> ScalingReport:
    minor = tuple(finding for finding in problems if finding.minor)
    notes = (*notes, *(f"{listed([label(name) for name in finding.where])}: {finding.what}" for finding in minor))
    problems = [finding for finding in problems if not finding.minor]
    return ScalingReport(evidence, problems, modules, reference, batch.samples, notes, minor)


def _near_the_top(reference: gradients.Reference, half_outputs: Outputs, form: Format) -> tuple[str, ...]:
    """Return a note on the output closest to the format's largest number, which later steps may exceed; or nothing."""
    inside = [
        (errors.largest, name)
        for name, errors in reference.outputs.items()
        if HANDED not in name
        and any(dtype_name(tensor) == form.name for tensor in half_outputs.get(name, ()))
        and errors.largest <= form.max
    ]
    largest, name = max(inside, default=(0.0, ""))
    if largest < CLOSE * form.max:
        return ()
    near = f"{percent(largest / form.max)} of the largest {form.name} number: later steps may overflow"
    return (f"the output of {name or 'the model'} reaches {largest:.3g}, {near}",)


def _headroom(
    config: Config, observed: Sequence[Operation], form: Format, values: int, tell: Callable[[str], None]
) -> tuple[tuple[CloseCall, ...], int, tuple[str, ...]]:
    """Return the results close to the end of the range, after how many steps, and a note if later ones were not seen.

    They are those of the first step, or else later ones. Infinities of the first step that have no effect are none,
    nor is a result that is the same after those steps, such as a mask: it does not grow.
    """
    first = close_calls(observed, form)
    close = [call for call in first if math.isfinite(call.ratio)]
    if not close and not worth_a_look(observed, form):
        return (), 0, ()
    tell(f"FP32 training in memory, and one step in {config.precision.name} after it")
    later, then = after_some_steps(config, replace(config, precision=FP32), values)
    if grows := tuple(call for call in close if call not in then):
        return grows, 0, ()
    known = {(call.module, call.operator) for call in first}
    dies = "whether values leave the range in later steps was not seen: trained in FP32, the weights are not finite"
    new = tuple(call for call in then if (call.module, call.operator) not in known)
    return new, later, () if later else (dies,)


def _zeros_by(operations: Sequence[Operation]) -> dict[str, str]:
    """Return the operator that makes zeros of other numbers before one that returns inf for zeros, by module."""
    makers: dict[str, str] = {}
    for at, op in enumerate(operations):
        if op.breaks and not op.largest_input:
            before = (other for other in operations[:at][::-1] if other.module == op.module and other.largest_input)
            made = (other for other in before if sum(counts.zeros for counts in other.outputs) > other.zero_inputs)
            if maker := next(made, None):
                makers.setdefault(op.module, operator_name(maker))
    return makers


def _close(parts: Parts, operations: Sequence[Operation], form: Format) -> tuple[str, ...]:
    """Return the modules close to the largest number that are of the class of a module in which values overflow."""
    classes = {name: type(module) for name, module in parts.model.named_modules()}
    broken = {op.module: classes.get(op.module) for op in operations if op.breaks and op.kind == "inf"}
    kinds = {*broken.values()} - {None}
    largest = [(max(part.largest for part in op.outputs), op.module) for op in operations if op.finite_inputs]
    high = [name for size, name in largest if size >= CLOSE * form.max and classes.get(name) in kinds]
    return tuple(name for name in dict.fromkeys(high) if name not in broken)


def _inspect_first_step(config: Config, form: Format) -> tuple[Batch, StepInspection, float, tuple[str, ...]]:
    """Inspect the first step, with fewer samples if its module outputs have more than `MOST_VALUES` values."""
    parts, batch = first_batch(config)
    notes: tuple[str, ...] = ()
    while True:
        started = time.perf_counter()
        inspection = inspect_step(parts, parts.prepare(batch), form)
        seconds = time.perf_counter() - started
        values = sum(tensor.numel() for tensors in inspection.outputs.values() for tensor in tensors)
        count = min(-(-values // MOST_VALUES), batch.samples // (2 * parts.plan.accumulate))
        if notes or count <= 1:
            return batch, inspection, seconds, notes
        whole, batch = batch.samples, batch.split(count)[0]
        times = whole / batch.samples
        notes = (
            f"only {batch.samples} of the {whole} samples of a batch are examined, to save memory: gradients of "
            f"outputs are {times:.3g} times as large as in training",
        )
        del parts, inspection  # one model at a time
        parts, _ = build(config)


def first_batch(config: Config) -> tuple[Parts, Batch]:
    """Return newly built parts of a configuration and its first batch, not prepared yet; DataError if there is none."""
    parts, _ = build(config)
    loader = parts.loaders["train"]
    batch = next(iter(loader.batches(0)), None)
    loader.close()
    if batch is None:
        raise DataError("the training split has no usable sample", "see dataset.on_error, and mptrain list dataset")
    return parts, batch


def _breaks_in_half(parts: Parts, batch: Batch, modules: Sequence[ModuleScaling]) -> tuple[str, ...]:
    drifting = [module for module in modules if module.drifts]
    if not drifting:
        return ()
    first = drifting[-1]
    # the lowest scale at which they drift: at higher ones the loss itself may overflow too
    drifting_at = min(exponent for exponent in first.finite if first.errors[exponent] > 2 * first.tolerance)
    scales = 2.0 ** min(first.errors, key=lambda exponent: first.errors[exponent]), 2.0**drifting_at
    return gradients.find_breaks(parts, batch, scales, [module.name for module in drifting], first.tolerance)


#: Bound of the moves of parameters. Each goes half as far as the one before, so that none is taken back.
MOVE = 2.0**-7


def without_gradient(parts: Parts, batch: Batch, zero: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters whose gradient stays zero, however far those with a gradient move.

    First come those at a saddle, which get a gradient where parameters that are zero are not, then the others. Without
    FP64 no saddle is looked for. The weights of ``parts``, newly built in ``precision=fp32``, are changed. The batch is
    in FP32, and ``zero`` names the parameters whose gradient is zero in FP64.
    """
    if not runs_in_float64(parts, batch):
        return (), tuple(zero)
    batch, values = batch.cast(torch.float64), {name: param.data for name, param in parts.model.named_parameters()}
    left, before, move, generator = list(zero), -1, MOVE, torch.Generator().manual_seed(0)
    while left and len(left) != before:
        before, move = len(left), move / 2
        for name, gradient in scaled_gradients(parts, batch, 1.0).items():
            if gradient.any():
                values[name].sub_(gradient.to(values[name].device), alpha=move / float(gradient.abs().max()))
        left = _small(scaled_gradients(parts, batch, 1.0), left)
    for value in (values[name] for name in left if not values[name].any()):
        value.copy_(MOVE * torch.randn(value.shape, generator=generator))
    others = _small(scaled_gradients(parts, batch, 1.0), left) if left else []
    return tuple(name for name in left if name not in others), tuple(others)


def _small(grads: Gradients, names: Collection[str]) -> list[str]:
    sizes = {name: float(grad.norm()) / math.sqrt(max(grad.numel(), 1)) for name, grad in grads.items()}
    least = NOTHING * max(sizes.values(), default=0.0)
    return [name for name in names if sizes.get(name, 0.0) <= least]


def verdict(report: ScalingReport) -> str:
    """Summarise a check of a model's gradients in one sentence: the number of problems and the usable loss scales.

    Where errors that no module is to blame for exceed what the check accepts, it is no all-clear.
    """
    count = len(report.findings)
    wrong = f"{counted(count, 'problem')} found"
    if not count and (doubt := _doubt(report)):
        wrong = f"nothing is found that keeps it from training, but {doubt}"
    zero = [label(module.name) for module in report.modules if module.reference == 0]
    if not count and zero:
        wrong = f"{wrong} (not seen: {listed(zero, 3)}, with gradients of zero)"
    if why := why_no_range(report.evidence, report.findings):
        return f"{wrong}; {why}"
    scales = scales_of(report.modules)
    if not scales.good:
        return f"{wrong}; no loss scale is usable for all modules"
    return f"{wrong}; usable loss scales: {powers(scales.good)}, middle 2^{scales.best}"


def _doubt(report: ScalingReport) -> str:
    """Return what a check without findings leaves open, as a clause; empty for nothing."""
    evidence = report.evidence
    if report.modules and is_spoiled(evidence.outputs, report.modules, evidence.form):
        gradients = min((module.expected for module in report.modules if module.judged), default=0.0)
        sums = (
            f"rounding errors of many modules add up to {error_share(max(result_error(evidence.outputs), gradients))}"
        )
        return f"{sums} of its result: train it to see whether it learns"
    if inexact := [module for module in report.modules if module.wrong]:
        largest = error_share(max(module.best for module in inexact))
        return (
            f"gradients of {counted(len(inexact), 'module')} are off by up to {largest}, which training usually bears"
        )
    return ""


def scale_notes(report: ScalingReport) -> list[str]:
    """Return sentences on the largest gradient error, and on the configured loss scales among the usable ones."""
    return [*_largest_error(report), *_about_scales(report)]


def _largest_error(report: ScalingReport) -> list[str]:
    """Return a sentence on the module whose gradients half precision changes most; nothing if none is judged."""
    errors = {module.name: math.hypot(module.expected, module.best) for module in report.modules if module.judged}
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is None or math.isinf(errors[worst]):
        return []
    return [f"gradients are off by up to {error_share(errors[worst])}, most in {label(worst)}"]


def _about_scales(report: ScalingReport) -> list[str]:
    """Return sentences that compare the configured loss scales with the usable ones."""
    if why_no_range(report.evidence, report.findings):
        return []
    scales = scales_of(report.modules)
    sentences = [_configured(scales, name, *scale) for name, scale in report.evidence.scales.items()]
    if scales.overflows is not None:
        sentences.insert(0, f"gradients overflow at 2^{scales.overflows} and above")
    return list(dict.fromkeys(sentence for sentence in sentences if sentence))


def _configured(scales: UsableScales, learner: str, scale: float, constant: bool) -> str:
    whose = "" if learner == "main" else f" of the {learner}"
    suits = scales.suits(scale)
    if not scales.good or (constant and not suits):  # an unusable constant scale is already a finding
        return ""
    how = "is usable"
    if suits is None:
        how = "is outside the tested range"
    elif not suits:
        how = "is too high and will decrease" if scale > 2.0 ** scales.good[-1] else "is too low and will grow"
    return f"{'the constant scale' if constant else 'the initial scale'}{whose}, {scale_in_words(scale)}, {how}"


def powers(exponents: Sequence[int]) -> str:
    """Format a range of loss scales, given by ascending base-2 exponents, such as ``2^3 to 2^19``."""
    if not exponents:
        return "none"
    return f"2^{exponents[0]}" if len(exponents) == 1 else f"2^{exponents[0]} to 2^{exponents[-1]}"
