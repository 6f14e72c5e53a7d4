"""Telemetry of a run: records, warnings, progress on a display, and signs of life for the watchdog.

It decides nothing about training. Rows of the device become records in `mptrain.engine.step_log`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mptrain.engine.clock import Clock
from mptrain.engine.memory import memory_now
from mptrain.engine.ring import Ring
from mptrain.engine.step_log import LearnerLog, StepLog
from mptrain.engine.watchdog import Watchdog
from mptrain.records import EventRecord, ProgressRecord, Record, StepRecord
from mptrain.runlog.sink import Fanout, Sink
from mptrain.workloads.base.faulty_samples import describe

if TYPE_CHECKING:
    from mptrain.engine.parts import Options, Parts, Progress
    from mptrain.engine.run_storage import NoStorage, Storage


class Telemetry:
    """The records of a run on their way to files and displays.

    Args:
        parts: What the run is made of.
        options: What the user chose about it.
        storage: Where it keeps records.
        progress: How far it has come; counts of steps and time are added to it.
        planned: How many steps will be attempted.
        displays: Further sinks, which only show.

    Attributes:
        sink: Takes records.
        rings: Take the rows of each learner's steps on the device.
        step_log: Makes records of those rows.
        clock: Counts the time of training steps.
        watchdog: Notices that the run stands still; entered around it.
    """

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
            Ring(options.log.ring, len(learner.weights.names), parts.device, parts.comm) for learner in parts.learners
        )
        logs = [
            LearnerLog(learner, ring, parts.plan.guard.count)
            for learner, ring in zip(parts.learners, self.rings, strict=True)
        ]
        self.step_log = StepLog(logs, self.sink, options.log)
        self.clock = Clock(progress, parts.device)
        self._stalls = storage.paths.stalls_of(parts.comm.rank)
        self.watchdog = Watchdog(self._stalls, options.log.stall_report_after)
        self._reported_stalls = 0
        self._coming: list[Record] = []
        self._unusable: dict[str, set[str]] = {name: set() for name in parts.loaders}
        self._remarked: set[str] = set()  # kinds of unusual files that were named

    @property
    def step(self) -> int:
        """Steps attempted so far."""
        return self._progress.step

    def event(self, kind: str, **fields: Any) -> None:
        """Put something on record that has happened behind the present step."""
        self.sink.take(EventRecord(kind, self._progress.step, fields))

    def warn(self, message: str) -> None:
        """Put a warning on record, which displays show."""
        self.event("warning", message=message)

    def expect(self, *records: Record) -> None:
        """Keep records of the coming step until it is done, so that a step that is done again is on record once."""
        self._coming += records

    def record_expected(self) -> None:
        """Put on record what `expect` keeps."""
        while self._coming:
            self.sink.take(self._coming.pop(0))

    def heartbeat(self) -> None:
        """Note that there was progress; put on record that there had been none for too long."""
        self.watchdog.heartbeat()
        if self.watchdog.stalls > self._reported_stalls:
            self._reported_stalls = self.watchdog.stalls
            self.event("stalled", seconds=self._options.log.stall_report_after, file=self._stalls.name)

    def sync(self) -> None:
        """Wait for the device, and count what it still had to do as time of training."""
        started = time.perf_counter()
        self.step_log.flush()
        self.clock.add(time.perf_counter() - started)
        self.show_progress()

    def show_progress(self) -> None:
        """Show how training goes, when it is time."""
        if self.clock.elapsed >= self._options.log.seconds:
            self.step_log.request_rows()
            self.show("training")

    def show(self, doing: str) -> None:
        """Show how far the run is, and what it is doing."""
        self._storage.writer.flush()  # so that a reader, or a kill, finds what is shown, however long it is done
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
        """Put on record, and warn of, the samples that were left out since the last call; and once of each kind of unusual files."""
        own = {
            split: (faults.found, {name: kind for name, kind in faults.remarks.items() if kind not in self._remarked})
            for split, faults in ((split, loader.split.faults) for split, loader in self._parts.loaders.items())
        }
        of_all_ranks = self._parts.comm.all_gather_object(own)
        for split in own:
            found = {name: why for theirs in of_all_ranks for name, why in theirs[split][0].items()}
            remarks = {name: kind for theirs in of_all_ranks for name, kind in theirs[split][1].items()}
            if remarks := {name: kind for name, kind in remarks.items() if kind not in self._remarked}:
                self._remarked.update(remarks.values())
                self.warn(f"{split} has unusual files, {describe(remarks)}")
            news = {name: found[name] for name in found if name not in self._unusable[split]}
            if news:
                self._unusable[split] |= news.keys()
                self.event("unusable", split=split, samples=news)
                name, reason = next(iter(news.items()))
                more = f" and {len(news) - 1} more" if len(news) > 1 else ""
                self.warn(f"left out of {split}: {name} ({reason}){more}")


class EpochTotals:
    """A sink that adds what it sees to a `Progress`.

    Args:
        progress: Changed in place.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def take(self, record: Record) -> None:
        """Count a step; other records are of no interest."""
        if not isinstance(record, StepRecord):
            return
        totals = self.progress.learners[record.learner]
        if math.isfinite(record.loss):
            totals.epoch_loss += record.loss
            totals.epoch_losses += 1
        totals.epoch_skipped += record.skipped
        scale = record.loss_scale
        first, low, high, _ = totals.scale_path or (scale, scale, scale, scale)
        totals.scale_path = (first, min(low, scale), max(high, scale), scale)

    def close(self) -> None:
        """Nothing is held back."""
