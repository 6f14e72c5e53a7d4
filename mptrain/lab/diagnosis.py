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

from mptrain.build.parts import build
from mptrain.config.compose import reload
from mptrain.config.schema import Config
from mptrain.config.trust import allowed_downloads, command_with, is_allow_override
from mptrain.engine.parts import Options, Parts
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.snapshot import require_same_labels, require_same_schema
from mptrain.lab.diagnosis_case import with_fp32_values
from mptrain.lab.divergence import Divergence, explain_divergence
from mptrain.lab.examine_step import LocatedStep, RecordedStep, examine, with_cause
from mptrain.lab.failed_step import FailedStep, read_failed_step
from mptrain.lab.pages.diagnosis_page import write_diagnosis
from mptrain.lab.step_replay import SavedStep, restore_step, saved_step_at
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import listed
from mptrain.precision.check import PromiseBroken
from mptrain.run.attempt import min_micro_batches
from mptrain.runlog import RunDirectory
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.diagnosis_file import Examination
from mptrain.runlog.directory import find_run
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.run_reader import Run, read_run
from mptrain.system.errors import CheckpointError, ConfigError, EnvironmentRefused, FirstBatchError, StorageError
from mptrain.system.records import StepRecord
from mptrain.system.torch_settings import settings_restored

#: Class of a loss scaling rule, and the scale with which it starts.
_FirstScale: TypeAlias = tuple[type, float]

_Record = TypeVar("_Record")

#: Reason why the loss of several ranks differs on one rank.
_OF_RANKS = "several ranks draw other random numbers and round sums differently"


@dataclass(frozen=True)
class DiagnosisResult:
    """Result of ``mptrain diagnose``: the diagnosis of one training step, and its page.

    Attributes:
        found: The diagnosis: causes of failure, statistics of modules, and remedies tried.
        page: Path of the written HTML page; None without a run.
        steps_left: Number of steps that the run would train if it is resumed; 0 without a run, or if it has diverged.
    """

    found: Examination
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
    place = _located(directory, config, diverged.step if diverged is not None and remedy is not None else step)
    if diverged is not None and remedy is None:
        place = place.with_remarks(f"{diverged.cause.what}: a lower optimizer.lr may prevent it")
    if changes:
        place = _under_changes(place, changes, own_scales)
    found = examine(str(directory.root), config, place, learner)
    if diverged is not None and remedy is not None:
        found = with_cause(found, diverged.cause, remedy)
    left = 0 if remedy is not None else _steps_left(directory, config, place.parts)
    return DiagnosisResult(found, write_diagnosis(directory.paths.diagnosis, found, changes), left)


@settings_restored()
def diagnose_config(config: Config, step: int = 1, learner: str | None = None) -> DiagnosisResult:
    """Diagnose a training step of a configuration without a run, and write nothing.

    The steps before ``step``, counted from 1, are trained in memory. ``learner`` None examines one that fails, or the
    first. Raises MptrainError if the data or the device is missing, training ends before that step, or training
    refuses the configuration since the step computes in other dtypes than the mode means.
    """
    parts, options = build(config)
    moment = _moment(config, parts, options, None, step)
    try:
        rehearse(parts, parts.prepare(moment.batch))
    except PromiseBroken:  # training refuses it too
        raise
    except (FirstBatchError, EnvironmentRefused):
        pass  # the examination explains it
    place = LocatedStep(parts, moment, None, parts.notes)
    return DiagnosisResult(examine(" ".join(config.overrides), config, place, learner), None)


def _divergence(directory: RunDirectory, config: Config) -> Divergence | None:
    steps = _readable(directory, lambda run: list(run.steps()))
    alone = all(one.learner == "main" for one in steps)
    return explain_divergence(config, [one.loss for one in steps]) if alone else None


def _located(directory: RunDirectory, config: Config, step: int | None) -> LocatedStep:
    """Return a step by its number; None chooses the one that ended the run, or else its next one."""
    ended = _step_that_ended(directory, config) if step is None else None
    return ended or _numbered_step(directory, config, step)


def _step_that_ended(directory: RunDirectory, config: Config) -> LocatedStep | None:
    """Return the saved step that ended a run; None if none did, or if the run was resumed from there."""
    failure, state = directory.paths.failure, directory.read_state()
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
    saved_step = _moment(config, parts, options, state, wanted)
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
    return {one.name: (type(one.scaler), float(one.scaler.initial(parts.device)["scale"])) for one in parts.learners}


def _under_changes(place: LocatedStep, changes: Sequence[str], own_scales: Mapping[str, _FirstScale]) -> LocatedStep:
    """Return a step under a changed configuration, at the first scale of each scaler that is not the run's own."""
    place = replace(place, because="the configuration was changed")
    changed = f"with {' '.join(changes)}, unlike the run itself"
    if place.trained:
        return place.with_remarks(f"{changed}; the steps in memory were trained with it too")
    now = _first_scales(place.parts)
    others = {name: scale for name, (kind, scale) in now.items() if own_scales.get(name) != (kind, scale)}
    if not others:
        return place.with_remarks(changed)
    shown = " and ".join(
        f"{scale_in_words(scale)}{'' if name == 'main' else f' for {name}'}" for name, scale in others.items()
    )
    saved_step = replace(place.saved_step, scales={**place.saved_step.scales, **others})
    place = replace(place, saved_step=saved_step)
    return place.with_remarks(changed, f"at the first loss scale of the new scaler, {shown}")


def _moved(directory: RunDirectory, parts: Parts, failed: FailedStep) -> list[str]:
    """Return the failed learner and those after it, as far as their updates in the last step were applied."""
    names = [learner.name for learner in parts.learners]
    later = names[names.index(failed.learner) :] if failed.learner in names else names
    applied = {one.learner for one in _steps(directory, failed.step) if not one.skipped}
    return [f"the {name}" for name in later if name in applied]


def _on_record(directory: RunDirectory, step: int) -> RecordedStep:
    losses = {one.learner: one.loss for one in _steps(directory, step)}
    events = _readable(directory, lambda run: [one for one in run.events() if one["event"] in ("injected", "overflow")])
    injected = {event.get("step") for event in events if event["event"] == "injected"}
    overflowed = [event for event in events if event["event"] == "overflow"]
    overflows = {
        one["learner"]: tuple((tensor, kind) for tensor, kind in one["tensors"])
        for one in overflowed
        if one["step"] == step
    }
    ceilings: dict[str, float] = {}
    for one in overflowed:
        if one["loss"] == "finite" and one["step"] not in injected:
            ceilings[one["learner"]] = min(one["loss_scale"], ceilings.get(one["learner"], math.inf))
    return RecordedStep(losses, overflows, ceilings)


def _steps(directory: RunDirectory, step: int) -> list[StepRecord]:
    return _readable(directory, lambda run: [one for one in run.steps() if one.step == step])


def _readable(directory: RunDirectory, read: Callable[[Run], list[_Record]]) -> list[_Record]:
    """Return records of a run; none if the file is damaged."""
    try:
        return read(read_run(directory.root))
    except StorageError:
        return []


def _unexpected(directory: RunDirectory, packages: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on the steps that overflowed unexpectedly; empty if none did."""
    found = _readable(directory, lambda run: [one for one in run.events() if one.get("phase") == "unexpected"])
    steps = list(dict.fromkeys(event["step"] for event in found))
    if not steps:
        return ()
    line = command_with(f"mptrain diagnose {directory.root} --step {steps[0]}", packages)
    which = "step" if len(steps) == 1 else "steps"
    return (f"{which} {listed([str(one) for one in steps])} overflowed unexpectedly; to examine the first: {line}",)


def _moment(config: Config, parts: Parts, options: Options, state: Mapping[str, Any] | None, step: int) -> SavedStep:
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    if step > max(planned, 1) and (state is None or step - 1 != state["progress"]["step"]):
        raise ConfigError(f"--step {step}: training ends at step {planned:,}", f"write at most --step {planned}")
    saved_step = saved_step_at(parts, options, state, step)
    if saved_step is None:
        raise StorageError(f"there is no batch for step {step}", "the data set has no usable sample")
    return replace(saved_step, state=with_fp32_values(config, saved_step.state))
