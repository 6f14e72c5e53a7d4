"""Executor that submits the jobs of a sweep to Slurm through submitit and waits for them.

A job (`mptrain.study.sweep.worker`) reports its status in a file of its own and in its run directory. Only it reads
submitit's pickles; they are in a folder that this process has just created, so that they cannot come from elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.config.launcher import Launcher
from mptrain.engine.interrupt import SignalListener
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.sweeps import Sweep
from mptrain.study.sweep.executor import JobOutcome, JobSpec, Listener, Program, stopped
from mptrain.study.sweep.worker import TIME_IS_UP, SubmittedJob, one_line, read_result, run_submitted_job
from mptrain.system.errors import EXIT_BUG, EnvironmentRefused, StorageError
from mptrain.system.files import read_text
from mptrain.system.interpreter import command
from mptrain.system.machine import load_extra

#: Folder in a sweep's folder with one folder per submission, and the file in it that lists the job ids.
FOLDER, JOBS_JSON = "submitted", "jobs.json"

#: Polling intervals in seconds: for files, for the scheduler, which many users share, and for the scheduler at a stop.
_TICK, _ASK, _ASK_AGAIN = 0.25, 30.0, 3.0

#: Seconds for a job's result to appear on a network file system, and for a preempted job to be queued again.
_LATE, _REQUEUED = 10.0, 300.0

#: Seconds for cancelled jobs to save their state.
_LEAVING = 60.0

#: States of submitit and Slurm in which a job has not ended.
_ALIVE = ("READY", "PENDING", "RUNNING", "UNKNOWN", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED",
          "REQUEUE_HOLD", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT",
          "REQUEUE_FED")  # fmt: skip


@dataclass
class _Job:
    """State of a submitted job; times are those of `time.monotonic`.

    Attributes:
        handle: submitit's object for the job.
        began: Time at which the job was first seen running; None before.
        over: Time at which the scheduler was first found to have ended the job; None if it has not.
        preempted: Time at which the job was first found preempted; None if it is not.
    """

    submission: SubmittedJob
    handle: Any
    began: float | None = None
    over: float | None = None
    preempted: float | None = None


@dataclass(frozen=True)
class SlurmExecutor:
    """Executor that submits the jobs of a sweep through submitit. A stop signal cancels all of them.

    Args:
        sweep: The sweep, already written to its folder.
        typed: The overrides that the user typed; None if all are (see `Composer`).
        program: Functions that the jobs run.
        launcher: Resources that each job requests, and the maximum number of queued jobs.
    """

    sweep: Sweep
    typed: tuple[str, ...] | None
    program: Program
    launcher: Launcher

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """Submit jobs in order and return when all have ended; the listener hears of starts and ends, not of progress.

        A second Ctrl-C returns without waiting for the cancelled jobs to save their state.

        Raises:
            EnvironmentRefused: submitit is not installed.
            StorageError: A file cannot be written; all jobs were cancelled.
        """
        launcher, sweep = self.launcher, self.sweep
        folder = fresh_folder(sweep.folder)
        results = [folder / f"{job.number:03d}.json" for job in jobs]
        submissions = [
            SubmittedJob(job, sweep.config_dirs, sweep.config_name, self.typed, result, self.program)
            for job, result in zip(jobs, results, strict=True)
        ]
        executor = _executor(launcher, folder)
        with SignalListener() as interrupts:
            queue = _Queue(executor, launcher, folder, listener, interrupts)
            try:
                queue.run(submissions, launcher.at_once or len(jobs))
            except KeyboardInterrupt:  # the second Ctrl-C
                queue.forget()
            except BaseException:
                queue.cancel()
                raise
            return interrupts.exit_code if interrupts.received else None


def fresh_folder(sweep: Path) -> Path:
    """Create a folder for the files of one submission, accessible only to this user, and return its absolute path.

    This is ``SWEEP/submitted/xxxxxxxx``, where the last part is random and hexadecimal. The path stands in a batch
    script, where a line end would begin a command, and ``%`` and a backslash have a meaning in names of log files.
    StorageError is raised if it has one of them.
    """
    folder = sweep.absolute() / FOLDER / secrets.token_hex(4)
    if odd := [letter for letter in str(folder) if not letter.isprintable() or letter in "%\\"]:
        hint = "move to a folder, or set a run.root, without line ends, control characters, % and backslashes"
        raise StorageError(f"{folder} cannot stand in a batch script: it has {odd[0]!r}", hint)
    with storage_errors(folder, "create"):
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700)
    return folder


def require_none_queued(sweep: Path) -> None:
    """Check that no earlier jobs of a sweep are still in Slurm's queue, because they would train the same runs.

    Raise StorageError, which lists their ids, if there are any.
    """
    queued = [job_id for path in sorted((sweep / FOLDER).glob(f"*/{JOBS_JSON}")) for job_id in _still_queued(path)]
    if queued:
        numbers = " ".join(queued)
        raise StorageError(
            f"jobs of {sweep} are still queued or running: {numbers}", f"wait for them, or: scancel {numbers}"
        )


def _still_queued(path: Path) -> list[str]:
    try:
        named = json.loads(read_text(path))["jobs"]
        numbers = [job_id for job_id in named if re.fullmatch(r"[0-9]{1,18}", job_id)]
        submitit = _submitit() if numbers else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError, EnvironmentRefused):
        return []
    handles = [submitit.SlurmJob(path.parent, job_id) for job_id in numbers] if submitit is not None else []
    states = [_state(handle, "cache" if index else "force") for index, handle in enumerate(handles)]
    return [job_id for job_id, state in zip(numbers, states, strict=True) if state in _ALIVE and state != "UNKNOWN"]


def require_scheduler() -> None:
    """Check that the scheduler on which a sweep will run its jobs is available, before the sweep's folder is created.

    Raise EnvironmentRefused if submitit is not installed, or this machine has no Slurm.
    """
    if _submitit().SlurmExecutor.affinity() < 0:
        raise EnvironmentRefused(
            "--launcher: there is no srun on this machine, so it is not part of a Slurm cluster",
            "start the sweep on a machine with sbatch, or leave --launcher out: --jobs N trains here",
        )


def _submitit() -> Any:
    return load_extra("submitit", "slurm", "--launcher")


def _executor(launcher: Launcher, folder: Path) -> Any:
    submitit = _submitit()
    submitit.JobEnvironment.USR_SIG = TIME_IS_UP.name.removeprefix("SIG")  # the signal requested from Slurm
    python = shlex.join(command("-u"))  # submitit appends -m and a module
    slurm = submitit.SlurmExecutor(folder, python=python)
    asked = {name: getattr(launcher, name) for name in _PASSED_ON if getattr(launcher, name) is not None}
    if launcher.mem_gb is not None:
        asked["mem"] = f"{round(1024 * launcher.mem_gb)}MB"
    if launcher.gpus_per_node:
        asked["gpus_per_node"] = launcher.gpus_per_node
    slurm.update_parameters(time=launcher.timeout_min, additional_parameters={"requeue": True}, **asked)
    return slurm


#: Launcher keys that have the same name in submitit.
_PASSED_ON = ("signal_delay_s", "cpus_per_task", "job_name", "partition", "account", "qos", "constraint", "gres",
              "nodelist", "exclude", "comment")  # fmt: skip


class _Queue:
    """Jobs of one `SlurmExecutor.run`: submits them, watches their results and states, and reports to the listener."""

    def __init__(
        self, executor: Any, launcher: Launcher, folder: Path, listener: Listener, interrupts: SignalListener
    ) -> None:
        self._executor, self._listener, self._interrupts = executor, listener, interrupts
        self._list = folder / JOBS_JSON
        self._numbers: list[str] = []
        self._jobs: list[_Job] = []
        self._stopping: float | None = None
        self._asked = time.monotonic()

    def run(self, submissions: Sequence[SubmittedJob], at_once: int) -> None:
        """Submit and watch jobs until all have ended, with at most ``at_once`` in the queue."""
        waiting = list(reversed(submissions))
        while waiting or self._jobs:
            if self._interrupts.received and self._stopping is None:
                self._listener.stopping(self._interrupts.received)
                self.cancel()
            if self._stopping is not None:
                waiting.clear()
            while waiting and len(self._jobs) < at_once and not self._interrupts.received:
                self._submit(waiting.pop())
            self._look()
            self._listener.tick()
            time.sleep(_TICK)
        if self._stopping is None:
            self._list.unlink(missing_ok=True)  # no job is queued any more

    def cancel(self) -> None:
        self._stopping = time.monotonic()
        for job in self._jobs:
            # The job may have ended, or the scheduler may not answer; the job's result is read in any case.
            with contextlib.suppress(Exception):
                job.handle.cancel(check=False)

    def forget(self) -> None:
        """Report every remaining job as stopped, and watch none of them any more."""
        self._stopping = self._stopping or time.monotonic()
        for job in list(self._jobs):
            self._end(job, self._stopped("cancelled"))

    def _submit(self, submission: SubmittedJob) -> None:
        # sbatch inherits the mask: a Ctrl-C that ended it half-way would leave a job that nobody knows.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
        try:
            handle = self._executor.submit(run_submitted_job, submission)
        except Exception as error:  # submitit and sbatch share no error class
            number = submission.job.number
            self._listener.ended(number, JobOutcome("failed", EXIT_BUG, f"not submitted: {one_line(error)}"), 0.0)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._jobs.append(_Job(submission, handle))
        self._numbers.append(str(handle.job_id))
        write_atomically(self._list, json.dumps({"executor": "slurm", "jobs": self._numbers}) + "\n")

    def _look(self) -> None:
        """Read the results of jobs and, at longer intervals, their states from the scheduler."""
        now = time.monotonic()
        asking = now - self._asked > (_ASK if self._stopping is None else _ASK_AGAIN)
        if asking:
            self._asked = now
        for index, job in enumerate(list(self._jobs)):
            outcome = read_result(job.submission.result)
            if outcome is not None and outcome.status != "waiting" and job.began is None:
                job.began = now
                self._listener.started(job.submission.job.number)
            # A preempted job may be queued again: whether it has ended is known to the scheduler alone.
            if outcome is not None and outcome.status in ("done", "failed", "interrupted"):
                self._end(job, outcome)
            elif asking:
                self._judge(job, outcome, _state(job.handle, "cache" if index else "force"))
            if job in self._jobs and self._stopping is not None and now - self._stopping > _LEAVING:
                self._end(job, self._stopped("cancelled"))

    def _judge(self, job: _Job, outcome: JobOutcome | None, state: str) -> None:
        """Record the end of a job that the scheduler has ended, unless its result may still arrive."""
        now = time.monotonic()
        job.preempted = (job.preempted or now) if state == "PREEMPTED" else None
        if state in _ALIVE or (job.preempted is not None and now - job.preempted < _REQUEUED):
            job.over = None
            return
        job.over = job.over or now
        if outcome is not None and outcome.status == "preempted":
            self._end(job, outcome)
        elif self._stopping is not None and (outcome is None or outcome.status == "waiting"):
            self._end(job, self._stopped("cancelled before it started"))
        elif now - job.over > _LATE:
            what = f"its job {job.handle.job_id} ended as {state} without a result"
            cancelled = self._stopping is not None or state.startswith(("CANCELLED", "PREEMPTED"))
            self._end(job, self._stopped(what) if cancelled else JobOutcome("failed", EXIT_BUG, what))

    def _stopped(self, reason: str) -> JobOutcome:
        return stopped(self._interrupts.received == "SIGINT", reason)

    def _end(self, job: _Job, ended: JobOutcome) -> None:
        self._jobs.remove(job)
        seconds = 0.0 if job.began is None else time.monotonic() - job.began
        self._listener.ended(job.submission.job.number, ended, seconds)


def _state(handle: Any, mode: str) -> str:
    """Return the state of a job in capitals, such as ``PENDING``; ``UNKNOWN`` if the scheduler reports none.

    ``mode`` is ``force`` to query the scheduler, which returns the states of all jobs, or ``cache`` to use the
    last such query.
    """
    get_info: Callable[..., dict[str, str]] = handle.get_info
    with contextlib.suppress(Exception):
        info = get_info(mode=mode)
        return str(info.get("State") or info.get("jobState") or "UNKNOWN").upper()
    return "UNKNOWN"
