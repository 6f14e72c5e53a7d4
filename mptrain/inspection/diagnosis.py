"""Functions of ``mptrain diagnose``, which examines one training step and tries remedies for its failure.

The step belongs to a run, or to a configuration that was never run. In the run directory only the folder ``diagnosis``
is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from mptrain.build.parts import build, settings_restored
from mptrain.config.compose import reload
from mptrain.config.schema import Config
from mptrain.config.trust import allowed_downloads, command_with, is_allow_override
from mptrain.engine.parts import Options, Parts
from mptrain.engine.snapshot import require_same_labels, require_same_schema
from mptrain.inspection.diagnosis_case import with_fp32_values
from mptrain.inspection.divergence import Divergence, explain_divergence
from mptrain.inspection.examine_step import LocatedStep, RecordedStep, examine, with_cause
from mptrain.inspection.step_replay import SavedStep, restore_step, saved_step_at
from mptrain.numerics.formats import scale_in_words
from mptrain.numerics.words import listed
from mptrain.report.diagnosis_page import write_diagnosis
from mptrain.run.attempt import min_micro_batches
from mptrain.runlog import RunDirectory
from mptrain.runlog.checkpoint_data import load_plain
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.diagnosis_file import Examination
from mptrain.runlog.directory import find_run
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.run_reader import read_run
from mptrain.runlog.strict_json import parse_strict
from mptrain.system.errors import CheckpointError, ConfigError, StorageError
from mptrain.system.files import read_text
from mptrain.system.records import StepRecord
from mptrain.workloads.base.batch import Batch

#: Class and first scale of a loss scaling rule.
_Beginning: TypeAlias = tuple[type, float]

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
    overrides = [word for word in overrides if not is_allow_override(word)]  # these change no numbers
    before: dict[str, _Beginning] = {}
    if overrides:
        own, _ = build(reload(text, allow=config.extensions.allow, fetch=allowed_downloads(config)), weights=False)
        before = _begins(own)
    diverged = _diverged(directory, config) if step is None and not overrides else None
    remedy = diverged.remedy if diverged is not None else None
    if diverged is not None and remedy is not None:
        place = _standing(directory, config, diverged.step)
    else:
        place = (_failed(directory, config) if step is None else None) or _standing(directory, config, step)
        if diverged is not None:
            late = f"{diverged.cause.what}: a lower optimizer.lr may prevent it"
            place = replace(place, remarks=(*place.remarks, late))
    if overrides:
        changed = f"with {' '.join(overrides)}, unlike the run itself"
        if place.trained:
            changed += "; the steps in memory were trained with it too"
        place = replace(place, remarks=(*place.remarks, changed), because="the configuration was changed")
        if not place.trained:
            place = _rescaled(place, before)
    found = examine(str(directory.root), config, place, learner)
    if diverged is not None and remedy is not None:
        found = with_cause(found, diverged.cause, remedy)
    saved = manifests_in(CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep).folder)
    planned = config.train.planned(place.parts.loaders["train"].steps_per_epoch)
    left = planned - (step_of(saved[0]) if saved else 0) if remedy is None else 0
    return DiagnosisResult(found, write_diagnosis(directory.paths.diagnosis, found, overrides), max(left, 0))


@settings_restored()
def diagnose_config(config: Config, step: int = 1, learner: str | None = None) -> DiagnosisResult:
    """Diagnose a training step of a configuration without a run, and write nothing.

    The steps before ``step``, counted from 1, are trained in memory. ``learner`` None examines one that fails, or the
    first. Raises MptrainError if the data or the device is missing, or training ends before that step.
    """
    parts, options = build(config)
    place = LocatedStep(parts, _moment(config, parts, options, None, step), None, parts.notes)
    return DiagnosisResult(examine(" ".join(config.overrides), config, place, learner), None)


def _begins(parts: Parts) -> dict[str, _Beginning]:
    """Return, by learner name, the class of its scaler and the scale with which that starts."""
    return {one.name: (type(one.scaler), float(one.scaler.initial(parts.device)["scale"])) for one in parts.learners}


def _diverged(directory: RunDirectory, config: Config) -> Divergence | None:
    try:
        steps = list(read_run(directory.root).steps())
    except StorageError:
        return None
    alone = all(one.learner == "main" for one in steps)
    return explain_divergence(config, [one.loss for one in steps]) if alone else None


def _failed(directory: RunDirectory, config: Config) -> LocatedStep | None:
    """Return the saved step that ended a run; None if none did, or if the run was resumed from there."""
    paths = directory.paths
    state = directory.read_state()
    traceback_only = [path.name for path in paths.failure.glob("*")] == ["traceback.txt"]  # of an exception
    if not paths.failure.exists() or traceback_only or (state is not None and state.status == "done"):
        return None
    failed_step = _read_ending(directory, config.extensions.allow)
    store = CheckpointStore(paths.checkpoints, config.checkpoint.keep)
    saved = manifests_in(store.folder)
    if saved and step_of(saved[0]) > failed_step.step:
        return None
    same = next((path for path in saved if step_of(path) == failed_step.step), None)
    loaded = store.load(same) if same else store.load_latest()
    if loaded is None:
        earlier = f"mptrain diagnose {directory.root} --step {max(1, failed_step.step - 1)}"
        raise CheckpointError(
            f"{directory.root} has no checkpoint: none was saved before its weights became non-finite",
            f"diagnose an earlier step, from the start: {command_with(earlier, config.extensions.allow)}",
        )
    parts, _ = build(config, weights=False, micro_batches=min_micro_batches(config, loaded))
    _require_fit(parts, loaded.state)
    loaded = replace(loaded, state=with_fp32_values(config, loaded.state))
    place = replace(_ended(parts, failed_step, loaded), record=_on_record(directory, failed_step.step))
    restore_step(parts, place.saved_step)
    moved = _moved(directory, parts, failed_step) if place.saved_step.done else []
    if moved:
        remark = f"the weights were saved after the step and include its update of {' and '.join(moved)}"
        place = replace(place, remarks=(*place.remarks, remark), because="the weights changed in between")
    return place


@dataclass(frozen=True)
class FailedStep:
    """Training step that ended a run after too many skipped steps, as saved in the run's folder ``failure``.

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


def _read_ending(directory: RunDirectory, packages: Sequence[str] = ()) -> FailedStep:
    """Read the step that ended a run; if a file of it is unusable, the hint names a command that does not need it."""
    recorded, kept = directory.paths.failure / "diagnosis.json", directory.paths.failure / "step.pt"
    path, why, cause = recorded, "is damaged", Exception()
    try:
        fields = parse_strict(read_text(recorded))
        path = kept
        saved = load_plain(kept)
        tensors, counts = dict(saved["batch"]), saved["counts"]
        batch = Batch(tensors.pop("inputs"), tensors.pop("targets"), tuple(counts) if counts else None, tensors)
        return FailedStep(
            step=int(saved["step"]),
            learner=str(fields["learner"]),
            loss_scale=float(fields["loss_scale"]),
            cause=str(fields["cause"]),
            batch=batch,
            random=saved["random"],
            ranks=int(saved["ranks"]),
            wide=bool(saved.get("wide", False)),
        )
    except OSError as error:
        why, cause = f"cannot be read: {error.strerror or error}", error
    except Exception as error:  # the content is not what a run writes there
        cause = error
    line = command_with(f"mptrain diagnose {directory.root} --step N", packages)
    raise StorageError(f"{path} {why}", f"diagnose a step by number: {line}") from cause


def _ended(parts: Parts, failed_step: FailedStep, loaded: LoadedCheckpoint) -> LocatedStep:
    remarks = [f"repeated step {failed_step.step:,}, which ended the run; recorded cause: {failed_step.cause}"]
    same, because = loaded.manifest.step == failed_step.step, LocatedStep.because
    if not same:
        remarks.append(f"its weights were not saved; the weights of step {loaded.manifest.step:,} are used")
        because = "the weights are older"
    if failed_step.ranks > 1:
        remarks.append(f"in the run {failed_step.ranks} ranks shared its batch; here one process computes all of it")
        because = because if because != LocatedStep.because else _OF_RANKS
    logs = loaded.state["accounts"]
    scales = {one.name: float((logs[one.name]["last"] or {"loss_scale": 1.0})["loss_scale"]) for one in parts.learners}
    scales[failed_step.learner] = failed_step.loss_scale
    random = failed_step.random or loaded.state["random"]
    saved_step = SavedStep(
        failed_step.step, loaded.state, failed_step.batch.to(parts.device), failed_step.wide, scales, random, done=same
    )
    return LocatedStep(parts, saved_step, failed_step.learner, tuple(remarks), because=because)


def _rescaled(place: LocatedStep, before: Mapping[str, _Beginning]) -> LocatedStep:
    """Return the step at the first scale of each scaler that differs from the run's own."""
    now = _begins(place.parts)
    others = {name: scale for name, (kind, scale) in now.items() if before.get(name) != (kind, scale)}
    if not others:
        return place
    shown = " and ".join(
        f"{scale_in_words(scale)}{'' if name == 'main' else f' for {name}'}" for name, scale in others.items()
    )
    saved_step = replace(place.saved_step, scales={**place.saved_step.scales, **others})
    return replace(
        place, saved_step=saved_step, remarks=(*place.remarks, f"at the first loss scale of the new scaler, {shown}")
    )


def _moved(directory: RunDirectory, parts: Parts, failed_step: FailedStep) -> list[str]:
    """Return the failed learner and those after it, as far as their updates in the last step were applied."""
    names = [learner.name for learner in parts.learners]
    later = names[names.index(failed_step.learner) :] if failed_step.learner in names else names
    applied = {one.learner for one in _steps(directory, failed_step.step) if not one.skipped}
    return [f"the {name}" for name in later if name in applied]


def _on_record(directory: RunDirectory, step: int) -> RecordedStep:
    """Return the records of a step; empty if they are damaged."""
    losses = {one.learner: one.loss for one in _steps(directory, step)}
    try:
        events = list(read_run(directory.root).events())
    except StorageError:
        return RecordedStep(losses)
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
    try:
        return [one for one in read_run(directory.root).steps() if one.step == step]
    except StorageError:
        return []


def _standing(directory: RunDirectory, config: Config, step: int | None) -> LocatedStep:
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    paths = [path for path in manifests_in(store.folder) if step is None or step_of(path) < step]
    loaded = store.load(paths[0]) if paths else None
    parts, options = build(config, weights=loaded is None, micro_batches=min_micro_batches(config, loaded))
    before = loaded.manifest.step if loaded else 0
    wanted = before + 1 if step is None else step
    begins = f"the checkpoint of step {before:,}" if loaded else "the start"
    more = wanted - 1 - before
    trained = f", and {more:,} step{'s' if more > 1 else ''} trained in memory" if more else ""
    if loaded is not None:
        _require_fit(parts, loaded.state)
    state = with_fp32_values(config, loaded.state) if loaded else None
    saved_step = _moment(config, parts, options, state, wanted)
    remark = f"step {wanted:,}, from {begins}{trained}"
    skipped = _unexpected(directory, config.extensions.allow) if step is None else ()
    place = LocatedStep(parts, saved_step, None, (remark, *skipped), _on_record(directory, wanted), trained=more)
    ended = directory.read_state()
    return replace(place, because=_OF_RANKS) if ended is not None and ended.ranks > 1 else place


def _unexpected(directory: RunDirectory, packages: Sequence[str]) -> tuple[str, ...]:
    try:
        events = [event for event in read_run(directory.root).events() if event.get("phase") == "unexpected"]
    except StorageError:
        return ()
    steps = list(dict.fromkeys(event["step"] for event in events))
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


def _require_fit(parts: Parts, state: Mapping[str, Any]) -> None:
    require_same_schema(state)
    require_same_labels(parts, state)
