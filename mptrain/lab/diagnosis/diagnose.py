"""Functions of ``mptrain diagnose``, which examines one training step and tries remedies for its failure.

The step belongs to a run, or to a configuration that was never run. In the run directory only the folder ``diagnosis``
is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mptrain.config.compose import allowed_downloads, command_with, is_allow_override, reload
from mptrain.config.schema import Config
from mptrain.engine.checkpointing import require_same_labels, require_same_schema
from mptrain.engine.failure_diagnosis import FAR
from mptrain.engine.options import Options
from mptrain.engine.parts import Parts
from mptrain.engine.rehearsal import rehearse
from mptrain.lab.diagnosis.case import with_fp32_values
from mptrain.lab.diagnosis.remedies import LocatedStep, RecordedStep, examine, with_cause
from mptrain.lab.finding import Finding
from mptrain.lab.pages.diagnosis_page import write_diagnosis
from mptrain.lab.step.repetition import SavedStep, restore_step, saved_step_at, with_overrides
from mptrain.precision.census import PromiseBroken
from mptrain.run.attempt import min_micro_batches
from mptrain.run.build.parts import build
from mptrain.runlog import RunDirectory
from mptrain.runlog.checkpoint_data import load_plain
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.diagnosis_file import Examination, Remedy
from mptrain.runlog.directory import find_run
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.run_reader import Run, read_run
from mptrain.runlog.strict_json import parse_strict
from mptrain.system.errors import CheckpointError, ConfigError, EnvironmentRefused, FirstBatchError, StorageError
from mptrain.system.files import read_text
from mptrain.system.process_state import settings_restored
from mptrain.system.records import StepRecord
from mptrain.system.words import listed, scale_in_words
from mptrain.workloads.base.batch import Batch

#: Class of a loss scaling rule, and the scale with which it starts.
_FirstScale: TypeAlias = tuple[type, float]

_Record = TypeVar("_Record")

#: Reason why the loss of several ranks differs on one rank.
_OF_RANKS = "several ranks draw other random numbers and round sums differently"


@dataclass(frozen=True)
class DiagnosisResult:
    """Result of ``mptrain diagnose``: the diagnosis of one training step, and its page.

    Attributes:
        examination: The diagnosis: causes of failure, statistics of modules, and remedies tried.
        page: Path of the written HTML page; None without a run.
        steps_left: Number of steps that the run would train if it is resumed; 0 without a run, or if it has diverged.
    """

    examination: Examination
    page: Path | None
    steps_left: int = 0


@settings_restored()
def diagnose_run(
    run: str, overrides: Sequence[str] = (), step: int | None = None, learner: str | None = None
) -> DiagnosisResult:
    """Diagnose one training step of a run: a given one, else the one that ended the run, else its next one.

    Args:
        run: The run directory, or ``last``.
        overrides: Changes to the run's configuration, such as ``precision=bf16``.
        step: Number of the step; skipped steps count. The steps from the nearest checkpoint before it, or from the
            start, up to it are trained in memory. None chooses the step that ended the run, or its next step.
        learner: Name of the learner (a model with its optimizer; a GAN has two) to examine; None chooses the one that
            failed.

    Raises:
        MptrainError: The data, the device or a required checkpoint is missing.
    """
    directory = find_run(run)
    text = directory.read_config()
    config = reload(text, overrides)
    changes = [word for word in overrides if not is_allow_override(word)]  # the others change no numbers
    own_scales: dict[str, _FirstScale] = {}
    if changes:
        own, _ = build(reload(text, allow=config.extensions.allow, fetch=allowed_downloads(config)), weights=False)
        own_scales = _first_scales(own)
    diverged = _divergence(directory, config) if step is None and not changes else None
    remedy = diverged.remedy if diverged is not None else None
    located = _located(directory, config, diverged.step if diverged is not None and remedy is not None else step)
    if diverged is not None and remedy is None:
        located = located.with_remarks(f"{diverged.cause.what}: a lower optimizer.lr may prevent it")
    if changes:
        located = _under_changes(located, changes, own_scales)
    examination = examine(str(directory.root), config, located, learner)
    if diverged is not None and remedy is not None:
        examination = with_cause(examination, diverged.cause, remedy)
    left = 0 if remedy is not None else _steps_left(directory, config, located.parts)
    return DiagnosisResult(examination, write_diagnosis(directory.paths.diagnosis, examination, changes), left)


@settings_restored()
def diagnose_config(config: Config, step: int = 1, learner: str | None = None) -> DiagnosisResult:
    """Diagnose a training step of a configuration without a run, and write nothing.

    The steps before ``step``, counted from 1, are trained in memory. ``learner`` None examines one that fails, or the
    first. Raises MptrainError if the data or the device is missing, training ends before that step, or training
    refuses the configuration since the step computes in other dtypes than the mode means.
    """
    parts, options = build(config)
    moment = step_to_repeat(config, parts, options, None, step)
    try:
        rehearse(parts, parts.prepare(moment.batch))
    except PromiseBroken:  # training refuses it too
        raise
    except (FirstBatchError, EnvironmentRefused):
        pass  # the examination explains it
    located = LocatedStep(parts, moment, None, parts.notes)
    return DiagnosisResult(examine(" ".join(config.overrides), config, located, learner), None)


def _divergence(directory: RunDirectory, config: Config) -> Divergence | None:
    steps = _readable(directory, lambda run: list(run.steps()))
    alone = all(record.learner == "main" for record in steps)
    return explain_divergence(config, [record.loss for record in steps]) if alone else None


def _located(directory: RunDirectory, config: Config, step: int | None) -> LocatedStep:
    """Return a step by its number; None chooses the one that ended the run, or else its next one."""
    ended = _step_that_ended(directory, config) if step is None else None
    return ended or _numbered_step(directory, config, step)


def _step_that_ended(directory: RunDirectory, config: Config) -> LocatedStep | None:
    """Return the saved step that ended a run; None if none did, or if the run was resumed from there."""
    failure, state = directory.paths.failure, directory.read_state()
    # A run that an exception ended leaves a traceback, and no step to repeat.
    by_exception = {path.name for path in failure.glob("*")} <= {"traceback.txt"}
    if by_exception or (state is not None and state.status == "done"):
        return None
    failed = read_failed_step(directory, config.extensions.allow)
    if any(step_of(path) > failed.step for path in manifests_in(directory.paths.checkpoints)):
        return None
    loaded = _store(directory, config).load_latest()
    if loaded is None:
        earlier = f"mptrain diagnose {directory.root} --step {max(1, failed.step - 1)}"
        raise CheckpointError(
            f"{directory.root} has no checkpoint: none was saved before its weights became non-finite",
            f"diagnose an earlier step, from the start: {command_with(earlier, config.extensions.allow)}",
        )
    parts, _ = _built(config, loaded)
    saved_step = failed.with_state(
        with_fp32_values(config, loaded.state), parts, done=loaded.manifest.step == failed.step
    )
    restore_step(parts, saved_step)

    remarks = [f"repeated step {failed.step:,}, which ended the run; recorded cause: {failed.cause}"]
    because = LocatedStep.because
    if failed.ranks > 1:
        remarks.append(f"in the run {failed.ranks} ranks shared its batch; here one process computes all of it")
        because = _OF_RANKS
    if not saved_step.done:
        why = "; ".join(loaded.skipped) or "its weights were not saved"
        remarks.insert(1, f"{why}; the weights of step {loaded.manifest.step:,} are used")
        because = "the weights are older"
    elif moved := _moved(directory, parts, failed):
        remarks.append(f"the weights were saved after the step and include its update of {' and '.join(moved)}")
        because = "the weights changed in between"
    record = _on_record(directory, failed.step)
    return LocatedStep(parts, saved_step, failed.learner, tuple(remarks), record, because)


def _numbered_step(directory: RunDirectory, config: Config, step: int | None) -> LocatedStep:
    """Return the step of a number, up to which the run is trained in memory from the checkpoint before it.

    None is the step after the last checkpoint.
    """
    loaded = _store(directory, config).load_latest(before=step)
    parts, options = _built(config, loaded)
    before = loaded.manifest.step if loaded else 0
    wanted = before + 1 if step is None else step
    begins = f"the checkpoint of step {before:,}" if loaded else "the start"
    more = wanted - 1 - before
    trained = f", and {more:,} step{'s' if more > 1 else ''} trained in memory" if more else ""
    state = with_fp32_values(config, loaded.state) if loaded else None
    saved_step = step_to_repeat(config, parts, options, state, wanted)
    skipped = [f"{reason}; using the checkpoint before it" for reason in loaded.skipped] if loaded else []
    remarks = (f"step {wanted:,}, from {begins}{trained}", *skipped)
    remarks += _unexpected(directory, config.extensions.allow) if step is None else ()
    ended = directory.read_state()
    because = _OF_RANKS if ended is not None and ended.ranks > 1 else LocatedStep.because
    return LocatedStep(parts, saved_step, None, remarks, _on_record(directory, wanted), because, trained=more)


def _store(directory: RunDirectory, config: Config) -> CheckpointStore:
    return CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)


def _built(config: Config, loaded: LoadedCheckpoint | None) -> tuple[Parts, Options]:
    """Build the parts of a run, into which a checkpoint must fit if there is one."""
    built = build(config, weights=loaded is None, micro_batches=min_micro_batches(config, loaded))
    if loaded is not None:
        require_same_schema(loaded.state)
        require_same_labels(built[0], loaded.state)
    return built


def _steps_left(directory: RunDirectory, config: Config, parts: Parts) -> int:
    saved = manifests_in(directory.paths.checkpoints)
    planned = config.train.planned(parts.loaders["train"].steps_per_epoch)
    return max(planned - (step_of(saved[0]) if saved else 0), 0)


def _first_scales(parts: Parts) -> dict[str, _FirstScale]:
    return {
        learner.name: (type(learner.scaler), float(learner.scaler.initial(parts.device)["scale"]))
        for learner in parts.learners
    }


def _under_changes(located: LocatedStep, changes: Sequence[str], own_scales: Mapping[str, _FirstScale]) -> LocatedStep:
    """Return a step under a changed configuration, at the first scale of each scaler that is not the run's own."""
    located = replace(located, because="the configuration was changed")
    changed = f"with {' '.join(changes)}, unlike the run itself"
    if located.trained:
        return located.with_remarks(f"{changed}; the steps in memory were trained with it too")
    now = _first_scales(located.parts)
    others = {name: scale for name, (kind, scale) in now.items() if own_scales.get(name) != (kind, scale)}
    if not others:
        return located.with_remarks(changed)
    shown = " and ".join(
        f"{scale_in_words(scale)}{'' if name == 'main' else f' for {name}'}" for name, scale in others.items()
    )
    saved_step = replace(located.saved_step, scales={**located.saved_step.scales, **others})
    located = replace(located, saved_step=saved_step)
    return located.with_remarks(changed, f"at the first loss scale of the new scaler, {shown}")


def _moved(directory: RunDirectory, parts: Parts, failed: FailedStep) -> list[str]:
    """Return the failed learner and those after it, as far as their updates in the last step were applied."""
    names = [learner.name for learner in parts.learners]
    later = names[names.index(failed.learner) :] if failed.learner in names else names
    applied = {record.learner for record in _steps(directory, failed.step) if not record.skipped}
    return [f"the {name}" for name in later if name in applied]


def _on_record(directory: RunDirectory, step: int) -> RecordedStep:
    losses = {record.learner: record.loss for record in _steps(directory, step)}
    events = _readable(
        directory, lambda run: [event for event in run.events() if event["event"] in ("injected", "overflow")]
    )
    injected = {event.get("step") for event in events if event["event"] == "injected"}
    overflowed = [event for event in events if event["event"] == "overflow"]
    overflows = {
        event["learner"]: tuple((tensor, kind) for tensor, kind in event["tensors"])
        for event in overflowed
        if event["step"] == step
    }
    ceilings: dict[str, float] = {}
    for event in overflowed:
        if event["loss"] == "finite" and event["step"] not in injected:
            ceilings[event["learner"]] = min(event["loss_scale"], ceilings.get(event["learner"], math.inf))
    return RecordedStep(losses, overflows, ceilings)


def _steps(directory: RunDirectory, step: int) -> list[StepRecord]:
    return _readable(directory, lambda run: [record for record in run.steps() if record.step == step])


def _readable(directory: RunDirectory, read: Callable[[Run], list[_Record]]) -> list[_Record]:
    """Return records of a run; none if the file is damaged."""
    try:
        return read(read_run(directory.root))
    except StorageError:
        return []


def _unexpected(directory: RunDirectory, packages: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on the steps that overflowed unexpectedly; empty if none did."""
    events = _readable(directory, lambda run: [event for event in run.events() if event.get("phase") == "unexpected"])
    steps = list(dict.fromkeys(event["step"] for event in events))
    if not steps:
        return ()
    line = command_with(f"mptrain diagnose {directory.root} --step {steps[0]}", packages)
    which = "step" if len(steps) == 1 else "steps"
    return (f"{which} {listed([str(step) for step in steps])} overflowed unexpectedly; to examine the first: {line}",)


def step_of_run(run: str, overrides: Sequence[str] = ()) -> tuple[Config, LocatedStep]:
    """Return a run's configuration with overrides, and the step after its last checkpoint.

    Raises:
        MptrainError: The data, the device or a required checkpoint is missing.
    """
    directory = find_run(run)
    config = reload(directory.read_config(), overrides)
    return config, _numbered_step(directory, config, None)


def step_to_repeat(
    config: Config, parts: Parts, options: Options, state: Mapping[str, Any] | None, step: int
) -> SavedStep:
    """Return the state before a step, from 1, up to which new parts are trained in memory.

    ``state`` is a snapshot from before that step; None starts from the parts as built.

    Raises:
        ConfigError: Training ends before that step.
        StorageError: The data has no usable sample.
    """
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    if step > max(planned, 1) and (state is None or step - 1 != state["progress"]["step"]):
        raise ConfigError(f"step {step:,}: training ends at step {planned:,}", f"name a step up to {planned}")
    saved_step = saved_step_at(parts, options, state, step)
    if saved_step is None:
        raise StorageError(f"there is no batch for step {step}", "the data set has no usable sample")
    return replace(saved_step, state=with_fp32_values(config, saved_step.state))


@dataclass(frozen=True)
class FailedStep:
    """Training step that ended a run.

    Attributes:
        step: Number of the step.
        learner: Name of the learner whose updates were skipped.
        loss_scale: Loss scale of that learner in the step.
        cause: Recorded cause, as in `mptrain.engine.failure_diagnosis.Diagnosis.cause`.
        batch: The prepared batch of the step, on the CPU.
        random: State of all random generators before the step; None if it was not saved.
        ranks: Number of ranks, each of which had a part of the batch.
        wide: As `SavedStep.wide`.
    """

    step: int
    learner: str
    loss_scale: float
    cause: str
    batch: Batch
    random: Mapping[str, Any] | None
    ranks: int = 1
    wide: bool = False

    def with_state(self, state: Mapping[str, Any], parts: Parts, *, done: bool) -> SavedStep:
        """Return the step with the state of a checkpoint, saved after the step (``done``) or after an earlier one."""
        logs = {learner.name: state["accounts"][learner.name]["last"] for learner in parts.learners}
        scales = {name: float(last["loss_scale"]) if last else 1.0 for name, last in logs.items()}
        scales[self.learner] = self.loss_scale
        random, batch = self.random or state["random"], self.batch.to(parts.device)
        return SavedStep(self.step, state, batch, self.wide, scales, random, done=done)


def read_failed_step(directory: RunDirectory, packages: Sequence[str] = ()) -> FailedStep:
    """Read the step that ended a run, which allows ``packages``.

    Raises StorageError if a file is unusable, with a command that does not need it as hint.
    """
    path = directory.paths.failure / "diagnosis.json"
    try:
        fields = parse_strict(read_text(path))
        learner, loss_scale, cause = str(fields["learner"]), float(fields["loss_scale"]), str(fields["cause"])
        path = directory.paths.failure / "step.pt"
        saved = load_plain(path)
        tensors, counts = dict(saved["batch"]), saved["counts"]
        batch = Batch(tensors.pop("inputs"), tensors.pop("targets"), tuple(counts) if counts else None, tensors)
        step, ranks, wide = int(saved["step"]), int(saved["ranks"]), bool(saved.get("wide", False))
        return FailedStep(step, learner, loss_scale, cause, batch, saved["random"], ranks, wide)
    except Exception as error:  # the content may be anything
        why = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else "is damaged"
        line = command_with(f"mptrain diagnose {directory.root} --step N", packages)
        raise StorageError(f"{path} {why}", f"diagnose a step by number: {line}") from error


#: Number of steps trained beyond the rise, and the latest step of a rise up to which steps are trained.
BEYOND, LATEST = 10, 100

#: Factors of the learning rate that are tried.
LOWER = (0.1, 0.01, 0.001)


@dataclass(frozen=True)
class Divergence:
    """Rise of a run's training loss from which it never came back.

    Attributes:
        step: First step whose loss, and that of all later ones, is far above the first loss or not finite.
        cause: Description of the rise, of kind ``updates``.
        remedy: Learning rate at which the loss did not rise; None if the rise came too late to train again.
    """

    step: int
    cause: Finding
    remedy: Remedy | None


def rises_at(losses: Sequence[float]) -> int | None:
    """Return the step, from 1, from which on the loss stays far above the first one; None if there is none."""
    if not losses or not 0 < losses[0] < math.inf:
        return None
    last = max(at for at, loss in enumerate(losses, 1) if loss <= FAR * losses[0])
    return last + 1 if last < len(losses) else None


def explain_divergence(config: Config, losses: Sequence[float]) -> Divergence | None:
    """Return a divergence with a lower learning rate that prevents it; None if the rate is not the cause.

    The run has one learner; ``losses`` begin at step 1.
    """
    step, rate = rises_at(losses), config.optimizer.arguments.get("lr")
    if step is None or rate is None or config.inject.step is not None:
        return None
    what = f"the loss was {losses[0]:.3g} at step 1, {losses[step - 1]:.3g} at step {step:,}, and never came back"
    if step > LATEST:
        return Divergence(step, Finding("updates", (), what), None)

    steps = min(step + BEYOND, len(losses))  # schedules end with the run

    def end(word: str) -> float:
        saved = saved_step_at(*build(with_overrides(config, word)), None, steps + 1)
        return math.nan if saved is None else float(saved.state["accounts"]["main"]["last"]["loss"])

    if end("precision=fp32") <= FAR * losses[0]:
        return None
    for word in (f"optimizer.lr={rate * factor:.6g}" for factor in LOWER):
        if (loss := end(word)) <= FAR * losses[0]:
            outcome = f"after {steps} steps from the start the loss is {loss:.3g}"
            what = f"the run diverged because optimizer.lr={rate:g} is too high, in any precision: {what}"
            remedy = Remedy((word,), "a lower learning rate", True, outcome)
            return Divergence(step, Finding("updates", (), what), remedy)
    return None
