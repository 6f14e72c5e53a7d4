"""Runs jobs in processes of this machine, some at a time: forked on a CPU, fresh ones on CUDA (see `mptrain.sweep.processes`)."""

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
from mptrain.errors import EXIT_BUG
from mptrain.machine import is_running, usable_cores
from mptrain.sweep.executor import JobOutcome, JobSpec, Listener, Program, stopped
from mptrain.sweep.processes import Process, describe_exit_code, forked, send, send_to, spawned, start, warm_up
from mptrain.sweep.worker import LocalJob, one_line, run_job

#: Seconds between two looks at signals and clocks.
_TICK = 0.25

#: Seconds that a process may take to end after it said how it ended, and after a second Ctrl-C.
_LEAVING, _AT_ONCE = 10.0, 3.0

#: Seconds that jobs have to save themselves when their fork server was killed.
_ORPHANED = 60.0

#: What `multiprocessing` reports of a process whose fork server has gone, so that nobody knows how it ended.
_LOST = 255


@dataclass
class _Running:
    """A process and what is known about it."""

    number: int
    process: Process
    pipe: Connection | None
    slot: int | None
    forked: bool
    began: float
    ended: JobOutcome | None = None
    last_words: float = 0.0
    told: bool = False
    orphaned: float | None = None


@dataclass(frozen=True)
class Slots:
    """What is divided among jobs.

    Attributes:
        count: Jobs at a time.
        threads: CPU threads of each; None where one job has them all.
        gpus: Values of ``CUDA_VISIBLE_DEVICES``, one for each GPU; empty where there is none.
    """

    count: int
    threads: int | None = None
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, count: int) -> Slots:
        """This process's CPU cores and GPUs, divided by the number of jobs at a time."""
        from mptrain.device import count_of

        threads = max(1, usable_cores() // count) if count > 1 else None
        found = count_of("cuda")
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return cls(count, threads, tuple(visible[:found]) or tuple(map(str, range(found))))

    def environment(self, slot: int) -> dict[str, str]:
        """The variables of a job on CUDA that leaves the choice of the GPU to us."""
        return {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}


@dataclass(frozen=True)
class LocalExecutor:
    """Runs jobs on this machine (see `Executor`).

    Args:
        composer: Over the folders that the jobs' words name.
        program: What jobs run.
        slots: What they share.
    """

    composer: Composer
    program: Program
    slots: Slots

    def run(self, jobs: Sequence[JobSpec], listener: Listener) -> int | None:
        """See `Executor`; every job is composed before the first one starts."""
        composed = [(job, self.composer.compose(job.words)) for job in jobs]
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
    def __init__(self, slots: Slots, program: Program, listener: Listener, interrupts: SignalListener) -> None:
        self._slots, self._program, self._listener, self._interrupts = slots, program, listener, interrupts
        self._free = list(range(slots.count))
        self._running: list[_Running] = []
        self._stopping: signal.Signals | None = None

    def run(self, jobs: Sequence[tuple[JobSpec, Config]]) -> None:
        """Until nothing waits and nothing runs."""
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
        """Ask every job for an orderly end."""
        self._stopping = number
        for job in self._running:
            send(job.process, number)
        self._listener.stopping(number.name)

    def give_up(self) -> None:
        """Let the jobs save themselves; the listener is what failed, and is told nothing more."""
        self._listener = Listener()
        self.stop(signal.SIGTERM)
        self.run(())

    def end_at_once(self) -> None:
        """Nothing runs after this; jobs have a moment to say so in their directories."""
        self._stopping = self._stopping or signal.SIGINT
        deadline = time.monotonic() + _AT_ONCE
        for job in self._running:
            for _ in range(2):  # the first may still have to be heard
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
            environment = self._slots.environment(slot) if cuda and ":" not in config.device else {}
            threads = self._slots.threads if config.threads is None else None
            assignment = LocalJob(pickle.dumps((self._program, config)), job.log, environment, threads)
            process, pipe = self._process(assignment, cuda=cuda)
        except (OSError, EOFError, pickle.PicklingError, TypeError, AttributeError) as error:
            self._free.append(slot)  # no process to be had, or an argument of the user's that cannot be sent to one
            self._listener.ended(job.number, JobOutcome("failed", EXIT_BUG, f"not started: {one_line(error)}"), 0.0)
            return
        self._running.append(_Running(job.number, process, pipe, slot, not cuda, began))
        self._listener.started(job.number)  # while it is on its way

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
        """Wait a moment for anything to happen, and note what has."""
        sources: list[Any] = [job.pipe for job in self._running if job.pipe is not None]
        sources += [job.process.sentinel for job in self._running if job.orphaned is None]
        wait(sources, timeout=_TICK)
        for job in list(self._running):
            self._hear(job)
            gone = self._has_gone(job)
            if gone:
                self._hear(job)  # what it said last
            if (gone or job.ended is not None) and not job.told:  # its process may still be clearing up
                job.told = True
                if job.forked:  # on CUDA its memory is in use until it has gone
                    self._release(job)
                self._listener.ended(job.number, self._judge(job), time.monotonic() - job.began)
            if gone:
                self._close(job)

    def _hear(self, job: _Running) -> None:
        try:
            while job.pipe is not None and job.pipe.poll():
                said = pickle.loads(job.pipe.recv_bytes())
                if isinstance(said, JobOutcome):
                    job.ended, job.last_words = said, time.monotonic()
                else:
                    self._listener.progressed(job.number, said)
        except (EOFError, OSError, pickle.UnpicklingError):
            if job.pipe is not None:
                job.pipe.close()
            job.pipe = None

    def _has_gone(self, job: _Running) -> bool:
        code = job.process.exitcode
        if job.ended is not None and code is None and time.monotonic() - job.last_words > _LEAVING:
            send(job.process, signal.SIGKILL)  # a thread or an exit hook of somebody's holds it
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
        """How a job ended: what it said, or what its process tells where it said nothing."""
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
