"""Executor that runs the jobs of a sweep concurrently on this machine: in forked processes on CPU, in new ones on CUDA.

`mptrain.study.sweep.processes` starts the processes and explains why they differ.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mptrain.config.compose import Composer
from mptrain.config.schema import Config
from mptrain.engine.interrupt import SignalListener
from mptrain.study.sweep.executor import JobOutcome, JobSpec, Listener, Program, stopped
from mptrain.study.sweep.processes import Process, describe_exit_code, forked, send, send_to, spawned, start, warm_up
from mptrain.study.sweep.worker import LocalJob, one_line, run_job
from mptrain.system.errors import EXIT_BUG, EnvironmentRefused
from mptrain.system.machine import is_running, usable_cores

#: Polling interval for signals and timeouts, seconds.
_TICK = 0.25

#: Seconds for a process to exit after it reported its outcome, and after a second Ctrl-C.
_LEAVING, _AT_ONCE = 10.0, 3.0

#: Seconds for jobs to save their state after their fork server was killed.
_ORPHANED = 60.0

#: Exit code that `multiprocessing` reports if the fork server has died and the real code is unknown.
_LOST = 255


@dataclass
class _Running:
    """State of one running job's process.

    Attributes:
        pipe: Connection on which the process sends progress and its outcome; None once it is closed.
        slot: Index of the job's slot (see `Slots`); None once the slot is free again.
        forked: Whether the fork server forked the process.
        began: Start time, as all times here on the clock of `time.monotonic`.
        ended: Outcome that the process reported; None before.
        last_words: Time at which it reported the outcome.
        reported: Whether the listener knows of the end.
        orphaned: Time at which the fork server was found dead while the job ran; None if it has not died.
    """

    number: int
    process: Process
    pipe: Connection | None
    slot: int | None
    forked: bool
    began: float
    ended: JobOutcome | None = None
    last_words: float = 0.0
    reported: bool = False
    orphaned: float | None = None


@dataclass(frozen=True)
class Slots:
    """Division of this machine's CPU cores and GPUs among the concurrent jobs of a sweep; each job has one slot.

    Attributes:
        count: Number of slots: the maximum number of concurrent jobs.
        threads: Number of torch's CPU threads in each job; None if one job at a time uses all.
        gpus: Values of ``CUDA_VISIBLE_DEVICES``, one for each GPU; empty without GPUs. Slots use the GPUs in turn, and
            share them if they need more than there are.
    """

    count: int
    threads: int | None = None
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, count: int) -> Slots:
        """Divide the CPU cores and the GPUs that this process may use among ``count`` concurrent jobs."""
        from mptrain.system.device import count_of

        threads = max(1, usable_cores() // count) if count > 1 else None
        gpu_count = count_of("cuda")
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return cls(count, threads, tuple(visible[:gpu_count]) or tuple(map(str, range(gpu_count))))

    def environment(self, slot: int, procs: int = 1) -> dict[str, str]:
        """Return ``CUDA_VISIBLE_DEVICES`` for a job whose configuration does not name a GPU; empty without GPUs.

        ``slot`` is from 0 to ``count`` - 1. Each of the job's ``procs`` ranks, at most the number of GPUs, gets a GPU.
        """
        if not self.gpus:
            return {}
        first = slot * max(procs, len(self.gpus) // self.count)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[(first + n) % len(self.gpus)] for n in range(procs))}


@dataclass(frozen=True)
class LocalExecutor:
    """Executor that runs the jobs of a sweep in processes on this machine."""

    composer: Composer
    program: Program
    slots: Slots

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """Run jobs, as many at a time as there are slots, and return when all have ended.

        All configurations are composed before the first job starts. A second Ctrl-C ends all jobs at once.

        Raises:
            ConfigError: The overrides of a job are invalid; no job was started.
            EnvironmentRefused: A job has more ranks than there are GPUs, or its device is missing; no job was started.
        """
        composed = [(job, self.composer.compose(job.words)) for job in jobs]
        gpus = self.slots.gpus
        procs = max(
            (config.distributed.procs or 1 for _, config in composed if gpus and _on_accelerator(config)), default=1
        )
        if procs > max(1, len(gpus)):
            raise EnvironmentRefused(
                f"distributed.procs={procs} needs {procs} GPUs for a job, and this sweep has {len(gpus)}",
                f"set distributed.procs={len(gpus)} or device=cpu",
            )
        with SignalListener() as interrupts:
            pool = _Pool(self.slots, self.program, listener, interrupts)
            try:
                pool.run(composed)
            except KeyboardInterrupt:  # the second Ctrl-C
                pool.end_at_once()
            except BaseException:
                pool.give_up()
                raise
            finally:
                pool.end_at_once()
            return interrupts.exit_code if interrupts.received else None


class _Pool:
    """Jobs of one `LocalExecutor.run`: starts them in free slots, forwards signals, informs the listener."""

    def __init__(self, slots: Slots, program: Program, listener: Listener, interrupts: SignalListener) -> None:
        self._slots, self._program, self._listener, self._interrupts = slots, program, listener, interrupts
        self._free = list(range(slots.count))
        self._running: list[_Running] = []
        self._stopping: signal.Signals | None = None

    def run(self, jobs: Sequence[tuple[JobSpec, Config]]) -> None:
        waiting = list(reversed(jobs))
        while waiting or self._running:
            if self._interrupts.received and self._stopping is None:
                self.stop(signal.Signals[self._interrupts.received])
            if self._stopping is not None:
                waiting.clear()
            while waiting and self._free:
                self._launch(*waiting.pop())
            self._listen()
            self._listener.tick()

    def stop(self, number: signal.Signals) -> None:
        self._stopping = number
        for job in self._running:
            send(job.process, number)
        self._listener.stopping(number.name)

    def give_up(self) -> None:
        """Stop the jobs gracefully without notifying the listener, whose failure is the reason for the stop."""
        self._listener = Listener()
        self.stop(signal.SIGTERM)
        self.run(())

    def end_at_once(self) -> None:
        """End all jobs at once: interrupt them, then kill those that still run after a few seconds."""
        self._stopping = self._stopping or signal.SIGINT
        deadline = time.monotonic() + _AT_ONCE
        for job in self._running:
            for _ in range(2):  # a second SIGINT ends a job at once, also if it has not handled the first
                send(job.process, signal.SIGINT)
        while self._running and time.monotonic() < deadline:
            self._listen()
        for job in self._running:
            send(job.process, signal.SIGKILL)
        while self._running:
            self._listen()

    def _launch(self, job: JobSpec, config: Config) -> None:
        slot = min(self._free)
        self._free.remove(slot)
        began = time.monotonic()
        try:
            cuda = _on_accelerator(config)
            environment = (
                self._slots.environment(slot, config.distributed.procs or 1)
                if cuda and ":" not in config.device
                else {}
            )
            threads = self._slots.threads if config.threads is None else None
            assignment = LocalJob(pickle.dumps((self._program, config)), job.log, environment, threads)
            process, pipe = self._process(assignment, cuda=cuda)
        except (OSError, EOFError, pickle.PicklingError, TypeError, AttributeError) as error:
            self._free.append(slot)  # the process cannot be created, or a user's argument cannot be pickled
            self._listener.ended(job.number, JobOutcome("failed", EXIT_BUG, f"not started: {one_line(error)}"), 0.0)
            return
        self._running.append(_Running(job.number, process, pipe, slot, not cuda, began))
        self._listener.started(job.number)

    def _process(self, assignment: LocalJob, *, cuda: bool) -> tuple[Process, Connection]:
        if not cuda:
            warm_up(self._program.modules)
        receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        with sender:
            try:
                return start(
                    spawned(run_job, assignment, sender) if cuda else forked(run_job, assignment, sender)
                ), receiver
            except BaseException:
                receiver.close()
                raise

    def _listen(self) -> None:
        sources: list[Any] = [job.pipe for job in self._running if job.pipe is not None]
        # If the fork server has died, a sentinel is always ready, so that waiting for it would not wait.
        sources += [job.process.sentinel for job in self._running if job.orphaned is None]
        wait(sources, timeout=_TICK)
        for job in list(self._running):
            self._hear(job)
            gone = self._has_gone(job)
            if gone:
                self._hear(job)  # its last messages
            if (gone or job.ended is not None) and not job.reported:  # its process may still be cleaning up
                job.reported = True
                if job.forked:  # on CUDA, memory is in use until the process exits
                    self._release(job)
                self._listener.ended(job.number, self._judge(job), time.monotonic() - job.began)
            if gone:
                self._close(job)

    def _hear(self, job: _Running) -> None:
        try:
            while job.pipe is not None and job.pipe.poll():
                message = pickle.loads(job.pipe.recv_bytes())
                if isinstance(message, JobOutcome):
                    job.ended, job.last_words = message, time.monotonic()
                else:
                    self._listener.progressed(job.number, message)
        except (EOFError, OSError, pickle.UnpicklingError):
            if job.pipe is not None:
                job.pipe.close()
            job.pipe = None

    def _has_gone(self, job: _Running) -> bool:
        code = job.process.exitcode
        if job.ended is not None and code is None and time.monotonic() - job.last_words > _LEAVING:
            send(job.process, signal.SIGKILL)  # blocked by a thread or an exit hook
        if code != _LOST:
            return code is not None
        if job.orphaned is None:
            job.orphaned = time.monotonic()
        if job.process.pid is not None and is_running(job.process.pid):
            late = time.monotonic() - job.orphaned > _ORPHANED
            send_to(job.process.pid, signal.SIGKILL if late else signal.SIGTERM)
            return False
        return True

    def _close(self, job: _Running) -> None:
        self._running.remove(job)
        self._release(job)
        if job.pipe is not None:
            job.pipe.close()
        job.process.join()
        job.process.close()

    def _release(self, job: _Running) -> None:
        if job.slot is not None:
            self._free.append(job.slot)
            job.slot = None

    def _judge(self, job: _Running) -> JobOutcome:
        was_stopped = job.ended is None or job.ended.status in ("interrupted", "preempted")
        if job.orphaned is not None and was_stopped and self._stopping is None:
            return JobOutcome("failed", EXIT_BUG, "the fork server was killed, which stopped the job")
        if job.ended is not None:
            return job.ended
        code = job.process.exitcode or 0
        if self._stopping is not None and code < 0:
            return stopped(self._stopping == signal.SIGINT, describe_exit_code(code))
        return JobOutcome("failed", code or EXIT_BUG, describe_exit_code(code))


def _on_accelerator(config: Config) -> bool:
    from mptrain.precision.support import resolve_device

    return resolve_device(config.device).type != "cpu"
