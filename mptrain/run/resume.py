"""Start of a training run, or its resumption from its last intact checkpoint with the same configuration and data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mptrain.config.catalogue import RECHOSEN
from mptrain.config.compose import command_with, is_allow_override
from mptrain.config.config_diff import describe_change, diff
from mptrain.config.schema import Config
from mptrain.config.targets import Given
from mptrain.config.value_checks import show
from mptrain.engine.checkpointing import require_fit, require_same_schema
from mptrain.engine.options import OnStep, Options, StopFunction
from mptrain.engine.parts import Parts
from mptrain.engine.progress import EarlyStoppingState, Progress
from mptrain.engine.validation import early_stop, stopped_by_program
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.launch import launch_ranks
from mptrain.parallel.torchrun import remember_run, run_before_restart, torchrun_command
from mptrain.precision.support import require_support
from mptrain.run.attempt import Attempt, RunOutcome, Show, StartState, follow, min_micro_batches, train_run
from mptrain.run.build.parallelism import check_parallelism, device_of
from mptrain.run.build.parts import build
from mptrain.run.consistency import (
    Change,
    reload_config,
    require_same_ranks,
    require_same_units,
    require_unchanged_config,
    require_undamaged_config,
    written_config,
)
from mptrain.run.tracking import require_logger
from mptrain.runlog import (
    RunDirectory,
    RunState,
    create_run,
    existing_run,
    find_run,
    open_run,
    read_summary,
)
from mptrain.runlog.checkpoints import CheckpointStore, LoadedCheckpoint
from mptrain.runlog.manifest import manifest_name
from mptrain.system.errors import (
    EXIT_BUG,
    EXIT_PREEMPTED,
    CheckpointError,
    ConfigError,
    MptrainError,
    Problem,
    StorageError,
)
from mptrain.system.process_state import settings_restored


@settings_restored()
def resume(
    run: str,
    overrides: Sequence[str],
    show: Show,
    given: Mapping[str, Given] = MappingProxyType({}),
    stop: StopFunction | None = None,
    on_step: OnStep | None = None,
) -> RunOutcome:
    """Resume training a run from its last intact checkpoint, and return its outcome when it is finished.

    ``run`` is the run directory, or ``last`` for the run that was started last. Overrides change the configuration from
    here on and are written to the run's ``config.yaml``. ``show`` is that of `launch`. A Python program gives parts by
    group (``given``), and functions to ``stop`` and to call ``on_step``.

    Raises:
        MptrainError: The run cannot be resumed, or failed.
    """
    directory = find_run(run)
    written = directory.read_config()
    config = reload_config(directory, overrides, given)
    words = _all_overrides(directory.read_overrides(), overrides)
    config = replace(config, overrides=words, stop=stop, on_step=on_step)
    by_key = {word.partition("=")[0].lstrip("+~"): word for word in overrides if not is_allow_override(word)}
    check_parallelism(config, config.distributed.procs or 1)  # before the processes are started
    with launch_ranks(config.distributed) as comm:
        require_same_ranks(config, comm)
        if not comm.is_rank_zero:
            return follow(config, comm)
        return continue_run(directory, config, show, comm, by_key, written)


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


@dataclass(frozen=True)
class _Resumption:
    """An existing run that is to be trained on, under its lock.

    Attributes:
        changes: Differences from the configuration on record: key, old value and new value.
        overrides: Overrides by key that the user has given to resume; None if a run of this name happened to exist.
        old: The configuration on record, as YAML; ``written`` if there is one.
    """

    directory: RunDirectory
    config: Config
    overrides: Mapping[str, str] | None
    state: RunState | None
    written: bool
    old: str
    changes: tuple[Change, ...]

    @property
    def is_done(self) -> bool:
        return self.state is not None and self.state.status == "done"

    def require_unchanged(self) -> None:
        """Raise ConfigError if the configuration has changed although nobody asked to change it."""
        if not self.changes or self.overrides is not None:
            return
        require_undamaged_config(self.directory, self.old, self.state)
        problems = [Problem(f"{self.directory.root}: {describe_change(*change)}") for change in self.changes]
        line = f"{torchrun_command('mptrain resume')} {self.directory.root} KEY=VALUE"
        line = command_with(line, self.config.extensions.allow)
        hint = f"choose another run.name, or change it on purpose: {line}"
        raise ConfigError([*problems, Problem("a run is resumed with the configuration that it started with", hint)])

    def checkpoint(self) -> tuple[LoadedCheckpoint | None, tuple[str, ...]]:
        """Return the last intact checkpoint, None if nothing was saved yet, and warnings about it."""
        store = CheckpointStore(self.directory.paths.checkpoints, self.config.checkpoint.keep)
        loaded = store.load_latest()
        if loaded is None:
            return None, ()
        if self.overrides is not None:
            _require_effect(self.changes)
        changed = require_unchanged_config(self.directory, self.old, self.state, loaded.manifest, self.overrides or {})
        skipped = [f"{reason}; using the checkpoint before it" for reason in loaded.skipped]
        return loaded, (*skipped, *filter(None, [changed]))

    def attempt(
        self, built: tuple[Parts, Options], loaded: LoadedCheckpoint | None, warnings: tuple[str, ...]
    ) -> Attempt:
        """Return the attempt that goes on from a checkpoint; raise if there is nothing to do, or it does not fit."""
        parts, options = built
        if loaded is None:
            _require_never_saved(self.directory, self.state)
            notes = ("there is no checkpoint yet: starting from the beginning", *parts.notes)
        else:
            require_fit(parts, loaded.state)
            require_same_units(self.directory, parts)
            _require_work(self.directory, self.config, built, loaded, done=self.is_done)
            notes = tuple(parts.fault.describe())
        return Attempt(
            self.directory,
            self.config,
            parts,
            options,
            loaded,
            notes=(*(f"changed: {describe_change(*change)}" for change in self.changes), *notes),
            warnings=warnings,
            changes=self.changes,
            as_written=self.written and self.overrides is None,
        )


def continue_run(
    directory: RunDirectory,
    config: Config,
    show: Show,
    comm: Communicator,
    overrides: Mapping[str, str] | None = None,
    before: str | None = None,
) -> RunOutcome:
    """Train an existing run on as rank 0, and return its outcome; at once if it is done and nothing has changed.

    ``overrides`` has the overrides by key with which the user resumes it; None if a run of this name happened to exist.
    ``before`` is the text on record that ``config`` was made from, before the lock was held; None if it was not.
    """
    with directory.lock():
        written = directory.paths.config.exists()
        old = written_config(directory) if written else config.yaml
        if before not in (None, old):
            raise StorageError(f"{directory.paths.config} was changed while this process started", "resume it again")
        changes = tuple(diff(old, config.yaml))
        resumption = _Resumption(directory, config, overrides, directory.read_state(), written, old, changes)
        resumption.require_unchanged()
        if resumption.is_done and not changes:
            done = RunOutcome(directory.root, read_summary(directory.paths.summary), already_done=True)
            comm.broadcast_object(StartState(done=done))
            return done
        require_logger(config)
        loaded, warnings = resumption.checkpoint()
        manifest = None if loaded is None else directory.paths.checkpoints / manifest_name(loaded.manifest.step)
        forgive = resumption.state is not None and resumption.state.status == "failed"
        comm.broadcast_object(StartState(manifest and manifest.absolute(), forgive))
        remember_run(str(directory.root))
        with comm.together():
            micro_batches = min_micro_batches(config, loaded)
            built = build(config, weights=loaded is None, comm=comm, micro_batches=micro_batches)
            require_same_ranks(config, comm)
        return train_run(resumption.attempt(built, loaded, warnings), show)


def _require_effect(changes: Sequence[Change]) -> None:
    """Reject changes of keys that have no effect once a run has a checkpoint, with one ConfigError for all.

    An initial scale may change together with other keys of its scaler, because it must be within their limits.
    """
    changed = {key for key, _, _ in changes}
    inert = {key: "its weights are those" for key in changed if key == "model.weights"}
    for key in changed:
        rule, _, name = key.rpartition(".")
        alone = not any(other.startswith(f"{rule}.") for other in changed - {key})
        if name == "init_scale" and rule.endswith("scaler") and alone:
            inert[key] = "its loss scale is that"
    if inert:
        sentences = [f"{key} has no effect on a resumed run: {what} of the checkpoint" for key, what in inert.items()]
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
    if done and (why := stopped_by_program(Progress.from_state(loaded.state["progress"]), planned)):
        more = f"set train.epochs={2 * config.train.epochs}"
        raise ConfigError(f"{directory.root} stopped early: {why}; there is nothing left to do", more)
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


@settings_restored()
def launch(config: Config, show: Show) -> RunOutcome:
    """Train a configuration: start a new run, or resume the existing run of its name if ``run.resume`` allows it.

    With several ranks, it starts the other processes, or joins those of torchrun. It returns when training is finished.
    ``show`` is called when training is about to begin and returns the sinks that display the run's records.

    Raises:
        MptrainError: The run failed; its directory, if there is one, has the reason.
    """
    check_parallelism(config, config.distributed.procs or 1)  # before the processes are started
    with launch_ranks(config.distributed) as comm:
        require_same_ranks(config, comm)
        return _launch(config, show, comm) if comm.is_rank_zero else follow(config, comm)


def _launch(config: Config, show: Show, comm: Communicator) -> RunOutcome:
    if before := run_before_restart():
        return continue_run(_restarted_run(before), config, show, comm)
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
        return continue_run(existing, config, show, comm)
    require_support(config.precision, device_of(config.device, comm))  # before anything is written or loaded
    require_logger(config)
    chosen = [config.chosen.get(group, "custom") for group in ("model", "dataset", "precision")]
    label = "-".join(name.rpartition(".")[2].strip("<>") for name in chosen)  # some are the paths of classes
    comm.broadcast_object(StartState())
    with comm.together():
        built = build(config, comm=comm)
        require_same_ranks(config, comm)  # again: building has imported more code
    directory = create_run(root, label, name)
    remember_run(str(directory.root))
    with directory.lock():
        return train_run(Attempt(directory, config, *built, notes=built[0].notes), show)


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
