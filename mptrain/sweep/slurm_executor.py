"""Hands the points of a sweep to Slurm through submitit, and waits; what jobs do is in `mptrain.sweep.worker`.

A job is known by what it writes into its own file and by its run directory. What submitit pickles is read by the job alone:
it lies in a folder that this process has just made, so that nothing in it was there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mptrain.config.launcher import Launcher
from mptrain.engine.interrupt import SignalListener
from mptrain.errors import EXIT_BUG, EXIT_PREEMPTED, EnvironmentRefused, StorageError
from mptrain.extras import load_extra
from mptrain.files import read_text
from mptrain.interpreter import command
from mptrain.runlog.atomic_files import storage_errors, write_atomically
from mptrain.runlog.sweeps import Sweep
from mptrain.sweep.executor import JobOutcome, JobSpec, Listener, Program, stopped
from mptrain.sweep.worker import TIME_IS_UP, JobResult, SubmittedJob, one_line, read_result, run_submitted_job

#: The folder in that of a sweep which has a folder for each time that jobs were handed over, and the file there that names them.
FOLDER, JOBS_JSON = "submitted", "jobs.json"

#: Seconds between two looks at files, and between two questions to a scheduler, which many people ask; less when all is to end.
_TICK, _ASK, _ASK_AGAIN = 0.25, 30.0, 3.0

#: Seconds that the last words of a job may take through a network file system, and that a preempted job may take to be queued again.
_LATE, _REQUEUED = 10.0, 300.0

#: Seconds for jobs to save themselves once they were cancelled.
_LEAVING = 60.0

#: States of submitit's and Slurm's in which a job may still do something.
_ALIVE = ("READY", "PENDING", "RUNNING", "UNKNOWN", "REQUEUED", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUE_HOLD",
          "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "REQUEUE_FED")  # fmt: skip


@dataclass
class _Job:
    """A job that was handed over, and what is known about it."""

    submission: SubmittedJob
    handle: Any
    began: float | None = None
    over: float | None = None
    preempted: float | None = None


@dataclass(frozen=True)
class SlurmExecutor:
    """Has a scheduler run jobs through submitit (see `Executor`); once a signal asks for the end, cancels all of them.

    Args:
        sweep: On record.
        typed: Those of the jobs' words that the user typed; None for all (see `Composer`).
        program: What jobs run.
        launcher: What jobs ask for.
    """

    sweep: Sweep
    typed: tuple[str, ...] | None
    program: Program
    launcher: Launcher

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """See `Executor`."""
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
                queue.run(submissions, launcher.at_once or (1 if launcher.executor == "local" else len(jobs)))
            except KeyboardInterrupt:  # the second Ctrl-C
                queue.forget()
            except BaseException:
                queue.cancel()
                raise
            return interrupts.exit_code if interrupts.received else None


def fresh_folder(sweep: Path) -> Path:
    """A new folder for what is handed to a scheduler now, which only this user can write."""
    folder = sweep.absolute() / FOLDER / secrets.token_hex(4)
    with storage_errors(folder, "create"):
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700)
    return folder


def require_none_queued(sweep: Path) -> None:
    """Refuse a sweep whose jobs of an earlier time still wait or run in Slurm's queue: they would train the same runs.

    Raises:
        StorageError: Names them.
    """
    found = [one for path in sorted((sweep / FOLDER).glob(f"*/{JOBS_JSON}")) for one in _still_queued(path)]
    if found:
        numbers = " ".join(found)
        raise StorageError(
            f"jobs of {sweep} are still queued or running: {numbers}", f"wait for them, or: scancel {numbers}"
        )


def _still_queued(path: Path) -> list[str]:
    try:
        named = json.loads(read_text(path))["jobs"]
        numbers = [one for one in named if re.fullmatch(r"[0-9]{1,18}", one)]
        submitit = load_extra("submitit", "slurm", "--launcher") if numbers else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError, EnvironmentRefused):
        return []
    handles = [submitit.SlurmJob(path.parent, one) for one in numbers] if submitit is not None else []
    states = [_state(handle, "cache" if place else "force") for place, handle in enumerate(handles)]
    return [one for one, state in zip(numbers, states, strict=True) if state in _ALIVE and state != "UNKNOWN"]


def require_scheduler(launcher: Launcher) -> None:
    """Refuse a launcher whose scheduler is not there, before a sweep has a folder.

    Raises:
        EnvironmentRefused: submitit is not installed, or there is no Slurm here.
    """
    submitit = _submitit(launcher)
    if launcher.executor == "slurm" and submitit.SlurmExecutor.affinity() < 0:
        raise EnvironmentRefused(
            "--launcher: there is no srun here, so this machine is none of a Slurm cluster",
            "start the sweep where sbatch works, or try it with --launcher local",
        )


def _submitit(launcher: Launcher) -> Any:
    return load_extra("submitit", "slurm", f"--launcher with executor {launcher.executor}")


def _executor(launcher: Launcher, folder: Path) -> Any:
    """Submitit's executor for jobs of this kind."""
    submitit = _submitit(launcher)
    submitit.JobEnvironment.USR_SIG = TIME_IS_UP.name.removeprefix("SIG")  # what Slurm is asked to send
    python = shlex.join(command("-u"))  # submitit goes on with -m and a module
    if launcher.executor == "local":
        _guard_controller()
        local = submitit.LocalExecutor(folder, python=python)
        local.update_parameters(
            timeout_min=launcher.timeout_min,
            signal_delay_s=launcher.signal_delay_s,
            gpus_per_node=launcher.gpus_per_node,
        )
        return local
    slurm = submitit.SlurmExecutor(folder, python=python)
    asked = {name: getattr(launcher, name) for name in _PASSED_ON if getattr(launcher, name) is not None}
    if launcher.mem_gb is not None:
        asked["mem"] = f"{round(1024 * launcher.mem_gb)}MB"
    if launcher.gpus_per_node:
        asked["gpus_per_node"] = launcher.gpus_per_node
    slurm.update_parameters(time=launcher.timeout_min, additional_parameters={"requeue": True}, **asked)
    return slurm


def _guard_controller() -> None:
    """Let submitit's local executor start its controller by `command`: it writes ``python -m`` and takes no other way."""
    local: Any = import_module("submitit.local.local")

    def start(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(*words[1:]), **more)

    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})


#: Keys of a launcher that submitit calls the same.
_PASSED_ON = ("signal_delay_s", "cpus_per_task", "job_name", "partition", "account", "qos", "constraint", "gres",
              "nodelist", "exclude", "comment")  # fmt: skip


class _Queue:
    def __init__(
        self, executor: Any, launcher: Launcher, folder: Path, listener: Listener, interrupts: SignalListener
    ) -> None:
        self._executor, self._listener, self._interrupts = executor, listener, interrupts
        self._local = launcher.executor == "local"
        self._list = folder / JOBS_JSON
        self._numbers: list[str] = []
        self._jobs: list[_Job] = []
        self._stopping: float | None = None
        self._asked = time.monotonic()

    def run(self, submissions: Sequence[SubmittedJob], at_once: int) -> None:
        """Until nothing waits and nothing is queued, with at most so many jobs in the queue at a time."""
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
            self._list.unlink(missing_ok=True)  # nothing of it is queued

    def cancel(self) -> None:
        """Ask the scheduler to end all jobs; those that run save themselves."""
        self._stopping = time.monotonic()
        for job in self._jobs:
            # It has gone, or nobody answers; what it says is looked at all the same.
            with contextlib.suppress(Exception):
                if self._local:
                    os.kill(int(job.handle.job_id), signal.SIGTERM)  # its own way would leave a run one second
                else:
                    job.handle.cancel(check=False)

    def forget(self) -> None:
        """Wait no longer for jobs that were cancelled."""
        self._stopping = self._stopping or time.monotonic()
        for job in list(self._jobs):
            self._end(job, self._stopped("cancelled"))

    def _submit(self, submission: SubmittedJob) -> None:
        # Jobs of the local executor inherit that Ctrl-C and the end of the terminal do not reach them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
        try:
            handle = self._executor.submit(run_submitted_job, submission)
        except Exception as error:  # submitit and sbatch have no common error
            number = submission.job.number
            self._listener.ended(number, JobOutcome("failed", EXIT_BUG, f"not submitted: {one_line(error)}"), 0.0)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._jobs.append(_Job(submission, handle))
        if not self._local:
            self._numbers.append(str(handle.job_id))
            write_atomically(self._list, json.dumps({"executor": "slurm", "jobs": self._numbers}) + "\n")

    def _look(self) -> None:
        """Note what jobs have said, and, from time to time, what the scheduler says."""
        now = time.monotonic()
        asking = self._local or now - self._asked > (_ASK if self._stopping is None else _ASK_AGAIN)
        if asking:
            self._asked = now
        for place, job in enumerate(list(self._jobs)):
            told = read_result(job.submission.result)
            if told is not None and told.status != "waiting" and job.began is None:
                job.began = now
                self._listener.started(job.submission.job.number)
            if told is not None and told.status in ("done", "failed", "interrupted"):
                self._end(job, JobOutcome(told.status, told.code or 0, told.reason))
            elif asking:
                self._judge(job, told, _state(job.handle, "cache" if place else "force"))
            if job in self._jobs and self._stopping is not None and now - self._stopping > _LEAVING:
                self._end(job, self._stopped("cancelled"))

    def _judge(self, job: _Job, told: JobResult | None, state: str) -> None:
        """End a job that the scheduler has ended, unless its last words may still be on their way."""
        now = time.monotonic()
        job.preempted = (job.preempted or now) if state == "PREEMPTED" else None
        if state in _ALIVE or (job.preempted is not None and now - job.preempted < _REQUEUED):
            job.over = None
            return
        job.over = job.over or now
        if told is not None and told.status == "preempted":
            self._end(job, JobOutcome("preempted", told.code or EXIT_PREEMPTED, told.reason))
        elif self._stopping is not None and (told is None or told.status == "waiting"):
            self._end(job, self._stopped("cancelled before it began"))
        elif now - job.over > (_TICK if self._local else _LATE):
            what = f"its job {job.handle.job_id} ended as {state} and said nothing"
            cancelled = self._stopping is not None or state.startswith(("CANCELLED", "PREEMPTED"))
            self._end(job, self._stopped(what) if cancelled else JobOutcome("failed", EXIT_BUG, what))

    def _stopped(self, reason: str) -> JobOutcome:
        return stopped(self._interrupts.received == "SIGINT", reason)

    def _end(self, job: _Job, ended: JobOutcome) -> None:
        self._jobs.remove(job)
        deadline = time.monotonic() + _LATE
        while self._local and not job.handle.done() and time.monotonic() < deadline:
            time.sleep(0.02)  # the process that started it is clearing up
        seconds = 0.0 if job.began is None else time.monotonic() - job.began
        self._listener.ended(job.submission.job.number, ended, seconds)


def _state(handle: Any, mode: str) -> str:
    """What the scheduler calls the state of a job, in capitals; one answer is for all jobs, so the first alone asks."""
    found: Callable[..., dict[str, str]] = handle.get_info
    with contextlib.suppress(Exception):
        info = found(mode=mode)
        return str(info.get("State") or info.get("jobState") or "UNKNOWN").upper()
    return "UNKNOWN"
