"""``mptrain diagnose``: looks at a step of a run, or of a configuration that was never run, and tries what would mend it.

Of the run directory nothing is changed but what is written into its folder ``diagnosis``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mptrain.campaign.attempt import find_run
from mptrain.campaign.remedies import Case, remedies
from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.dataset.batch import Batch
from mptrain.diagnostics.findings import cause_of
from mptrain.diagnostics.remarkable import notes_of, rows_of
from mptrain.engine.revisit import Moment, look, moment_at, stand_at
from mptrain.engine.snapshot import require_same_labels, require_same_schema
from mptrain.errors import CheckpointError, ConfigError, StorageError
from mptrain.report.diagnosis_page import write_diagnosis
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.diagnosis import FOLDER, Examination
from mptrain.runlog.manifest import manifests_in, step_of
from mptrain.runlog.storage import storing
from mptrain.runlog.strict_json import parse_strict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mptrain.config.schema import Config
    from mptrain.diagnostics.observation import Observation
    from mptrain.engine.job import Options, Parts
    from mptrain.runlog import RunDirectory


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
    """A step that can be looked at: what is built, the moment, the learner that is asked about, and how it was come by."""

    parts: Parts
    moment: Moment
    learner: str | None
    remarks: tuple[str, ...]


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
    failed = directory.paths.failure / "step.pt"
    state = directory.read_state()
    if step is None and failed.exists() and (state is None or state.status != "done"):
        place = _failed(directory, config)
    else:
        place = _standing(directory, config, step)
    changed = (f"under {' '.join(overrides)}, unlike the run itself",) if overrides else ()
    found = _examine(str(directory.root), config, replace(place, remarks=(*place.remarks, *changed)))
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
        notes=notes_of(seen),
        remarks=(*place.remarks, *injected),
        modules=rows_of(seen),
        remedies=remedies(Case(config, parts, moment, seen, cause)),
        operators=dict(seen.census),
    )


def _asked_about(several: tuple[Observation, ...], learner: str | None) -> Observation:
    """The learner that ended the run; else the first with a step that goes wrong; else the first."""
    for seen in several:
        if seen.learner == learner if learner is not None else not seen.finite:
            return seen
    return several[0]


def _failed(directory: RunDirectory, config: Config) -> _Place:
    """The step that ended a run, as it was kept."""
    recorded = _recorded(directory)
    with storing(directory.paths.failure, "read"):
        kept: dict[str, Any] = torch.load(directory.paths.failure / "step.pt", weights_only=True, map_location="cpu")
    step, learner = int(kept["step"]), str(recorded["learner"])
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    same = next((path for path in manifests_in(store.folder) if step_of(path) == step), None)
    loaded = store.load(same) if same else store.load_latest()
    if loaded is None:
        raise CheckpointError(
            f"{directory.root} has no checkpoint: its weights were not finite when it ended, and none was kept before",
            f"look at an earlier step, from the start: mptrain diagnose {directory.root} --step {max(1, step - 1)}",
        )
    remarks = [f"the step that ended the run, {step:,}, done again: {recorded['cause']} was the cause on record"]
    if loaded.manifest.step != step:
        remarks.append(f"the weights of that step were not kept: these are those of step {loaded.manifest.step:,}")
    parts, _ = build(config, weights=False)
    tensors = kept["batch"]
    more = {name: tensor.to(parts.device) for name, tensor in tensors.items() if name not in ("inputs", "targets")}
    counts = tuple(kept["counts"]) if kept["counts"] else None
    batch = Batch(tensors["inputs"].to(parts.device), tensors["targets"].to(parts.device), counts, more)
    accounts = loaded.state["accounts"]
    scales = {
        one.name: float((accounts[one.name]["last"] or {"loss_scale": 1.0})["loss_scale"]) for one in parts.learners
    }
    scales[learner] = float(recorded["loss_scale"])
    moment = Moment(step, loaded.state, batch, False, scales, kept["random"] or loaded.state["random"])
    _require_fit(parts, loaded.state)
    stand_at(parts, moment)
    return _Place(parts, moment, learner, tuple(remarks))


def _standing(directory: RunDirectory, config: Config, step: int | None) -> _Place:
    """A certain step of a run, or the one after its last checkpoint."""
    store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
    paths = [path for path in manifests_in(store.folder) if step is None or step_of(path) < step]
    loaded = store.load(paths[0]) if paths else None
    parts, options = build(config, weights=loaded is None)
    before = loaded.manifest.step if loaded else 0
    wanted = before + 1 if step is None else step
    begins = f"the checkpoint of step {before:,}" if loaded else "the start"
    trained = f", and {wanted - 1 - before:,} steps trained in memory" if wanted - 1 > before else ""
    if loaded is not None:
        _require_fit(parts, loaded.state)
    moment = _moment(parts, options, loaded.state if loaded else None, wanted)
    return _Place(parts, moment, None, (f"step {wanted:,}, from {begins}{trained}",))


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


def _recorded(directory: RunDirectory) -> dict[str, Any]:
    path = directory.paths.failure / "diagnosis.json"
    with storing(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        recorded: dict[str, Any] = parse_strict(text)
        return {name: recorded[name] for name in ("learner", "loss_scale", "cause")}
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged", f"look at a step by number: mptrain diagnose {directory.root} --step N"
        ) from error
