"""``mptrain diagnose``: looks at a step of a run, or of a configuration that was never run, and tries what would mend it.

Of the run directory nothing is changed but what is written into its folder ``diagnosis``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mptrain.campaign.attempt import find_run
from mptrain.campaign.case import Case
from mptrain.campaign.ending import read_ending
from mptrain.campaign.remedies import remedies
from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.diagnostics.findings import cause_of
from mptrain.diagnostics.remarkable import notes_of, rows_of, underflows
from mptrain.engine.revisit import Moment, look, moment_at, stand_at
from mptrain.engine.snapshot import require_same_labels, require_same_schema
from mptrain.errors import CheckpointError, ConfigError, StorageError
from mptrain.report.diagnosis_page import write_diagnosis
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.diagnosis import FOLDER, Examination
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mptrain.campaign.ending import Ending
    from mptrain.config.schema import Config
    from mptrain.diagnostics.observation import Observation
    from mptrain.engine.job import Options, Parts
    from mptrain.records import StepRecord
    from mptrain.runlog import RunDirectory
    from mptrain.runlog.checkpoints import Loaded


@dataclass(frozen=True)
class Diagnosed:
    """What ``mptrain diagnose`` has to show.

    Attributes:
        found: What was seen and tried.
        page: Where the page about it lies; None where there is no run to put it into.
    """

    found: Examination
    page: Path | None


@dataclass(frozen=True)
class _Place:
    """A step that can be looked at, and how it was come by.

    Attributes:
        parts: What is built.
        moment: The step.
        learner: That which ended the run; None where none did.
        remarks: How the step was come by, one sentence each.
        losses: Those of that step on record, by learner.
        because: Why a loss may be another one now.
    """

    parts: Parts
    moment: Moment
    learner: str | None
    remarks: tuple[str, ...]
    losses: Mapping[str, float] = field(default_factory=dict)
    because: str = "another device, number of threads or version of a library computes other bits"


def diagnose_run(run: str, overrides: Sequence[str] = (), step: int | None = None) -> Diagnosed:
    """Look at the step that ended a run; or at its next one, where none did; or at a certain one.

    Args:
        run: The run directory, or ``last``.
        overrides: Keys that differ from the run's configuration.
        step: Which attempt; the nearest checkpoint before it is trained on up to there, in memory.

    Raises:
        MptrainError: Data, device or the checkpoint that would be needed are missing.
    """
    directory = find_run(run)
    text = directory.paths.config.read_text(encoding="utf-8")
    config = reload(text, overrides)
    place = (_failed(directory, config) if step is None else None) or _standing(directory, config, step)
    if overrides:
        changed = f"under {' '.join(overrides)}, unlike the run itself"
        place = replace(place, remarks=(*place.remarks, changed), because="it is under other keys")
    found = _examine(str(directory.root), config, place)
    return Diagnosed(found, write_diagnosis(directory.root / FOLDER, found))


def diagnose_config(config: Config, step: int = 1) -> Diagnosed:
    """Look at a step of a run that was not started.

    Args:
        config: Checked.
        step: Which attempt; the ones before it are trained in memory.

    Raises:
        MptrainError: Data or device are missing, or the training ends before that step.
    """
    parts, options = build(config)
    place = _Place(parts, _moment(parts, options, None, step), None, parts.notes)
    return Diagnosed(_examine(" ".join(config.overrides), config, place), None)


def _examine(subject: str, config: Config, place: _Place) -> Examination:
    parts, moment = place.parts, place.moment
    several = look(parts, moment)
    seen = _asked_about(several, place.learner)
    cause = cause_of(seen)
    case = Case(config, parts, moment, seen, cause, ended=place.learner is not None)
    exact = case.exact if underflows(seen) else None
    injected = tuple(f"a fault is put in on purpose: {one.fields['tensor']}" for one in parts.fault.records(seen.step))
    return Examination(
        subject=subject,
        learner=seen.learner,
        step=seen.step,
        loss=seen.loss,
        loss_scale=seen.loss_scale,
        precision=config.precision.name,
        device=str(parts.device),
        cause=cause.kind,
        module=cause.module,
        operator=cause.operator,
        verdict=cause.sentence,
        notes=notes_of(seen, exact),
        remarks=(*place.remarks, *_on_record(place, seen), *injected),
        modules=rows_of(seen),
        remedies=remedies(case),
        operators=dict(seen.census),
    )


def _asked_about(several: tuple[Observation, ...], learner: str | None) -> Observation:
    """The learner that ended the run; else the first with a step that goes wrong; else the first."""
    for seen in several:
        if seen.learner == learner if learner is not None else not seen.finite:
            return seen
    return several[0]


def _on_record(place: _Place, seen: Observation) -> tuple[str, ...]:
    """Whether the loss is the one that the run had."""
    before = place.losses.get(seen.learner)
    if before is None:
        return ()
    if before == seen.loss or (math.isnan(before) and math.isnan(seen.loss)):
        return ("its loss is the one on record",)
    return (f"its loss was {before:.9g} on record and is {seen.loss:.9g} now, because {place.because}",)


def _failed(directory: RunDirectory, config: Config) -> _Place | None:
    """The step that ended a run, as it was kept; None where none did, or the run went on from there."""
    paths = directory.paths
    state = directory.read_state()
    if not paths.failure.exists() or (state is not None and state.status == "done"):
        return None
    ending = read_ending(directory)
    store = CheckpointStore(paths.checkpoints, config.checkpoint.keep)
    saved = manifests_in(store.folder)
    if saved and step_of(saved[0]) > ending.step:
        return None
    same = next((path for path in saved if step_of(path) == ending.step), None)
    loaded = store.load(same) if same else store.load_latest()
    if loaded is None:
        raise CheckpointError(
            f"{directory.root} has no checkpoint: its weights were not finite when it ended, and none was kept before",
            f"look at an earlier step, from the start: mptrain diagnose {directory.root} --step {max(1, ending.step - 1)}",
        )
    parts, _ = build(config, weights=False)
    _require_fit(parts, loaded.state)
    place = replace(_ended(parts, ending, loaded), losses=_losses(directory, ending.step))
    stand_at(parts, place.moment)
    moved = _moved(directory, parts, ending) if place.moment.done else []
    if moved:
        remark = f"the weights hold what {' and '.join(moved)} did in that step: they were saved behind it"
        place = replace(place, remarks=(*place.remarks, remark), because="the weights moved in between")
    return place


def _ended(parts: Parts, ending: Ending, loaded: Loaded) -> _Place:
    """The step that ended a run, with the weights of a checkpoint."""
    remarks = [f"the step that ended the run, {ending.step:,}, done again: {ending.cause} was the cause on record"]
    same, because = loaded.manifest.step == ending.step, _Place.because
    if not same:
        remarks.append(f"the weights of that step were not kept: these are those of step {loaded.manifest.step:,}")
        because = "the weights are older"
    accounts = loaded.state["accounts"]
    scales = {
        one.name: float((accounts[one.name]["last"] or {"loss_scale": 1.0})["loss_scale"]) for one in parts.learners
    }
    scales[ending.learner] = ending.loss_scale
    random = ending.random or loaded.state["random"]
    moment = Moment(ending.step, loaded.state, ending.batch.to(parts.device), False, scales, random, done=same)
    return _Place(parts, moment, ending.learner, tuple(remarks), because=because)


def _moved(directory: RunDirectory, parts: Parts, ending: Ending) -> list[str]:
    """The learners whose updates of the last step were applied after the one that ended the run took its own."""
    names = [learner.name for learner in parts.learners]
    later = names[names.index(ending.learner) :] if ending.learner in names else names
    applied = {one.learner for one in _steps(directory, ending.step) if not one.skipped}
    return [f"the {name}" for name in later if name in applied]


def _losses(directory: RunDirectory, step: int) -> dict[str, float]:
    return {one.learner: one.loss for one in _steps(directory, step)}


def _steps(directory: RunDirectory, step: int) -> list[StepRecord]:
    """A step on record, of each learner; nothing where it is not there, or the record is damaged."""
    try:
        return [one for one in read_run(directory.root).steps() if one.step == step]
    except StorageError:
        return []


def _standing(directory: RunDirectory, config: Config, step: int | None) -> _Place:
    """A certain step of a run, or the one after its last checkpoint."""
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    paths = [path for path in manifests_in(store.folder) if step is None or step_of(path) < step]
    loaded = store.load(paths[0]) if paths else None
    parts, options = build(config, weights=loaded is None)
    before = loaded.manifest.step if loaded else 0
    wanted = before + 1 if step is None else step
    begins = f"the checkpoint of step {before:,}" if loaded else "the start"
    more = wanted - 1 - before
    trained = f", and {more:,} step{'s' if more > 1 else ''} trained in memory" if more else ""
    if loaded is not None:
        _require_fit(parts, loaded.state)
    moment = _moment(parts, options, loaded.state if loaded else None, wanted)
    remark = f"step {wanted:,}, from {begins}{trained}"
    return _Place(parts, moment, None, (remark,), _losses(directory, wanted))


def _moment(parts: Parts, options: Options, state: Mapping[str, Any] | None, step: int) -> Moment:
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    if step > max(planned, 1) and (state is None or step - 1 != state["progress"]["step"]):
        raise ConfigError(f"--step {step}: the training ends at step {planned:,}", f"write at most --step {planned}")
    moment = moment_at(parts, options, state, step)
    if moment is None:
        raise StorageError(f"there is no batch for step {step}", "the data set has no usable sample")
    return moment


def _require_fit(parts: Parts, state: Mapping[str, Any]) -> None:
    require_same_schema(state)
    require_same_labels(parts, state)
