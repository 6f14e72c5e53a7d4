"""Start or resumption of a training run: from a checked configuration to a finished run directory.

This module decides whether a run starts, resumes or is done already, holds the lock, and writes the state of the run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptrain.build.parallelism import check_parallelism, device_of
from mptrain.build.parts import build, settings_restored
from mptrain.config.catalogue import RECHOSEN
from mptrain.config.config_diff import config_digest, describe_change, diff
from mptrain.config.schema import Config
from mptrain.config.trust import command_with, is_allow_override
from mptrain.config.value_checks import show
from mptrain.engine.loop import Loop
from mptrain.engine.monitor import early_stop
from mptrain.engine.parts import EarlyStoppingState, Options, Parts
from mptrain.engine.run_storage import NoStorage, Storage
from mptrain.engine.snapshot import require_fit, require_same_schema
from mptrain.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_PREEMPTED,
    CheckpointError,
    ConfigError,
    MptrainError,
    Preempted,
    Problem,
    StorageError,
)
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.launch import launch_ranks
from mptrain.parallel.torchrun import remember_run, run_before_restart, torchrun_command
from mptrain.precision.support import Support, require_support
from mptrain.records import EventRecord
from mptrain.run.consistency import (
    changed_training_data,
    digests_of,
    reload_config,
    require_unchanged_config,
    require_undamaged_config,
    trained_on,
    written_config,
)
from mptrain.run.describe import describe, group_members
from mptrain.run.failure_report import explain_error, failure_status
from mptrain.run.tracking import require_logger, track
from mptrain.runlog import (
    RecordWriter,
    RunDirectory,
    RunState,
    create_run,
    existing_run,
    find_run,
    open_run,
    read_summary,
    truncate_records,
    write_atomically,
    write_summary,
)
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.manifest import manifest_name
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.sink import Fanout, Sink
from mptrain.runlog.trained_samples import read_trained, write_trained


@dataclass(frozen=True)
class Outcome:
    """Result of a training run that finished.

    Attributes:
        root: The run directory.
        summary: Contents of ``summary.json``: final metrics, counts of steps and overflows, speed.
        already_done: Whether the run was finished before, so that nothing was trained.
    """

    root: Path
    summary: dict[str, Any]
    already_done: bool = False


@dataclass(frozen=True)
class StartState:
    """Message from rank 0 to the other ranks of a distributed run, sent before they build their model.

    Attributes:
        manifest: Manifest of the checkpoint to resume from; None for a new run.
        forgive: Whether to reset the count of consecutive overflows.
        done: Outcome of the run if it is done already, else None.
    """

    manifest: Path | None = None
    forgive: bool = False
    done: Outcome | None = None


@dataclass(frozen=True)
class RunInfo:
    """Information for the display of a run that is about to train.

    Attributes:
        support: Support of the precision mode by the device.
        root: The run directory.
        planned: Total number of planned steps.
        from_step: Training steps attempted before this start or resume; 0 for a new run.
        notes: Remarks on resuming, one sentence each.
        warnings: Deviations from the configuration, or problems with the resumed state, one sentence each.
    """

    config: Config
    parts: Parts
    support: Support
    root: Path
    planned: int
    from_step: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


Show = Callable[[RunInfo], Sequence[Sink]]


@settings_restored()
def launch(config: Config, show: Show) -> Outcome:
    """Train a configuration: start a new run, or resume the existing run of its name if ``run.resume`` allows it.

    With several ranks, it starts the other processes, or joins those of torchrun. It returns when training is finished.
    ``show`` is called when training is about to begin and returns the sinks that display the run's records.

    Raises:
        MptrainError: The run failed; its directory, if there is one, has the reason.
    """
    check_parallelism(config, config.distributed.procs or 1)  # before the processes are started
    with launch_ranks(config.distributed) as comm:
        return _launch(config, show, comm) if comm.is_rank_zero else _follow(config, comm)


def _launch(config: Config, show: Show, comm: Communicator) -> Outcome:
    if before := run_before_restart():
        return _continue(_restarted_run(before), config, show, comm, explicit=False)
    root, name = Path(config.run.root), config.run.name
    existing = existing_run(root, name) if name else None
    if config.run.resume != "never" and not name:
        raise ConfigError(f"run.resume={config.run.resume} needs a run.name", "add run.name=NAME")
    if existing is None and config.run.resume == "must":
        raise StorageError(f"run.resume=must: there is no run {root / str(name)}", "use run.resume=auto to start it")
    if existing is not None and config.run.resume == "never":
        raise StorageError(
            f"run directory {existing.root} exists", "continue it with run.resume=auto, or choose another run.name"
        )
    if existing is not None:
        return _continue(existing, config, show, comm, explicit=False)
    require_support(config.precision, device_of(config.device, comm))  # before anything is written or loaded
    require_logger(config)
    label = "-".join(config.chosen.get(group, "custom") for group in ("model", "dataset", "precision"))
    comm.broadcast_object(StartState())
    with comm.together():
        built = build(config, comm=comm)
    directory = create_run(root, label, name)
    remember_run(str(directory.root))
    with directory.lock():
        return _attempt(directory, config, built, None, show, built[0].notes)


def _restarted_run(root: str) -> RunDirectory:
    """Return the run for which torchrun has restarted these ranks.

    If it failed for another reason than a lost rank, it would fail again: raise MptrainError with its exit code.
    """
    directory = open_run(Path(root))
    state = directory.read_state()
    if state is not None and state.status == "failed" and state.exit_code not in (None, EXIT_BUG, EXIT_PREEMPTED):
        error = MptrainError(f"{directory.root} has failed and is not restarted: {state.reason}")
        error.exit_code = state.exit_code  # type: ignore[misc]
        raise error
    return directory


@settings_restored()
def resume(run: str, overrides: Sequence[str], show: Show) -> Outcome:
    """Resume training a run from its last intact checkpoint, and return its outcome when it is finished.

    ``run`` is the run directory, or ``last`` for the run that was started last. Overrides change the configuration from
    here on and are written to the run's ``config.yaml``. ``show`` is that of `launch`.

    Raises:
        MptrainError: The run cannot be resumed, or failed.
    """
    directory = find_run(run)
    config = reload_config(directory, overrides)
    config = replace(config, overrides=_all_overrides(directory.read_overrides(), overrides))
    said = {word.partition("=")[0].lstrip("+~"): word for word in overrides if not is_allow_override(word)}
    check_parallelism(config, config.distributed.procs or 1)  # before the processes are started
    with launch_ranks(config.distributed) as comm:
        if not comm.is_rank_zero:
            return _follow(config, comm)
        return _continue(directory, config, show, comm, explicit=True, said=said)


def _all_overrides(before: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that reproduce a resumed run: the earlier ones that still hold, then the new ones.

    An option that is chosen again replaces all earlier keys of its group. A value replaces the earlier keys below it,
    unless it is a mapping, which is merged with them.
    """
    values = {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in overrides)}
    groups = {other for key in values if key in RECHOSEN for other in (key, *RECHOSEN[key])}
    whole = tuple(f"{key}." for key, value in values.items() if not value.startswith("{"))

    def holds(word: str) -> bool:
        key = word.partition("=")[0].lstrip("+~")
        of_group = re.sub(r"^learners\.[^.]+\.", "", key).partition(".")[0] in groups
        return not of_group and key not in values and not key.startswith(whole)

    return (*filter(holds, before), *overrides)


def _continue(
    directory: RunDirectory,
    config: Config,
    show: Show,
    comm: Communicator,
    *,
    explicit: bool,
    said: Mapping[str, str] | None = None,
) -> Outcome:
    with directory.lock():
        path = directory.paths.config
        old = written_config(directory) if path.exists() else config.yaml
        changes = diff(old, config.yaml)
        state = directory.read_state()
        if changes and not explicit:
            require_undamaged_config(directory, old, state)
            problems = [Problem(f"{directory.root}: {describe_change(*change)}") for change in changes]
            line = f"{torchrun_command('mptrain resume')} {directory.root} KEY=VALUE"
            line = command_with(line, config.extensions.allow)
            hint = f"choose another run.name, or change it on purpose: {line}"
            raise ConfigError(
                [*problems, Problem("a run is resumed with the configuration that it started with", hint)]
            )
        if state is not None and state.status == "done" and not changes:
            done = Outcome(directory.root, read_summary(directory.paths.summary), already_done=True)
            comm.broadcast_object(StartState(done=done))
            return done
        require_logger(config)
        store = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep)
        loaded = store.load_latest()
        if loaded is not None and explicit:
            _require_effect(changes)
        warning = (
            require_unchanged_config(directory, old, state, loaded.manifest, said or {}) if loaded is not None else ""
        )
        manifest = None if loaded is None else directory.paths.checkpoints / manifest_name(loaded.manifest.step)
        forgive = state is not None and state.status == "failed"
        comm.broadcast_object(StartState(manifest and manifest.absolute(), forgive))
        remember_run(str(directory.root))
        with comm.together():
            built = build(config, weights=loaded is None, comm=comm, micro_batches=min_micro_batches(config, loaded))
        if loaded is not None:
            require_fit(built[0], loaded.state)  # before the run directory is changed
            _require_work(directory, config, built, loaded, done=state is not None and state.status == "done")
        changed = tuple(describe_change(*change) for change in changes)
        notes = [f"changed: {sentence}" for sentence in changed]
        warnings = [f"{reason}; using the checkpoint before it" for reason in loaded.skipped] if loaded else []
        warnings += [warning] if warning else []
        if loaded is None:
            _require_never_saved(directory, state)
            notes += ["there is no checkpoint yet: starting from the beginning", *built[0].notes]
        else:
            notes += built[0].fault.describe()
        as_written = path.exists() and not explicit
        return _attempt(
            directory, config, built, loaded, show, tuple(notes), tuple(warnings), changed, as_written=as_written
        )


def _follow(config: Config, comm: Communicator) -> Outcome:
    """Train and evaluate as a rank other than 0 of a distributed run; writes only this rank's shards of tensors."""
    beginning = comm.broadcast_object(StartState())
    if beginning.done is not None:
        return beginning.done
    with comm.together():
        loaded = CheckpointStore(beginning.manifest.parent, 1).load(beginning.manifest) if beginning.manifest else None
        built = build(config, weights=loaded is None, comm=comm, micro_batches=min_micro_batches(config, loaded))
    parts, options = built
    root = comm.broadcast_object(Path())
    try:
        loop = Loop(parts, options, NoStorage(RunPaths(root)))
        if loaded is not None:
            loop.checkpointing.restore(loaded.state, forgive=beginning.forgive)
    except BaseException as error:  # so that ranks that wait for this one can report why it ended
        comm.send_error(error)
        raise
    summary = loop.run()
    loop.require_success()
    return Outcome(root, summary)


def min_micro_batches(config: Config, loaded: LoadedCheckpoint | None) -> int:
    """Return the smallest number of micro-batches into which a resumed run may divide the batch of an update.

    It is the number, over all ranks, at the time of the checkpoint: on fewer ranks the micro-batches then need no more
    memory than before. It is 1 without a checkpoint, or if the user has changed ``train.accumulate`` since.
    """
    saved = loaded.state if loaded is not None else {}
    found = saved.get("micro_batches") if saved.get("accumulate") == config.train.accumulate else 1
    return found if isinstance(found, int) and 1 <= found <= config.train.batch_size else 1


def _require_effect(changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Reject changes of keys that have no effect once a run has a checkpoint, with one ConfigError for all.

    An initial scale may change together with other keys of its scaler, because it must be within their limits.
    """
    changed = {key for key, _, _ in changes}
    found = {key: "its weights are those" for key in changed if key == "model.weights"}
    for key in changed:
        rule, _, name = key.rpartition(".")
        alone = not any(other.startswith(f"{rule}.") for other in changed - {key})
        if name == "init_scale" and rule.endswith("scaler") and alone:
            found[key] = "its loss scale is that"
    if found:
        sentences = [f"{key} has no effect on a resumed run: {what} of the checkpoint" for key, what in found.items()]
        raise ConfigError([Problem(what, "leave it out, or start another run with it") for what in sentences])


def _require_work(
    directory: RunDirectory, config: Config, built: tuple[Parts, Options], loaded: LoadedCheckpoint, *, done: bool
) -> None:
    """Raise ConfigError if a resumed run has reached its end already."""
    parts, options = built
    require_same_schema(loaded.state)
    step, planned = loaded.manifest.step, options.train.planned(parts.loaders["train"].steps_per_epoch)
    trained, minutes = loaded.state["progress"]["seconds"] / 60, options.train.max_minutes
    if step > planned or (done and step >= planned):
        raise ConfigError(
            f"{directory.root} is at step {step:,}, and train.epochs={config.train.epochs} with "
            f"train.max_steps={show(config.train.max_steps)} ends it at step {planned:,}: there is nothing left to do",
            "set a larger train.max_steps or train.epochs",
        )
    state = EarlyStoppingState.from_state(loaded.state["progress"])
    if done and (why := early_stop(parts.task, options.train.early_stopping, state)):
        raise ConfigError(
            f"{directory.root} stopped early: {why}; there is nothing left to do",
            f"set train.early_stopping=null, or train.early_stopping.patience={2 * state.bad}",
        )
    if done and minutes is not None and trained >= minutes:
        raise ConfigError(
            f"{directory.root} has trained for {trained:.3g} minutes, and train.max_minutes={minutes:g} ends it there: "
            "there is nothing left to do",
            f"set train.max_minutes={2 * trained:.3g}, or train.max_minutes=null",
        )


def _require_never_saved(directory: RunDirectory, state: RunState | None) -> None:
    """Raise CheckpointError if a run without checkpoints was saved before, so that it must not start over.

    A run was saved if it finished, was stopped in order, or resumed from a checkpoint.
    """
    attempts = state.attempts if state else ()
    in_order = bool(attempts) and attempts[-1].to_step is not None  # an immediate stop saves nothing
    saved = state is not None and (state.status == "done" or (state.status == "preempted" and in_order))
    if saved or any(attempt.from_step for attempt in attempts):
        raise CheckpointError(
            f"{directory.paths.checkpoints} has no checkpoint, but the run was saved there",
            "restore the folder from a copy, or start another run",
        )


def _attempt(
    directory: RunDirectory,
    config: Config,
    built: tuple[Parts, Options],
    loaded: LoadedCheckpoint | None,
    show: Show,
    notes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    changed: tuple[str, ...] = (),
    *,
    as_written: bool = False,
) -> Outcome:
    parts, options = built
    lost = _prepare_directory(directory, config, loaded, as_written=as_written)
    warnings = (*parts.warnings, *warnings, *lost)
    before = directory.read_state()
    from_step = loaded.manifest.step if loaded else 0
    if loaded and (other := changed_training_data(directory.root, parts)):
        warnings, changed = (*warnings, *other), (*changed, *other)
    known = read_trained(directory.root)
    if loaded is None:
        known = read_trained(config.weights.expanduser()) if config.weights else frozenset()
    known |= frozenset(digests_of(parts.loaders["train"]))
    write_trained(directory.paths.trained_samples, known)
    warnings += trained_on(known, parts)
    write_atomically(directory.paths.data, json.dumps(parts.data_card(), indent=2) + "\n")
    state = describe(directory, config, parts, before)
    state = state.begin(from_step, changed if loaded else ())
    directory.write_state(state)
    writer = RecordWriter(directory.paths)
    store = CheckpointStore(
        directory.paths.checkpoints, config.checkpoint.keep, higher_is_better=parts.task.higher_is_better
    )
    storage = Storage(directory.paths, writer, store, config_digest(config.yaml))
    loop: Loop | None = None
    sinks: Sequence[Sink] = ()
    try:
        parts.comm.broadcast_object(directory.root.absolute())
        displays = Fanout(())  # filled once the loop exists; their owner closes them
        loop = Loop(parts, options, storage, (displays,))
        if loaded is None:
            writer.take(EventRecord("start", 0, {"initial_weights": parts.origin.initial_weights}))
            for sentence in notes:
                writer.take(EventRecord("note", 0, {"message": sentence}))
            for sentence in warnings:
                writer.take(EventRecord("warning", 0, {"message": sentence}))
        else:
            storage.store.drop_after(from_step)
            forgive = before is not None and before.status == "failed"
            notes = (*notes, *loop.checkpointing.restore(loaded.state, forgive=forgive))
            writer.take(EventRecord("resume", from_step, {"notes": list(notes), "warnings": list(warnings)}))
        regrouped = loaded is None or any(text.startswith(("model.", "optimizer.", "learners.")) for text in changed)
        if regrouped and (groups := group_members(config, parts)):
            writer.take(EventRecord("groups", from_step, dict(groups)))
        support = require_support(config.precision, parts.device)
        sinks = show(RunInfo(config, parts, support, directory.root, loop.planned, from_step, notes, warnings))
        sinks = [*track(config, directory, state.id, from_step, [writer, *sinks]), *sinks]
        displays.sinks = tuple(sinks)
        summary = loop.run()
        write_summary(directory.paths.summary, summary)
        loop.require_success()
        displays.take(EventRecord("summary", loop.progress.step, summary))
        _close(writer, sinks)
        reason = f"stopped early: {summary['stopped_early']}" if summary["stopped_early"] else ""
        directory.write_state(state.end("done", reason, EXIT_OK, loop.progress.step))
        return Outcome(directory.root, summary)
    except BaseException as error:
        for sink in (*sinks, writer):
            with contextlib.suppress(Exception):  # report the original failure
                sink.close()
        shown = explain_error(error, config, directory, parts.comm)
        _record_end(shown, directory, state, loop.progress.step if loop else from_step)
        if shown is error:
            raise
        raise shown from error
    finally:
        for loader in parts.loaders.values():
            loader.close()


def _prepare_directory(
    directory: RunDirectory, config: Config, loaded: LoadedCheckpoint | None, *, as_written: bool
) -> Sequence[str]:
    """Truncate the records to the checkpoint, write the configuration, and return warnings about lost records."""
    directory.remove_drafts()
    manifest = loaded.manifest if loaded else None
    lost = truncate_records(directory.paths, manifest.records if manifest else {}, manifest.digests if manifest else {})
    if not as_written:  # after the records have proved to be usable
        directory.write_config(config.yaml, config.overrides)
    return lost


def _close(writer: RecordWriter, sinks: Sequence[Sink]) -> None:
    for sink in (*sinks, writer):
        sink.close()


def _record_end(error: BaseException, directory: RunDirectory, state: RunState, reached: int) -> None:
    """Write reason and step of a failure to ``run.json``; on a full disk the run stays "running" and resumable."""
    to_step = None if isinstance(error, Preempted) and not error.saved else reached
    with contextlib.suppress(StorageError):
        hint = error.hint if isinstance(error, MptrainError) else ""
        directory.write_state(state.end(*failure_status(error, directory), to_step, hint))
