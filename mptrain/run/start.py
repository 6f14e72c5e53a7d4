"""Start of a training run from a configuration, or its resumption if a run of its name exists."""

from __future__ import annotations

from pathlib import Path

from mptrain.config.schema import Config
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.launch import launch_ranks
from mptrain.parallel.torchrun import remember_run, run_before_restart
from mptrain.precision.support import require_support
from mptrain.run.attempt import Attempt, Outcome, Show, StartState, follow, train_run
from mptrain.run.build.parallelism import check_parallelism, device_of
from mptrain.run.build.parts import build
from mptrain.run.resume import continue_run
from mptrain.run.same_ranks import require_same_ranks
from mptrain.run.tracking import require_logger
from mptrain.runlog import RunDirectory, create_run, existing_run, open_run
from mptrain.system.errors import EXIT_BUG, EXIT_PREEMPTED, ConfigError, MptrainError, StorageError
from mptrain.system.process_state import settings_restored
from mptrain.workloads.base.dataset import Dataset


@settings_restored()
def launch(config: Config, show: Show, dataset: Dataset | None = None) -> Outcome:
    """Train a configuration: start a new run, or resume the existing run of its name if ``run.resume`` allows it.

    With several ranks, it starts the other processes, or joins those of torchrun. It returns when training is finished.
    ``show`` is called when training is about to begin and returns the sinks that display the run's records. ``dataset``
    takes the place of the configured one, in a single process.

    Raises:
        MptrainError: The run failed; its directory, if there is one, has the reason.
    """
    check_parallelism(config, config.distributed.procs or 1)  # before the processes are started
    with launch_ranks(config.distributed) as comm:
        require_same_ranks(config, comm)
        return _launch(config, show, comm, dataset) if comm.is_rank_zero else follow(config, comm)


def _launch(config: Config, show: Show, comm: Communicator, dataset: Dataset | None) -> Outcome:
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
        return continue_run(existing, config, show, comm, dataset=dataset)
    require_support(config.precision, device_of(config.device, comm))  # before anything is written or loaded
    require_logger(config)
    label = "-".join(config.chosen.get(group, "custom") for group in ("model", "dataset", "precision"))
    comm.broadcast_object(StartState())
    with comm.together():
        built = build(config, comm=comm, dataset=dataset)
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
