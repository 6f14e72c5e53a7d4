"""Examination of a failed training step: its causes, and the search for remedies, each tried on that step.

`mptrain.lab.diagnosis.diagnose` locates the step in a run or a configuration. The least intrusive remedies are tried
first. The first column is the kind of the cause (`mptrain.runlog.diagnosis_file.CauseKind`), the second its candidates:

    backward    a lower or a higher loss scale; then modules kept in FP32; then bfloat16
    forward     modules kept in FP32; then bfloat16; then FP32
    loss        the loss in FP32; then bfloat16; then FP32
    input       the same step without the samples that are not finite
    none        for values lost to underflow: modules kept in FP32; for gradients: a higher scale

A candidate fixes the step only if the repeated step is sound (`DiagnosisCase.is_sound`): it is finite, and its module
outputs and gradients agree with the same step in FP32. Modules kept in FP32 may also need another loss scale, which is
tried with them.

A lower learning rate is advised only if FP32 is not finite either, because of large weights or operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.engine.module_trail import LOSS, is_inside
from mptrain.engine.observer import Observation
from mptrain.engine.parts import Parts
from mptrain.lab.diagnosis.case import DiagnosisCase, observation_of, without_initial_nonfinite
from mptrain.lab.diagnosis.causes import (
    describe_errors,
    describe_module,
    first_break,
    first_cause,
    module_rows,
    small_gradients,
    step_notes,
    underflows,
)
from mptrain.lab.diagnosis.scale_remedies import NO_CHANGE, higher_scale, lower_scale, raised_scale
from mptrain.lab.evaluation_check import check_evaluation
from mptrain.lab.finding import Finding, operator_name
from mptrain.lab.step.accuracy import why_worse
from mptrain.lab.step.observation import lost_columns
from mptrain.lab.step.repetition import SavedStep, observe_step, restore_step, with_overrides
from mptrain.numerics.exponents import merged
from mptrain.numerics.formats import FLOAT16
from mptrain.precision.apply import input_dtype
from mptrain.precision.keep_fp32 import kept_modules
from mptrain.run.build.parts import build
from mptrain.runlog.diagnosis_file import CauseKind, Examination, FurtherCause, Remedy
from mptrain.system.errors import ConfigError, EnvironmentRefused, did_you_mean
from mptrain.system.records import ExponentCounts
from mptrain.system.words import listed
from mptrain.workloads.base.batch import Batch

#: Maximum number of entries added to ``precision.keep_fp32``; beyond that another precision is the simpler remedy.
MOST_KEPT = 6

#: Maximum number of steps that are repeated in the search for those entries.
MOST_TRIED = 24

#: Magnitude above which weights and operands count as large: FP16 cannot hold them.
LARGE = FLOAT16.max


def _offender(case: DiagnosisCase, underflow: bool) -> str | None:
    """Return the module in which a step fails, empty for the model itself; None if the step is sound."""
    if not case.is_sound:
        return case.cause.module or ""
    if underflow and case.rounded:
        return case.rounded[0].rpartition(".")[0]
    return case.lost[0].module if underflow and case.lost else None


def remedies(case: DiagnosisCase) -> tuple[Remedy, ...]:
    """Return the remedies tried on a step, in order, up to the first that fixes it; empty if nothing needs a fix.

    Each remedy says whether the repeated step succeeded with it.
    """
    return tuple(_until_it_helps(*_candidates(case)))


def _candidates(case: DiagnosisCase) -> tuple[Iterable[Remedy], ...]:
    """Return the remedies to try on a step as iterables, one for each kind of remedy, in order."""
    module, accuracy = case.cause.module, case.accuracy
    match case.cause.kind:
        case "input":
            return (_without_samples(case),)
        case "weights":
            text = "resume from an earlier checkpoint, with scaler.on_overflow=skip"
            return ((Remedy((), text, None, "no precision restores weights that are not finite"),),)
        case "backward" | "forward" if case.fp32_fails:
            return (_blown_up(case.exact or case.seen),)
        case "backward" if accuracy is None or not accuracy.disproportionate:
            another = _another_scale(case)
            return (() if another is None else (another,), _keeping(case, module), _other_precisions(case))
        case "loss" if case.config.precision.half and _loss_in_half(case) and not case.fp32_fails:
            text = "compute the loss in FP32, from logits.float()"
            return (Remedy((), text, None, "the code of the task computes it"),), _other_precisions(case)
        case "backward" | "loss":  # precisions without a loss scale
            return (_other_precisions(case),)
        case "forward" | "refused":
            lost = any(
                (operation.module, operation.operator) == (module, case.cause.operator) for operation in case.lost
            )
            return _keeping(case, module, lost), _other_precisions(case, lost)
    if case.rounded:
        return _keeping(case, case.rounded[0].rpartition(".")[0], True), _wide_inputs(case, True)
    if case.underflow_matters:
        return _keeping(case, case.lost[0].module, True), _other_precisions(case, True)
    exact = accuracy is not None and not accuracy.inexact_gradients  # small gradients are then no fault, only a note
    if not exact and (small := small_gradients(case.seen)) is not None:
        return ((higher_scale(case, *small, _half_gradients(case.seen, case.exact or case.seen)),),)
    return ()


def _loss_in_half(case: DiagnosisCase) -> bool:
    outputs = [operation.outputs for operation in case.seen.of("forward") if operation.module == LOSS]
    return any(counts.dtype == case.config.precision.compute for several in outputs for counts in several)


def _another_scale(case: DiagnosisCase) -> Remedy | None:
    if case.exact is None or case.fp32_fails:
        return None
    gradients = _half_gradients(case.seen, case.exact)
    return raised_scale(case, gradients) if case.seen.finite else lower_scale(case, gradients)


def _half_gradients(seen: Observation, exact: Observation) -> ExponentCounts:
    """Return exponent counts of the gradients that a step stores in FP16, as FP32 computes them."""
    half = {
        (operation.module, operation.operator, at)
        for operation in seen.of("backward")
        for at, counts in enumerate(operation.outputs)
        if counts.dtype == "float16"
    }
    return merged(
        counts
        for operation in exact.of("backward")
        for at, counts in enumerate(operation.outputs)
        if (operation.module, operation.operator, at) in half
    )


def _keeping(case: DiagnosisCase, module: str | None, underflow: bool = False) -> Iterator[Remedy]:
    if not case.config.precision.reduced:
        return
    kept = KeptModules(case.parts.model, case.parts.kept)
    remedy: Remedy | None = None
    for _ in range(MOST_TRIED):
        larger = kept.with_module(module) if module not in (None, LOSS, "") else None
        if larger is None:
            break
        if len(larger.entries) > MOST_KEPT:
            assert remedy is not None
            remedy = replace(remedy, outcome=f"{remedy.outcome}; not tried with more than {MOST_KEPT} entries")
            break
        kept = larger
        word = f"precision.keep_fp32=[{','.join([*case.config.precision.keep_fp32, *kept.entries])}]"
        remedy, tried = _try_remedy(case, (word,), f"keep {', '.join(kept.entries)} in FP32", underflow)
        if remedy.helped or tried is None:
            break
        module = _offender(tried, underflow)
    if remedy is not None:
        yield remedy


def _wide_inputs(case: DiagnosisCase, underflow: bool = False) -> Iterator[Remedy]:
    """Try the modes whose inputs, parameters and buffers stay FP32."""
    for name, text in (("amp_dynamic", "autocast with FP16"), ("amp_bf16", "autocast with bfloat16"), ("fp32", "FP32")):
        stay = f"{text}, whose {'buffers' if underflow else 'inputs'} stay FP32"
        yield _try_remedy(case, (f"precision={name}",), stay, underflow)[0]


def _other_precisions(case: DiagnosisCase, underflow: bool = False) -> Iterator[Remedy]:
    policy = case.config.precision
    if policy.half and policy.compute == "float16":
        name = "amp_bf16" if policy.autocast else "bf16"
        yield _try_remedy(case, (f"precision={name}",), "bfloat16, with the range of FP32", underflow)[0]
    if policy.half and not policy.autocast and case.cause.module == "":  # no entry of keep_fp32 names the whole model
        name = "amp_dynamic" if policy.compute == "float16" else "amp_bf16"
        yield _try_remedy(case, (f"precision={name}",), "autocast, which keeps inputs and weights in FP32", underflow)[
            0
        ]
    if policy.reduced:
        remedy, tried = _try_remedy(case, ("precision=fp32",), "FP32", underflow)
        yield remedy
        if tried is not None and not remedy.helped:
            yield from _blown_up(tried.seen)
    else:
        yield from _blown_up(case.seen)


def _blown_up(seen: Observation) -> Iterator[Remedy]:
    cause = first_cause(seen)
    if seen.finite or cause.kind == "refused":
        return
    if cause.kind == "loss":
        outcome = "the loss is not finite in FP32 either: no precision and no loss scale fixes its formula"
        yield Remedy((), "another formula for the loss", None, outcome)
        return
    (size, name), broken = seen.largest_weight, first_break(seen, cause.phase)
    evidence, operator = "", operator_name(broken) if broken is not None else ""
    if size >= LARGE:
        evidence = f"weights reach {size:.3g} in {name}"
    elif broken is not None and broken.largest_input >= LARGE and broken.kind == "inf":
        evidence = f"the inputs of {operator} reach {broken.largest_input:.3g}"
    if evidence:
        text = "a lower optimizer.lr or train.clip_norm, from an earlier checkpoint"
        outcome = f"FP32 is not finite either, and {evidence}: {cause.what}"
    else:  # nothing is large, so the arithmetic itself is at fault
        where = describe_module(seen, cause.module or "")
        text = f"check {operator} in {where}" if operator else f"check {where}"
        outcome = f"FP32 is not finite either, and no weight is large (up to {size:.3g} in {name}): {cause.what}"
    yield Remedy((), text, None, outcome)


def _without_samples(case: DiagnosisCase) -> Iterator[Remedy]:
    bad = {index for tensor in case.seen.inputs for index in tensor.samples}
    good = [index for index in range(case.seen.samples) if index not in bad]
    text = "clean data, or dataset.on_error=skip if the data set detects such samples"
    if all(tensor.widely_finite for tensor in case.seen.inputs):
        yield Remedy((), "inputs of mean 0 and deviation 1 (standardise them in the data set)", None, "not tried")
        yield from _until_it_helps(_wide_inputs(case))
        return
    if not good or not bad:
        why = "no sample of the batch is finite" if bad else "the batch cannot be divided into samples"
        yield Remedy((), text, None, why)
        return
    saved_step = replace(case.saved_step, batch=_chosen(case.saved_step.batch, good))
    seen = observation_of(observe_step(case.parts, saved_step), case.seen.learner)
    without = f"without these {len(bad)} samples" if len(bad) > 1 else "without this sample"
    outcome = f"{without} the step is {'finite' if seen.finite else 'not finite either: ' + first_cause(seen).what}"
    yield Remedy((), text, seen.finite, outcome)


def _try_remedy(
    case: DiagnosisCase, words: tuple[str, ...], text: str, underflow: bool
) -> tuple[Remedy, DiagnosisCase | None]:
    """Repeat the step with overrides; if only gradients are wrong then, also at another loss scale."""
    try:
        changed = case.with_overrides(*words)
    except (EnvironmentRefused, ConfigError) as error:
        return Remedy(words, text, None, f"not tried: {error}"), None
    offender = _offender(changed, underflow)
    if offender is None:
        if why := changed.refusal() or _why_worse(case, changed):
            return Remedy(words, text, False, why), changed
        outcome = "no values are lost on this batch" if underflow else "finite on this batch"
        if changed.accuracy is not None:
            outcome += f"; {describe_errors(changed.accuracy)}"
        return Remedy(words, text, True, outcome), changed
    if changed.cause.kind == "backward" and (another := _another_scale(changed)) is not None and another.helped:
        text = f"{text}, and {another.text.removeprefix(NO_CHANGE)}"
        return Remedy((*words, *another.words), text, True, another.outcome), changed
    what = f"{offender} still loses values to underflow" if changed.is_sound else changed.cause.what
    return Remedy(words, text, False, "the step fails as before" if what == case.cause.what else what), changed


def _why_worse(case: DiagnosisCase, changed: DiagnosisCase) -> str:
    """Return why a changed step that is sound is no remedy: its input or results are rounded away; or nothing."""
    if columns := lost_columns(case.saved_step.batch, input_dtype(changed.parts.policy)):
        return f"the cast of the inputs rounds away most of {columns}"
    before = case.accuracy.largest_errors if case.accuracy is not None and case.seen.finite else None
    if changed.accuracy is None:
        return ""
    coarser = changed.accuracy.form.epsilon / case.accuracy.form.epsilon if case.accuracy is not None else 1.0
    return why_worse(before, changed.accuracy.largest_errors, coarser)


def _until_it_helps(*several: Iterable[Remedy]) -> Iterator[Remedy]:
    for remedies_of_a_kind in several:
        for remedy in remedies_of_a_kind:
            yield remedy
            if remedy.helped:
                return


def _chosen(batch: Batch, samples: list[int]) -> Batch:
    index = torch.tensor(samples, device=batch.inputs.device)
    counts = None if batch.counts is None else tuple(batch.counts[sample] for sample in samples)
    more = {name: tensor[index] for name, tensor in batch.extras.items()}
    return replace(batch, inputs=batch.inputs[index], targets=batch.targets[index], counts=counts, extras=more)


@dataclass(frozen=True)
class KeptModules:
    """Modules to keep in FP32 to fix a step: entries to add to the option ``precision.keep_fp32``.

    The entries are extended while failing modules are found. Failing modules of the same class are merged into one
    entry.

    Attributes:
        model: The model.
        before: Qualified names of the modules that the configuration already keeps in FP32.
        entries: Qualified names, patterns of names, and class names.
    """

    model: nn.Module
    before: Collection[str]
    entries: tuple[str, ...] = ()

    @functools.cached_property
    def classes(self) -> dict[str, str]:
        """Class name of each module of the model, by qualified name."""
        return {name: type(module).__name__ for name, module in self.model.named_modules()}

    def with_module(self, module: str) -> KeptModules | None:
        """Return the entries extended by one more module to keep in FP32, in which values are wrong now.

        If the module is kept already, its parent is added instead: a kept module returns its output in the dtype of its
        input, so the output must fit that dtype, while values inside a kept module need not.

        If an entry has a module of the same class, one entry replaces both: the class name for classes outside
        torch.nn, otherwise a pattern of the module names, because a torch.nn class says little about a module's role.
        Returns None if only the whole model is left, or if nothing changes.
        """
        covered = {entry: self._selected(entry) for entry in self.entries}
        inside = set().union(*covered.values())
        while module in self.before or any(f"{module}.".startswith(f"{name}.") for name in inside):
            module = module.rpartition(".")[0]
            if not module:
                return None
        kept = [entry for entry in self.entries if not all(name.startswith(f"{module}.") for name in covered[entry])]
        kind = self.classes[module]
        alike = [entry for entry in kept if any(self.classes[name] == kind for name in covered[entry])]
        together = self._together(module, {name for entry in alike for name in covered[entry]}) if alike else None
        entries = (*(entry for entry in kept if together is None or entry not in alike), together or module)
        return None if entries == self.entries else replace(self, entries=entries)

    def _selected(self, entry: str) -> set[str]:
        return set(kept_modules(self.model, (entry,)))

    def _together(self, module: str, others: set[str]) -> str | None:
        """Return one entry for modules of one class; None if it would match others too."""
        kind = self.classes[module]
        same = {name for name, class_name in self.classes.items() if class_name == kind}
        whole = any(is_inside(inner, name) for name in same for inner in same) or "" in same
        if not hasattr(nn, kind) and not whole and self._selected(kind) == same:
            return kind
        parts = [name.split(".") for name in (module, *sorted(others))]
        if len({len(path) for path in parts}) > 1:
            return None
        pattern = ".".join(level[0] if len(set(level)) == 1 else "*" for level in zip(*parts, strict=True))
        return pattern if pattern.strip("*.") and self._selected(pattern) <= same else None


#: Overrides that remove an injected fault from a configuration.
_WITHOUT_FAULT = ("inject.step=null", "inject.tensor=null")


@dataclass(frozen=True)
class RecordedStep:
    """Records of a run about one of its steps, by name of the learner.

    Attributes:
        losses: Loss of the step.
        overflows: Name of each tensor whose gradient overflowed, with its kind (``inf`` or ``nan``).
        ceilings: Lowest loss scale of any step of the run at which only gradients overflowed.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    overflows: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LocatedStep:
    """Training step to examine, with its origin.

    Attributes:
        parts: Built model, optimizers and data.
        saved_step: State of the run before the step.
        learner: Name of the learner that ended the run; None if none did.
        remarks: Sentences for the user on the origin of the step.
        record: Records of the run about the step; empty without a run.
        because: Possible reason for a loss that differs from the recorded one, as a phrase for the user.
        trained: Number of steps that were trained in memory before it.
    """

    parts: Parts
    saved_step: SavedStep
    learner: str | None
    remarks: tuple[str, ...]
    record: RecordedStep = field(default_factory=RecordedStep)
    because: str = "another device, thread count or library version rounds differently"
    trained: int = 0

    def with_remarks(self, *more: str) -> LocatedStep:
        """Return the step with further remarks behind its own."""
        return replace(self, remarks=(*self.remarks, *more))


def examine(subject: str, config: Config, located: LocatedStep, learner: str | None = None) -> Examination:
    """Repeat a training step under observation, find the causes of its failure, and try remedies on it.

    A step with an injected fault is examined without the fault too, to tell whether the fault is the cause. ``subject``
    is the name of the run, or the overrides of the configuration, for display. ``learner`` None chooses the one that
    failed. Raises ConfigError if there is no such learner.
    """
    _require_learner(located.parts, learner)
    seen = _asked_about(observe_step(located.parts, located.saved_step), learner or located.learner, located.record)
    seen = without_initial_nonfinite(seen, config)
    remarks = (*located.remarks, *_loss_on_record(located, seen), *_overflow_on_record(located.record, seen))
    fault = _fault(located.parts, seen.step)
    if not fault:
        case = _case(config, located, seen)
        examination = _examination(subject, case, remarks)
        batch = None if located.record.losses else located.saved_step.batch
        faulty = check_evaluation(located.parts, case.in_fp32, batch) if case.is_sound else None
        return examination if faulty is None else with_cause(examination, *faulty)
    remarks = (*remarks, f"this step has an injected fault: {fault}")
    case = replace(_case(config, located, seen), faulted=True)
    if case.is_sound:  # every remedy would inject the fault again
        return _examination(subject, case, remarks, ())
    clean = _without_fault(config, located, seen.learner)
    if clean.is_sound:
        tried = Remedy(_WITHOUT_FAULT, "no injected fault", True, "the step is finite without it")
        examination = _examination(subject, case, remarks, (tried,))
        return replace(examination, verdict=f"the injected fault is the cause: {fault}; {examination.verdict}")
    examination = _examination(subject, clean, remarks)
    return replace(examination, verdict=f"even without the injected fault, {examination.verdict}")


def with_cause(examination: Examination, cause: Finding, remedy: Remedy) -> Examination:
    """Return an examination with a cause outside the step (``updates`` or ``evaluation``), and the remedy tried."""
    kind, module, operator = cast("CauseKind", cause.kind), cause.module, cause.operator
    examination = replace(examination, cause=kind, module=module, operator=operator, verdict=cause.what)
    return replace(examination, also=(), remedies=(remedy,))


def _case(config: Config, located: LocatedStep, seen: Observation) -> DiagnosisCase:
    ceiling = located.record.ceilings.get(seen.learner, math.inf)
    ended = located.learner == seen.learner
    return DiagnosisCase(config, located.parts, located.saved_step, seen, ended=ended, ceiling=ceiling)


def _examination(
    subject: str, case: DiagnosisCase, remarks: tuple[str, ...], tried: tuple[Remedy, ...] | None = None
) -> Examination:
    """Return the examination of a step. If ``tried`` is given, nothing is tried: it would inject the fault again."""
    seen, cause = case.seen, case.cause
    exact = case.exact if tried is None and underflows(seen) else None
    others = case.causes[1:]
    tried = remedies(case) if tried is None else tried
    may_pass = not seen.finite and cause.kind != "input"  # a scale that falls by itself
    by_itself = next((remedy.text for remedy in tried if remedy.helped and not remedy.words), "") if may_pass else ""
    others, overflows = ((), [other.what for other in others]) if by_itself else (others, [])
    return Examination(
        subject=subject,
        learner=seen.learner,
        step=seen.step,
        loss=seen.loss,
        loss_scale=seen.loss_scale,
        precision=case.config.precision.name,
        device=str(case.parts.device),
        cause=cast("CauseKind", cause.kind),
        module=cause.module,
        operator=cause.operator,
        verdict=f"{by_itself}; until then {cause.what}" if by_itself else cause.what,
        also=tuple(
            FurtherCause(cast("CauseKind", other.kind), other.module, other.operator, other.what) for other in others
        ),
        notes=(*overflows, *case.remarks, *step_notes(seen, exact)),
        remarks=remarks,
        modules=module_rows(seen, case.causes),
        remedies=tried,
        operators=dict(seen.census),
    )


def _require_learner(parts: Parts, learner: str | None) -> None:
    names = [candidate.name for candidate in parts.learners]
    if learner is not None and learner not in names:
        guess = did_you_mean(learner, names)
        hint = f"did you mean {guess}?" if guess else f"write one of {', '.join(names)}"
        raise ConfigError(f"--learner {learner}: no such learner", hint)


def _asked_about(several: tuple[Observation, ...], learner: str | None, record: RecordedStep) -> Observation:
    """Return the requested observation, else that of a learner that overflowed on record or fails now, at best both."""
    if learner is not None:
        return observation_of(several, learner)
    on_record = [seen for seen in several if seen.learner in record.overflows]
    wrong = [seen for seen in several if not seen.finite]
    return next((seen for seen in wrong if seen in on_record), [*on_record, *wrong, *several][0])


def _fault(parts: Parts, step: int) -> str:
    """Return the injected fault of a step as ``VALUE into TENSOR``; empty if it has none."""
    return "; ".join(f"{record.fields['value']} into {record.fields['tensor']}" for record in parts.fault.records(step))


def _without_fault(config: Config, located: LocatedStep, learner: str) -> DiagnosisCase:
    config = with_overrides(config, *_WITHOUT_FAULT)
    parts, _ = build(config, weights=False, micro_batches=located.parts.plan.accumulate)
    restore_step(parts, located.saved_step)
    seen = without_initial_nonfinite(observation_of(observe_step(parts, located.saved_step), learner), config)
    return _case(config, replace(located, parts=parts), seen)


def _loss_on_record(located: LocatedStep, seen: Observation) -> tuple[str, ...]:
    """Return a sentence that compares the loss with the recorded one; empty without a record."""
    before = located.record.losses.get(seen.learner)
    if before is None:
        return ()
    if before == seen.loss or (math.isnan(before) and math.isnan(seen.loss)):
        return ("the loss equals the recorded loss",)
    return (f"the recorded loss was {before:.9g}, it is {seen.loss:.9g} now: {located.because}",)


def _overflow_on_record(record: RecordedStep, seen: Observation) -> tuple[str, ...]:
    """Return a sentence comparing the parameters whose gradients overflow with the recorded ones; empty if none."""
    if seen.learner not in record.losses or seen.refusal is not None:
        return ()
    before, now = dict(record.overflows.get(seen.learner, ())), dict(seen.gradients)
    if before.keys() == now.keys():
        return (f"the same gradients overflow as on record: {listed(list(now))}",) if now else ()
    if not now:
        return (f"on record the gradients of {listed(list(before))} overflowed; now none do",)
    if not before:
        return ("on record this step did not overflow",)
    return (f"on record the gradients of {listed(list(before))} overflowed; now those of {listed(list(now))} do",)
