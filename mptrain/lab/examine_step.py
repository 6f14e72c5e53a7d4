"""Examination of one training step: causes of failure, agreement with the run's records, and remedies tried.

`mptrain.lab.diagnosis` locates the step in a run or a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from mptrain.config.schema import Config
from mptrain.engine.parts import Parts
from mptrain.lab.diagnosis_case import DiagnosisCase, observation_of, with_overrides, without_initial_nonfinite
from mptrain.lab.evaluation_check import check_evaluation
from mptrain.lab.findings import Finding
from mptrain.lab.observations import module_rows, step_notes, underflows
from mptrain.lab.remedies import remedies
from mptrain.lab.step_replay import SavedStep, observe_step, restore_step
from mptrain.numerics.words import listed
from mptrain.probe.observer import Observation
from mptrain.run.build.parts import build
from mptrain.runlog.diagnosis_file import CauseKind, Examination, FurtherCause, Remedy
from mptrain.system.errors import ConfigError, did_you_mean

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


def examine(subject: str, config: Config, place: LocatedStep, learner: str | None = None) -> Examination:
    """Repeat a training step under observation, find the causes of its failure, and try remedies on it.

    A step with an injected fault is examined without the fault too, to tell whether the fault is the cause. ``subject``
    is the name of the run, or the overrides of the configuration, for display. ``learner`` None chooses the one that
    failed. Raises ConfigError if there is no such learner.
    """
    _require_learner(place.parts, learner)
    seen = _asked_about(observe_step(place.parts, place.saved_step), learner or place.learner, place.record)
    seen = without_initial_nonfinite(seen, config)
    remarks = (*place.remarks, *_loss_on_record(place, seen), *_overflow_on_record(place.record, seen))
    fault = _fault(place.parts, seen.step)
    if not fault:
        case = _case(config, place, seen)
        found = _examination(subject, case, remarks)
        batch = None if place.record.losses else place.saved_step.batch
        faulty = check_evaluation(place.parts, case.in_fp32, batch) if case.is_sound else None
        return found if faulty is None else with_cause(found, *faulty)
    remarks = (*remarks, f"this step has an injected fault: {fault}")
    case = replace(_case(config, place, seen), faulted=True)
    if case.is_sound:  # every remedy would inject the fault again
        return _examination(subject, case, remarks, ())
    clean = _without_fault(config, place, seen.learner)
    if clean.is_sound:
        tried = Remedy(_WITHOUT_FAULT, "no injected fault", True, "the step is finite without it")
        found = _examination(subject, case, remarks, (tried,))
        return replace(found, verdict=f"the injected fault is the cause: {fault}; {found.verdict}")
    found = _examination(subject, clean, remarks)
    return replace(found, verdict=f"even without the injected fault, {found.verdict}")


def with_cause(found: Examination, cause: Finding, remedy: Remedy) -> Examination:
    """Return an examination with a cause outside the step (``updates`` or ``evaluation``), and the remedy tried."""
    kind, module, operator = cast("CauseKind", cause.kind), cause.module, cause.operator
    found = replace(found, cause=kind, module=module, operator=operator, verdict=cause.what)
    return replace(found, also=(), remedies=(remedy,))


def _case(config: Config, place: LocatedStep, seen: Observation) -> DiagnosisCase:
    ceiling = place.record.ceilings.get(seen.learner, math.inf)
    ended = place.learner == seen.learner
    return DiagnosisCase(config, place.parts, place.saved_step, seen, ended=ended, ceiling=ceiling)


def _examination(
    subject: str, case: DiagnosisCase, remarks: tuple[str, ...], tried: tuple[Remedy, ...] | None = None
) -> Examination:
    """Return the examination of a step. If ``tried`` is given, nothing is tried: it would inject the fault again."""
    seen, cause = case.seen, case.cause
    exact = case.exact if tried is None and underflows(seen) else None
    others = case.causes[1:]
    tried = remedies(case) if tried is None else tried
    may_pass = not seen.finite and cause.kind != "input"  # a scale that falls by itself
    by_itself = next((one.text for one in tried if one.helped and not one.words), "") if may_pass else ""
    others, overflows = ((), [one.what for one in others]) if by_itself else (others, [])
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
        also=tuple(FurtherCause(cast("CauseKind", one.kind), one.module, one.operator, one.what) for one in others),
        notes=(*overflows, *case.remarks, *step_notes(seen, exact)),
        remarks=remarks,
        modules=module_rows(seen, case.causes),
        remedies=tried,
        operators=dict(seen.census),
    )


def _require_learner(parts: Parts, learner: str | None) -> None:
    names = [one.name for one in parts.learners]
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
    return "; ".join(f"{one.fields['value']} into {one.fields['tensor']}" for one in parts.fault.records(step))


def _without_fault(config: Config, place: LocatedStep, learner: str) -> DiagnosisCase:
    config = with_overrides(config, *_WITHOUT_FAULT)
    parts, _ = build(config, weights=False, micro_batches=place.parts.plan.accumulate)
    restore_step(parts, place.saved_step)
    seen = without_initial_nonfinite(observation_of(observe_step(parts, place.saved_step), learner), config)
    return _case(config, replace(place, parts=parts), seen)


def _loss_on_record(place: LocatedStep, seen: Observation) -> tuple[str, ...]:
    """Return a sentence that compares the loss with the recorded one; empty without a record."""
    before = place.record.losses.get(seen.learner)
    if before is None:
        return ()
    if before == seen.loss or (math.isnan(before) and math.isnan(seen.loss)):
        return ("the loss equals the recorded loss",)
    return (f"the recorded loss was {before:.9g}, it is {seen.loss:.9g} now: {place.because}",)


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
