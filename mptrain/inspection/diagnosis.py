"""``mptrain diagnose``: looks at a step of a run, or of a configuration that was never run, and tries what would mend it.

Of the run directory nothing is changed but what is written into its folder ``diagnosis``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.config.schema import Config
from mptrain.config.trust import allow_argument, allowed_downloads, is_allow_override
from mptrain.engine.parts import Options, Parts
from mptrain.engine.snapshot import require_same_labels, require_same_schema
from mptrain.errors import CheckpointError, ConfigError, StorageError
from mptrain.files import read_text
from mptrain.inspection.examine_step import LocatedStep, RecordedStep, examine
from mptrain.inspection.step_replay import SavedStep, restore_step, saved_step_at
from mptrain.numerics.formats import scale_in_words
from mptrain.records import StepRecord
from mptrain.report.diagnosis_page import write_diagnosis
from mptrain.run.start_and_resume import min_micro_batches
from mptrain.runlog import RunDirectory
from mptrain.runlog.checkpoint_data import load_plain
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.diagnosis_file import Examination
from mptrain.runlog.directory import find_run
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.run_reader import read_run
from mptrain.runlog.strict_json import parse_strict
from mptrain.workloads.base.batch import Batch

#: The class of a loss scaling rule, and its first scale.
_Beginning: TypeAlias = tuple[type, float]

#: Why what several ranks did gives another loss on one.
_OF_RANKS = "several ranks have other random numbers, and round their sums otherwise"


@dataclass(frozen=True)
class DiagnosisResult:
    """Result of ``mptrain diagnose``.

    Attributes:
        found: What was seen and tried.
        page: Where the page about it lies; None where there is no run to put it into.
    """

    found: Examination
    page: Path | None


def diagnose_run(
    run: str, overrides: Sequence[str] = (), step: int | None = None, learner: str | None = None
) -> DiagnosisResult:
    """Look at the step that ended a run; or at its next one, where none did; or at a certain one.

    Args:
        run: The run directory, or ``last``.
        overrides: Keys that differ from the run's configuration.
        step: Which attempt; the nearest checkpoint before it is trained on up to there, in memory.
        learner: Whose passes; None means that which went wrong.

    Raises:
        MptrainError: Data, device or the checkpoint that would be needed are missing.
    """
    directory = find_run(run)
    text = directory.read_config()
    config = reload(text, overrides)
    overrides = [word for word in overrides if not is_allow_override(word)]  # which changes no number
    before: dict[str, _Beginning] = {}
    if overrides:
        own, _ = build(reload(text, allow=config.extensions.allow, fetch=allowed_downloads(config)), weights=False)
        before = _begins(own)
    place = (_failed(directory, config) if step is None else None) or _standing(directory, config, step)
    if overrides:
        changed = f"under {' '.join(overrides)}, unlike the run itself"
        if place.trained:
            changed += "; so was what was trained in memory"
        place = replace(place, remarks=(*place.remarks, changed), because="it is under other keys")
        if not place.trained:
            place = _rescaled(place, before)
    found = examine(str(directory.root), config, place, learner)
    return DiagnosisResult(found, write_diagnosis(directory.paths.diagnosis, found, overrides))


def diagnose_config(config: Config, step: int = 1, learner: str | None = None) -> DiagnosisResult:
    """Look at a step of a run that was not started.

    Args:
        config: Checked.
        step: Which attempt; the ones before it are trained in memory.
        learner: As in `diagnose_run`.

    Raises:
        MptrainError: Data or device are missing, or the training ends before that step.
    """
    parts, options = build(config)
    place = LocatedStep(parts, _moment(parts, options, None, step), None, parts.notes)
    return DiagnosisResult(examine(" ".join(config.overrides), config, place, learner), None)


def _begins(parts: Parts) -> dict[str, _Beginning]:
    """Return the class and the first scale of the scaler of each learner."""
    return {one.name: (type(one.scaler), float(one.scaler.initial(parts.device)["scale"])) for one in parts.learners}


def _failed(directory: RunDirectory, config: Config) -> LocatedStep | None:
    """The step that ended a run, as it was kept; None where none did, or the run went on from there."""
    paths = directory.paths
    state = directory.read_state()
    if not paths.failure.exists() or (state is not None and state.status == "done"):
        return None
    trust = allow_argument(config.extensions.allow)
    failed_step = _read_ending(directory, trust)
    store = CheckpointStore(paths.checkpoints, config.checkpoint.keep)
    saved = manifests_in(store.folder)
    if saved and step_of(saved[0]) > failed_step.step:
        return None
    same = next((path for path in saved if step_of(path) == failed_step.step), None)
    loaded = store.load(same) if same else store.load_latest()
    if loaded is None:
        raise CheckpointError(
            f"{directory.root} has no checkpoint: its weights were not finite when it ended, and none was kept before",
            f"look at an earlier step, from the start: mptrain diagnose {directory.root} --step {max(1, failed_step.step - 1)}{trust}",
        )
    parts, _ = build(config, weights=False, micro_batches=min_micro_batches(config, loaded))
    _require_fit(parts, loaded.state)
    place = replace(_ended(parts, failed_step, loaded), record=_on_record(directory, failed_step.step))
    restore_step(parts, place.saved_step)
    moved = _moved(directory, parts, failed_step) if place.saved_step.done else []
    if moved:
        remark = f"the weights hold what {' and '.join(moved)} did in that step: they were saved behind it"
        place = replace(place, remarks=(*place.remarks, remark), because="the weights moved in between")
    return place


@dataclass(frozen=True)
class FailedStep:
    """The step that ended a run.

    Attributes:
        step: Which attempt.
        learner: Whose steps were refused.
        loss_scale: At which scale.
        cause: `mptrain.engine.failure_diagnosis.Diagnosis.cause`.
        batch: As it was prepared, on the CPU.
        random: The random state before that step; None where it was not kept.
        ranks: How many processes did it, each a part of the batch.
    """

    step: int
    learner: str
    loss_scale: float
    cause: str
    batch: Batch
    random: Mapping[str, Any] | None
    ranks: int = 1


def _read_ending(directory: RunDirectory, trust: str = "") -> FailedStep:
    """The step that ended a run.

    Args:
        directory: Of the run.
        trust: What a line that names it needs behind it (see `mptrain.config.trust.allow_argument`).

    Raises:
        StorageError: A file of it is missing or damaged; names the command that does without.
    """
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
        )
    except OSError as error:
        why, cause = f"cannot be read: {error.strerror or error}", error
    except Exception as error:  # it holds something else than what a run writes there
        cause = error
    hint = f"look at a step by number: mptrain diagnose {directory.root} --step N{trust}"
    raise StorageError(f"{path} {why}", hint) from cause


def _ended(parts: Parts, failed_step: FailedStep, loaded: LoadedCheckpoint) -> LocatedStep:
    """The step that ended a run, with the weights of a checkpoint."""
    remarks = [
        f"the step that ended the run, {failed_step.step:,}, done again: {failed_step.cause} was the cause on record"
    ]
    same, because = loaded.manifest.step == failed_step.step, LocatedStep.because
    if not same:
        remarks.append(f"the weights of that step were not kept: these are those of step {loaded.manifest.step:,}")
        because = "the weights are older"
    if failed_step.ranks > 1:
        remarks.append(f"{failed_step.ranks} ranks had a part of its batch each; here one process does the whole of it")
        because = because if because != LocatedStep.because else _OF_RANKS
    logs = loaded.state["accounts"]
    scales = {one.name: float((logs[one.name]["last"] or {"loss_scale": 1.0})["loss_scale"]) for one in parts.learners}
    scales[failed_step.learner] = failed_step.loss_scale
    random = failed_step.random or loaded.state["random"]
    saved_step = SavedStep(
        failed_step.step, loaded.state, failed_step.batch.to(parts.device), False, scales, random, done=same
    )
    return LocatedStep(parts, saved_step, failed_step.learner, tuple(remarks), because=because)


def _rescaled(place: LocatedStep, before: Mapping[str, _Beginning]) -> LocatedStep:
    """At the first scale of those scalers that are not the run's own."""
    now = _begins(place.parts)
    others = {name: scale for name, (kind, scale) in now.items() if before.get(name) != (kind, scale)}
    if not others:
        return place
    shown = " and ".join(
        f"{scale_in_words(scale)}{'' if name == 'main' else f' for {name}'}" for name, scale in others.items()
    )
    saved_step = replace(place.saved_step, scales={**place.saved_step.scales, **others})
    return replace(
        place, saved_step=saved_step, remarks=(*place.remarks, f"at the first loss scale of the scaler given, {shown}")
    )


def _moved(directory: RunDirectory, parts: Parts, failed_step: FailedStep) -> list[str]:
    """The learners whose updates of the last step were applied after the one that ended the run took its own."""
    names = [learner.name for learner in parts.learners]
    later = names[names.index(failed_step.learner) :] if failed_step.learner in names else names
    applied = {one.learner for one in _steps(directory, failed_step.step) if not one.skipped}
    return [f"the {name}" for name in later if name in applied]


def _on_record(directory: RunDirectory, step: int) -> RecordedStep:
    """Return the record of a step; nothing where it is damaged."""
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
    """A step on record, of each learner; nothing where it is not there, or the record is damaged."""
    try:
        return [one for one in read_run(directory.root).steps() if one.step == step]
    except StorageError:
        return []


def _standing(directory: RunDirectory, config: Config, step: int | None) -> LocatedStep:
    """A certain step of a run, or the one after its last checkpoint."""
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
    saved_step = _moment(parts, options, loaded.state if loaded else None, wanted)
    remark = f"step {wanted:,}, from {begins}{trained}"
    place = LocatedStep(parts, saved_step, None, (remark,), _on_record(directory, wanted), trained=more)
    state = directory.read_state()
    return replace(place, because=_OF_RANKS) if state is not None and state.ranks > 1 else place


def _moment(parts: Parts, options: Options, state: Mapping[str, Any] | None, step: int) -> SavedStep:
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    if step > max(planned, 1) and (state is None or step - 1 != state["progress"]["step"]):
        raise ConfigError(f"--step {step}: the training ends at step {planned:,}", f"write at most --step {planned}")
    saved_step = saved_step_at(parts, options, state, step)
    if saved_step is None:
        raise StorageError(f"there is no batch for step {step}", "the data set has no usable sample")
    return saved_step


def _require_fit(parts: Parts, state: Mapping[str, Any]) -> None:
    require_same_schema(state)
    require_same_labels(parts, state)
