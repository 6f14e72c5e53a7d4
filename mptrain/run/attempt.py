"""One attempt to train a run: from its parts to a finished run directory, as rank 0 or as another rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptrain.config.config_diff import config_digest, describe_change
from mptrain.config.schema import Config
from mptrain.config.targets import Target
from mptrain.engine.loop import Loop
from mptrain.engine.options import Options
from mptrain.engine.parts import Parts
from mptrain.engine.telemetry import NoStorage, Storage
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.torchrun import RankLost
from mptrain.precision.support import Support, require_support
from mptrain.run.build.parts import build
from mptrain.run.consistency import (
    Change,
    changed_code,
    changed_training_data,
    digests_of,
    require_same_ranks,
    trained_on,
)
from mptrain.run.describe import describe, group_members
from mptrain.run.failure_report import explain_error, failure_status
from mptrain.run.tracking import track
from mptrain.runlog import (
    RecordWriter,
    RunDirectory,
    RunState,
    truncate_records,
    write_atomically,
    write_summary,
)
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.lost_updates import in_words
from mptrain.runlog.record_writer import Fanout, Sink, read_trained, write_trained
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import (
    EXIT_OK,
    ConfigError,
    MptrainError,
    Preempted,
    StorageError,
    instance,
)
from mptrain.system.files import expanded
from mptrain.system.records import EventRecord


@dataclass(frozen=True)
class RunOutcome:
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
    done: RunOutcome | None = None


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


@dataclass(frozen=True)
class Attempt:
    """One attempt to train a run: its directory, its parts, and what it continues from.

    Attributes:
        loaded: The checkpoint to continue from; None to start from the beginning.
        notes: Sentences for the user about this start; ``warnings`` likewise.
        changes: Changes of the configuration since the run was started: key, old value and new value.
        as_written: The configuration is that of the directory already and is not written again.
    """

    directory: RunDirectory
    config: Config
    parts: Parts
    options: Options
    loaded: LoadedCheckpoint | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    as_written: bool = False

    @property
    def from_step(self) -> int:
        """Training steps attempted before."""
        return self.loaded.manifest.step if self.loaded else 0


def train_run(attempt: Attempt, show: Show) -> RunOutcome:
    """Train a run to its end as rank 0, which holds the lock of its directory and writes its state.

    Raises:
        MptrainError: The run failed; ``run.json`` has the reason.
    """
    directory, parts = attempt.directory, attempt.parts
    before = directory.read_state()
    attempt, other_data = _prepare_directory(attempt)
    state = describe(directory, attempt.config, parts, before)
    changed = (*(describe_change(*change) for change in attempt.changes), *other_data) if attempt.loaded else ()
    digest = config_digest(attempt.config.yaml)
    state = state.begin(attempt.from_step, changed, digest)
    directory.write_state(state)
    writer = RecordWriter(directory.paths)
    higher = parts.task.higher_is_better
    store = CheckpointStore(directory.paths.checkpoints, attempt.config.checkpoint.keep, higher_is_better=higher)
    storage = Storage(directory.paths, writer, store, digest)
    loop: Loop | None = None
    sinks: Sequence[Sink] = ()
    try:
        parts.comm.broadcast_object(directory.root.absolute())
        displays = Fanout(())  # filled once the loop exists; their owner closes them
        loop = Loop(parts, attempt.options, storage, (displays,))
        notes = _record_start(attempt, loop, storage, forgive=before is not None and before.status == "failed")
        sinks = show(_info(attempt, loop.planned, notes))
        extensions = attempt.config.extensions
        sinks = [*sinks, *(_sink(path, extensions.allow) for path in extensions.sinks)]
        sinks = [*track(attempt.config, directory, state.id, attempt.from_step, [writer, *sinks]), *sinks]
        displays.sinks = tuple(sinks)
        summary = loop.run()
        write_summary(directory.paths.summary, summary)
        loop.require_success()
        displays.take(EventRecord("summary", loop.progress.step, summary))
        _close(writer, sinks)
        reason = f"stopped early: {summary['stopped_early']}" if summary["stopped_early"] else ""
        directory.write_state(state.end("done", reason, EXIT_OK, loop.progress.step))
        with contextlib.suppress(RankLost):  # the run is done, whatever happens to another rank
            parts.comm.all_reduce_ints([0])
        return RunOutcome(directory.root, summary)
    except BaseException as error:
        for sink in (*sinks, writer):
            with contextlib.suppress(Exception):  # report the original failure
                sink.close()
        shown = explain_error(error, attempt.config, directory, parts.comm)
        _record_end(shown, directory, state, loop.progress.step if loop else attempt.from_step)
        if shown is error:
            raise
        raise shown from error
    finally:
        for loader in parts.loaders.values():
            loader.close()


def _sink(path: str, allow: tuple[str, ...]) -> Sink:
    """Build a class of the user that receives records; raise ConfigError if it does not."""
    made: Sink = Target(path, {}, allow).build()
    if missing := [name for name in ("take", "close") if not callable(getattr(made, name, None))]:
        what = f"extensions.sinks: {path} returned {instance(made)} without {' and '.join(missing)}"
        raise ConfigError(what, "see mptrain/runlog/record_writer.py")
    return made


def _prepare_directory(attempt: Attempt) -> tuple[Attempt, tuple[str, ...]]:
    """Bring the directory to the state of the checkpoint.

    Return the attempt with all warnings, and sentences on training data that are not those of the earlier attempts.
    """
    directory, config, parts, loaded = attempt.directory, attempt.config, attempt.parts, attempt.loaded
    directory.remove_drafts()
    manifest = loaded.manifest if loaded else None
    lost = truncate_records(directory.paths, manifest.records if manifest else {}, manifest.digests if manifest else {})
    if not attempt.as_written:  # after the records have proved to be usable
        directory.write_config(config.yaml, config.overrides)
    other = (*changed_training_data(directory.root, parts), *changed_code(directory.root, parts)) if loaded else ()
    source = directory.root if loaded else config.weights and expanded(config.weights)
    known = frozenset(digests_of(parts.loaders["train"])) | (read_trained(source) if source else frozenset())
    write_trained(directory.paths.trained_samples, known)
    write_atomically(directory.paths.data, json.dumps(parts.data_card(), indent=2) + "\n")
    advice = require_support(config.precision, parts.device).advice if parts.policy.half else ""
    slow = (f"precision={config.precision.name} on {parts.device}: {advice}",) if advice else ()
    warnings = (*slow, *parts.warnings, *attempt.warnings, *lost, *other, *trained_on(known, parts))
    return replace(attempt, warnings=warnings), other


def _record_start(attempt: Attempt, loop: Loop, storage: Storage, *, forgive: bool) -> tuple[str, ...]:
    """Restore the checkpoint, record how the attempt begins, and return its notes with those on restoring."""
    notes, step, parts = attempt.notes, attempt.from_step, attempt.parts
    warnings = (*attempt.config.warnings, *attempt.warnings)  # the first were printed when the words were read
    if attempt.loaded is None:
        code = {} if parts.origin.code is None else {"model_code": parts.origin.code}
        start: dict[str, Any] = {"initial_weights": parts.origin.initial_weights, **code}
        events: list[tuple[str, dict[str, Any]]] = [("start", start)]
        events += [("note", {"message": sentence}) for sentence in notes]
        events += [("warning", {"message": sentence}) for sentence in warnings]
        lost = {learner.name: learner.weights.lost_at_start() for learner in parts.learners}
        events += [("no_master_weights", {"learner": name, **at, "run": True}) for name, at in lost.items() if at]
    else:
        storage.store.drop_after(step)
        notes = (*notes, *loop.checkpointing.restore(attempt.loaded.state, forgive=forgive))
        events = [("resume", {"notes": list(notes), "warnings": list(warnings)})]
    regrouped = attempt.loaded is None or any(
        key.startswith(("model.", "optimizer.", "learners.")) for key, _, _ in attempt.changes
    )
    if regrouped and (groups := group_members(attempt.config, parts)):
        events.append(("groups", dict(groups)))
    for kind, fields in events:
        storage.writer.take(EventRecord(kind, step, fields))
    return (*notes, *(in_words(*event) for event in events if event[0] == "no_master_weights"))


def _info(attempt: Attempt, planned: int, notes: tuple[str, ...]) -> RunInfo:
    config, parts = attempt.config, attempt.parts
    support = require_support(config.precision, parts.device)
    root = attempt.directory.root
    return RunInfo(config, parts, support, root, planned, attempt.from_step, notes, attempt.warnings)


def follow(config: Config, comm: Communicator) -> RunOutcome:
    """Train and evaluate as a rank other than 0 of a distributed run; writes only this rank's shards of tensors."""
    beginning = comm.broadcast_object(StartState())
    if beginning.done is not None:
        return beginning.done
    with comm.together():
        loaded = CheckpointStore(beginning.manifest.parent, 1).load(beginning.manifest) if beginning.manifest else None
        built = build(config, weights=loaded is None, comm=comm, micro_batches=min_micro_batches(config, loaded))
        require_same_ranks(config, comm)
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
    comm.all_reduce_ints([0])  # rank 0 has written the run, which a program may read on this rank
    return RunOutcome(root, summary)


def min_micro_batches(config: Config, loaded: LoadedCheckpoint | None) -> int:
    """Return the smallest number of micro-batches into which a resumed run may divide the batch of an update.

    It is the number, over all ranks, at the time of the checkpoint: on fewer ranks the micro-batches then need no more
    memory than before. It is 1 without a checkpoint, or if the user has changed ``train.accumulate`` since.
    """
    saved = loaded.state if loaded is not None else {}
    micro_batches = saved.get("micro_batches") if saved.get("accumulate") == config.train.accumulate else 1
    return micro_batches if isinstance(micro_batches, int) and 1 <= micro_batches <= config.train.batch_size else 1


def _close(writer: RecordWriter, sinks: Sequence[Sink]) -> None:
    for sink in (*sinks, writer):
        sink.close()


def _record_end(error: BaseException, directory: RunDirectory, state: RunState, reached: int) -> None:
    """Write reason and step of a failure to ``run.json``; on a full disk the run stays "running" and resumable."""
    to_step = None if isinstance(error, Preempted) and not error.saved else reached
    with contextlib.suppress(StorageError):
        hint = error.hint if isinstance(error, MptrainError) else ""
        directory.write_state(state.end(*failure_status(error, directory), to_step, hint))
