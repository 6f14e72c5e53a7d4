"""Telemetry of a training run, which it must not influence: records, warnings, progress display and heartbeats."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mptrain.engine.progress import EpochTotals
from mptrain.engine.resources import Clock, memory_now
from mptrain.engine.ring import Ring
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.checkpoints import CheckpointStore, NoSaver, Saver
from mptrain.runlog.record_writer import Fanout, NoRecords, RecordWriter, Sink
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import StorageError
from mptrain.system.files import open_in_place
from mptrain.system.records import EventRecord, ProgressRecord, Record
from mptrain.system.words import listed
from mptrain.workloads.base.data_files import describe

if TYPE_CHECKING:
    from mptrain.engine.options import Options
    from mptrain.engine.parts import Parts
    from mptrain.engine.progress import Progress


class Telemetry:
    """Sender of a run's records and warnings to files and displays, with its clock and its watchdog context."""

    def __init__(
        self,
        parts: Parts,
        options: Options,
        storage: Storage | NoStorage,
        progress: Progress,
        planned: int,
        displays: Sequence[Sink] = (),
    ) -> None:
        self._parts, self._options, self._storage = parts, options, storage
        self._progress, self._planned = progress, planned
        self.sink = Fanout((storage.writer, EpochTotals(progress), *displays))
        self.rings = tuple(
            Ring(options.log.ring, len(learner.weights.names), parts.device) for learner in parts.learners
        )
        logs = [
            LearnerLog.of(learner, ring, parts.plan.guard.count)
            for learner, ring in zip(parts.learners, self.rings, strict=True)
        ]
        self.step_log = StepLog(logs, self.sink, options.log)
        self.clock = Clock(progress, parts.device)
        self._stalls = storage.paths.stalls_of(parts.comm.rank)
        self.watchdog = Watchdog(self._stalls, options.log.stall_report_after)
        self._reported_stalls = 0
        self._coming: list[Record] = []
        self._unusable: dict[str, set[str]] = {name: set() for name in parts.loaders}
        self._remarked: set[str] = set()  # kinds of unusual files that were reported

    @property
    def step(self) -> int:
        """Number of attempted training steps, skipped ones included."""
        return self._progress.step

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event of the run after the current step, with details as JSON values."""
        self.sink.take(EventRecord(kind, self._progress.step, fields))

    def warn(self, message: str) -> None:
        """Record a warning for the user, one sentence, which displays show."""
        self.event("warning", message=message)

    def expect(self, *records: Record) -> None:
        """Hold back records of the next step until it has run, so that one repeated after a resume is recorded once."""
        self._coming += records

    def record_expected(self) -> None:
        """Write the records that `expect` has held back."""
        while self._coming:
            self.sink.take(self._coming.pop(0))

    def heartbeat(self) -> None:
        """Tell the watchdog that the run makes progress; record an event if it had detected a stall."""
        self.watchdog.heartbeat()
        if self.watchdog.stalls > self._reported_stalls:
            self._reported_stalls = self.watchdog.stalls
            self.event("stalled", seconds=self._options.log.stall_report_after, file=self._stalls.name)

    def sync(self) -> None:
        """Wait for the device to finish its steps, write their records, and count the wait as training time."""
        started = time.perf_counter()
        self.step_log.flush()
        self.clock.add(time.perf_counter() - started)
        self.show_progress()

    def show_progress(self) -> None:
        """Show the progress of training if ``log.seconds`` have passed since it was last shown."""
        if self.clock.elapsed >= self._options.log.seconds:
            self.step_log.request_rows()
            self.show("training")

    def show(self, doing: str) -> None:
        """Show the progress of the run and its activity: ``training``, ``evaluating`` or ``saving``."""
        self._storage.writer.flush()  # files then have all that is shown, even if the run is killed
        self.clock.read()
        progress, minutes = self._progress, self._options.train.max_minutes
        rate = progress.seconds / progress.step if progress.step else 0.0
        eta = rate * (self._planned - progress.step)
        if minutes is not None:
            eta = min(eta, max(0.0, 60 * minutes - progress.seconds))
        self.sink.take(
            ProgressRecord(
                step=progress.step,
                steps=self._planned,
                epoch=progress.epoch,
                epochs=self._options.train.epochs,
                terms_per_second=self.clock.rate,
                term=self._parts.task.term,
                data_wait=self.clock.wait_share,
                memory=memory_now(self._parts.device),
                eta=eta,
                doing=doing,
            )
        )

    def report_faulty_samples(self) -> None:
        """Record and warn of data samples left out since the last call, and warn once of each kind of unusual files.

        All ranks must call this together, because samples of all ranks are reported.
        """
        own = {
            split: (
                faults.unusable,
                {name: kind for name, kind in faults.remarks.items() if kind not in self._remarked},
            )
            for split, faults in ((split, loader.split.faults) for split, loader in self._parts.loaders.items())
        }
        of_all_ranks = self._parts.comm.all_gather_object(own)
        for split in own:
            unusable = {name: why for theirs in of_all_ranks for name, why in theirs[split][0].items()}
            remarks = {name: kind for theirs in of_all_ranks for name, kind in theirs[split][1].items()}
            if remarks := {name: kind for name, kind in remarks.items() if kind not in self._remarked}:
                self._remarked.update(remarks.values())
                self.warn(f"{split} has unusual files, {describe(remarks)}")
            news = {name: unusable[name] for name in unusable if name not in self._unusable[split]}
            if news:
                self._unusable[split] |= news.keys()
                self.event("unusable", split=split, samples=news)
                names = listed([f"{name} ({reason})" for name, reason in news.items()], 1)
                self.warn(f"left out of {split}: {names}")


@dataclass(frozen=True)
class Storage:
    """Storage of a run on rank 0, which writes its records and checkpoints, with the configuration's digest."""

    paths: RunPaths
    writer: RecordWriter
    store: CheckpointStore
    config_digest: str

    def saver(self, *, async_save: bool) -> Saver:
        """Return the saver of checkpoints, which also flushes the records that they refer to."""
        return Saver(self.store, self.writer, async_save=async_save)


@dataclass(frozen=True)
class NoStorage:
    """Storage of a run on ranks other than 0, which writes no records and no checkpoint of its own."""

    paths: RunPaths
    writer: NoRecords = field(default_factory=NoRecords)
    config_digest: str = ""

    def saver(self, *, async_save: bool) -> NoSaver:
        """Return a saver that writes only this rank's shards of tensors; ``async_save`` has no effect."""
        return NoSaver(self.paths.checkpoints)


#: Number of checks within the time after which a run counts as stalled.
LOOKS = 10


class Watchdog:
    """Context manager with a thread that writes all thread stacks to a file after ``seconds`` without a heartbeat.

    A lost network drive, a lock, or a device or process that does not answer raises no exception. The thread works as
    long as the hanging call has released Python's global interpreter lock, which waiting for files, devices and other
    processes does.
    """

    def __init__(self, path: Path, seconds: float | None) -> None:
        self.stalls = 0
        self._path = path
        self._seconds = seconds
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def heartbeat(self) -> None:
        """Tell the watchdog that the run makes progress."""
        self._beats += 1

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._seconds is not None
        pause = self._seconds / LOOKS
        seen, still = -1, 0
        looked = time.monotonic()
        while not self._ended.wait(pause):
            late = time.monotonic() - looked > 2 * pause  # the whole process was suspended, which is no stall
            looked = time.monotonic()
            still = 0 if late or self._beats != seen else still + 1
            seen = self._beats
            if still == LOOKS:
                self.stalls += 1
                self._tell()

    def _tell(self) -> None:
        message = f"no progress for {self._seconds:g} s"
        try:
            with storage_errors(self._path):
                descriptor = open_in_place(self._path, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                print(f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {message}", file=file, flush=True)
                faulthandler.dump_traceback(file)
            where = f"the stacks of all threads are in {self._path}"
        except (OSError, StorageError) as error:
            where = str(error)
        print(f"warning: {message}; {where}", file=sys.stderr, flush=True)
