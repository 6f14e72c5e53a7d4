"""Planning, running and resuming of sweeps, with ``sweep.json`` kept up to date.

``sweep.json`` defines the sweep and is written before any job starts. Running a sweep means running every job whose run
directory does not have the status ``done``. An `mptrain.study.sweep.executor.Executor` starts the processes or jobs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from mptrain.config.compose import Composer, command_with, packages_of
from mptrain.config.launcher import Launcher
from mptrain.config.overrides import quoted
from mptrain.config.schema import RunOptions
from mptrain.runlog.atomic_files import TEMPORARY, storage_errors
from mptrain.runlog.directory import LockHolder, RunDirectory, hold_lock, holder_of, require_outside_runs
from mptrain.runlog.run_paths import RunPaths, fresh_name
from mptrain.runlog.run_state import RunState
from mptrain.runlog.sweeps import SWEEP_JSON, Kind, Sweep, SweepJob, is_sweep, read_sweep, write_sweep
from mptrain.study.sweep.executor import Executor, JobOutcome, JobProgress, JobSpec, Listener, Program
from mptrain.study.sweep.local_executor import LocalExecutor, Slots
from mptrain.study.sweep.points import NOT_SWEPT, Point, directory_name
from mptrain.study.sweep.slurm_executor import SlurmExecutor, require_none_queued
from mptrain.system.errors import EXIT_OK, EXIT_SWEEP, ConfigError, StorageError
from mptrain.system.masking import masked

#: Maximum wait in seconds for runs of a killed sweep to save their state, before the other points start.
_PATIENCE = 60.0


class SweepDisplay(Protocol):
    """Protocol of displays of a running sweep, called in the process that runs it."""

    def changed(self, sweep: Sweep, job: SweepJob) -> None:
        """Show that a job has started or ended; both arguments have its new status, as now stored in ``sweep.json``."""

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Show the latest progress of the running job with this number, from 0."""

    def stopping(self, name: str) -> None:
        """Show that a signal, such as ``SIGINT``, requested a stop and that running jobs save their state."""

    def tick(self) -> None:
        """Refresh the display; called several times a second while the sweep runs."""


def sweep_folder(options: RunOptions, below: str = "sweeps") -> Path:
    """Return the folder of a sweep, created if missing: ``ROOT/NAME``, or a new ``ROOT/sweeps/DATE/TIME-xxxx``.

    The options are those of the sweep as a whole. ``below`` replaces ``sweeps`` in the path.

    Raises:
        ConfigError: ``run.resume`` is set without a name.
        StorageError: The folder cannot be created, is not a sweep, or its existence contradicts ``run.resume``.
    """
    root = Path(options.root)
    if options.name is not None:
        return _named_folder(root, options.name, options.resume)
    if options.resume != "never":
        raise ConfigError(f"run.resume={options.resume} needs a run.name", "add run.name=NAME")
    for _ in range(100):
        folder = fresh_place(root, below)
        with storage_errors(folder, "create"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    raise StorageError(f"no unused name for a sweep found in {root}", "set run.name=NAME")


def fresh_place(root: Path, below: str) -> Path:
    """Return the path of a new folder, ``ROOT/BELOW/DATE/TIME-xxxx``; StorageError if it would lie in a run."""
    require_outside_runs(root)
    date, moment = fresh_name("sweep")
    return root / below / date / moment.replace("-sweep-", "-")


def _named_folder(root: Path, name: str, resume: str) -> Path:
    folder = root / name
    require_outside_runs(folder)
    if is_sweep(folder):
        if resume == "never":
            line = command_with(f"mptrain resume {folder}", packages_of(read_sweep(folder)))
            hint = f"resume it: {line} (or add run.resume=auto), or choose another run.name"
            raise StorageError(f"there is a sweep in {folder}", hint)
        return folder
    if resume == "must":
        raise StorageError(f"run.resume=must: there is no sweep in {folder}", "use run.resume=auto to start it")
    with storage_errors(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(entry.suffix != TEMPORARY for entry in folder.iterdir()):
            raise StorageError(f"{folder} exists and is not a sweep: it has no {SWEEP_JSON}", "choose another run.name")
    return folder


def plan_sweep(
    points: Sequence[Point],
    folder: Path,
    *,
    words: Sequence[str],
    config_dirs: Sequence[str] = (),
    config_name: str = "train",
    parallel: int = 1,
    kind: Kind = "sweep",
    plan: Mapping[str, Any] | None = None,
    grows: bool = False,
) -> Sweep:
    """Write the plan of a sweep, its ``sweep.json`` and ``sweep.csv``, to its existing folder, and return the sweep.

    If the folder holds a sweep of the same points, the status of its jobs is kept. With ``grows``, the number of points
    may differ from that of the existing sweep, if the common ones are equal. The points must be checked; the keyword
    arguments are those of `Sweep`.

    Raises:
        StorageError: The folder holds a sweep with different points or one that is being run, or cannot be written.
    """
    jobs = []
    for point in (replace(p, overrides=masked(p.overrides), varied=masked(p.varied)) for p in points):
        own = tuple(word for word in point.overrides if word.partition("=")[0].lstrip("+") not in NOT_SWEPT)
        jobs.append(SweepJob(point.number, directory_name(point), own, point.varied, point.arm))
    folders = tuple(str(Path(config_dir).absolute()) for config_dir in config_dirs)
    fresh = Sweep(
        folder, kind, masked(tuple(words)), folders, config_name, parallel, tuple(jobs), plan=dict(plan or {})
    )
    require_free(fresh)
    if is_sweep(folder):
        old = read_sweep(folder)
        both = min(len(old.jobs), len(jobs)) if grows else None
        before, now = ([(job.name, job.overrides, job.arm) for job in these[:both]] for these in (old.jobs, jobs))
        if (old.kind, before) != (kind, now):
            hint = "give the overrides that it was started with, or choose another run.name"
            raise StorageError(f"{folder} is a {old.kind} with different points", hint)
        fresh = replace(fresh, jobs=(*old.jobs, *jobs[len(old.jobs) :]), started=old.started)
    write_sweep(fresh)
    return fresh


def refresh_status(sweep: Sweep, numbers: Container[int] | None = None) -> Sweep:
    """Return a sweep with the status, exit code and duration of its jobs read from their run directories.

    Jobs that are neither done nor failed get the status ``waiting``. ``numbers`` selects the jobs to read;
    None for all.
    """
    wanted = [numbers is None or job.number in numbers for job in sweep.jobs]
    jobs = zip(sweep.jobs, wanted, strict=True)
    return replace(sweep, jobs=tuple(_as_it_stands(sweep, job) if look else job for job, look in jobs))


def require_free(sweep: Sweep) -> None:
    """Raise StorageError, which names the process, if by its lock file a process is running a sweep."""
    holder = holder_of(sweep.paths.lock)
    if holder is not None:
        raise StorageError(f"{sweep.folder} is being written by {holder}", "wait until that process ends, or stop it")


def missing_points(sweep: Sweep) -> list[Point]:
    """Return the points that a resumed sweep still has to run; they are neither composed nor checked."""
    return [
        Point(job.number, job.overrides, job.varied, arm=job.arm, count=len(sweep.jobs))
        for job in sweep.jobs
        if not sweep.has_ended(job)
    ]


def run_sweep(
    sweep: Sweep,
    composer: Composer,
    program: Program,
    watch: SweepDisplay,
    numbers: Container[int] | None = None,
    launcher: Launcher | None = None,
) -> tuple[Sweep, int]:
    """Run the jobs of a sweep that have not ended, each in its own process; update ``sweep.json`` at every change.

    Return the sweep after the jobs, and the exit code: 0 if all jobs have ended, that of the signal that stopped the
    sweep, or 7 if a job failed or is still run by a process of an earlier sweep. In comparisons and recipes, a numerics
    failure does not count as failed. The sweep must have checked points and be written to its folder. ``numbers``
    selects jobs; None for all. Without a launcher (a scheduler such as Slurm) they run on this machine.

    Raises:
        StorageError: Another process is running this sweep, or a file cannot be written.
        EnvironmentRefused: The scheduler of the launcher is not available.
    """
    with hold_lock(sweep.paths.lock):
        require_none_queued(sweep.folder)
        record = _Record(refresh_status(sweep, numbers), watch)
        about = [job for job in record.sweep.jobs if numbers is None or job.number in numbers]
        living = _wait_for_orphans(record, {job.number for job in about if not sweep.has_ended(job)})
        sweep = record.sweep
        about = [sweep.jobs[job.number] for job in about]
        wanted = [_waiting(job) for job in _interleaved(about) if not (sweep.has_ended(job) or job.number in living)]
        for job in wanted:
            sweep = sweep.with_job(job)
        write_sweep(sweep)
        record.sweep = sweep
        stopped = None
        if wanted:
            executor: Executor
            if launcher is None:
                slots = Slots.of_this_machine(min(sweep.parallel, len(sweep.jobs)))
                executor = LocalExecutor(composer, program, slots)
            else:
                executor = SlurmExecutor(sweep, composer.typed, program, launcher)
            stopped = executor.run([_spec(sweep, job) for job in wanted], record)
        for number in living - _holders(record.sweep, living).keys():  # it ended while the others ran
            record.ended_by_itself(number)
    if all(map(record.sweep.has_ended, record.sweep.jobs)):
        return record.sweep, EXIT_OK
    return record.sweep, EXIT_SWEEP if stopped is None else stopped


def _interleaved(jobs: Sequence[SweepJob]) -> list[SweepJob]:
    """Order jobs so that the arms of a comparison alternate; a drift in machine speed then affects all arms equally."""
    turns: dict[str, int] = {}
    turn = {}
    for job in jobs:
        turn[job.number] = turns[job.arm] = turns.get(job.arm, 0) + (job.arm != "")
    return sorted(jobs, key=lambda job: (turn[job.number], job.number))


class _Record(Listener):
    """Listener that writes the events of a sweep's jobs to ``sweep.json`` and forwards them to the display."""

    def __init__(self, sweep: Sweep, watch: SweepDisplay) -> None:
        self.sweep = sweep
        self._watch = watch

    def started(self, number: int) -> None:
        self._change(replace(self.sweep.jobs[number], status="running", reason=""))

    def progressed(self, number: int, progress: JobProgress) -> None:
        self._watch.progressed(number, progress)

    def ended(self, number: int, ended: JobOutcome, seconds: float) -> None:
        job = self.sweep.jobs[number]
        status, code, reason = ended.status, ended.code, ended.reason
        seconds = round((job.seconds or 0.0) + seconds, 3)  # total over all its processes
        self._change(replace(job, status=status, code=code, reason=reason, seconds=seconds))

    def lives(self, number: int, holder: LockHolder) -> None:
        """Record that a process started by an earlier sweep command still runs a job."""
        reason = f"still run by {holder}, which outlived the sweep that started it"
        self._change(replace(self.sweep.jobs[number], status="running", code=None, reason=reason))

    def ended_by_itself(self, number: int) -> None:
        """Record that a process of an earlier sweep command has ended, with the job's status from its run directory."""
        self._change(_as_it_stands(self.sweep, self.sweep.jobs[number]))

    def stopping(self, name: str) -> None:
        self._watch.stopping(name)

    def tick(self) -> None:
        self._watch.tick()

    def _change(self, job: SweepJob) -> None:
        self.sweep = self.sweep.with_job(job)
        write_sweep(self.sweep)
        self._watch.changed(self.sweep, job)


def _spec(sweep: Sweep, job: SweepJob) -> JobSpec:
    """Return the job with overrides that set its own run directory and resume an unfinished run there."""
    run_overrides = (f"run.root={quoted(str(sweep.folder))}", f"run.name={quoted(job.name)}", "run.resume=auto")
    run, log = sweep.paths.run(job.name).absolute(), sweep.paths.log(job.name).absolute()
    return JobSpec(job.number, (*job.overrides, *run_overrides), run, log)


def _as_it_stands(sweep: Sweep, job: SweepJob) -> SweepJob:
    """Return a job with its status, exit code and seconds from its run directory; ``waiting`` if it has not ended."""
    run = RunDirectory(RunPaths(sweep.paths.run(job.name)))
    try:
        state = run.read_state()
    except StorageError:  # the job itself will report it
        state = None
    if state is not None:
        on_record = round(_seconds_on_record(run.paths, state), 3)
        job = replace(job, seconds=max(job.seconds or 0.0, on_record) or None)
    if state is not None and state.status == "done":
        return replace(job, status="done", code=EXIT_OK, reason="")
    if state is not None and state.status == "failed":
        return replace(job, status="failed", code=state.exit_code, reason=state.reason.split("\n")[0])
    return _waiting(job)


def _seconds_on_record(run: RunPaths, state: RunState) -> float:
    """Return the wall time in seconds of all attempts at a run, including those that ended without the sweep.

    A killed process has no recorded end. If it was the last attempt, its time runs from the modification time of
    ``run.json``, written at its start, to that of its last step. Both are file times, so in a copied folder the result
    is too low rather than too high.
    """
    seconds = sum(attempt.seconds or 0.0 for attempt in state.attempts)
    if state.attempts and state.attempts[-1].ended is None:
        with contextlib.suppress(OSError):
            seconds += max(0.0, run.steps.stat().st_mtime - run.run_json.stat().st_mtime)
    return seconds


def _waiting(job: SweepJob) -> SweepJob:
    return replace(job, status="waiting", code=None, reason="")


def _wait_for_orphans(record: _Record, numbers: Container[int]) -> set[int]:
    """Wait up to `_PATIENCE` seconds for jobs still run by processes of a killed sweep; return those that remain.

    Scheduler jobs outlive their sweep and train to their end, so the wait is limited.
    """
    living = _holders(record.sweep, numbers)
    for number, holder in living.items():
        record.lives(number, holder)
    deadline = time.monotonic() + _PATIENCE
    while living and time.monotonic() < deadline:
        record.tick()
        time.sleep(0.1)
        left = _holders(record.sweep, living)
        for number in living.keys() - left.keys():
            record.ended_by_itself(number)
        living = left
    return set(living)


def _holders(sweep: Sweep, numbers: Container[int]) -> dict[int, LockHolder]:
    jobs = [job for job in sweep.jobs if job.number in numbers]
    holders = {job.number: RunDirectory(RunPaths(sweep.paths.run(job.name))).holder() for job in jobs}
    return {number: holder for number, holder in holders.items() if holder is not None}
