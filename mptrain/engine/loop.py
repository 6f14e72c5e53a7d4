"""The training loop: epochs, evaluations, checkpoints, and an orderly end in every case."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mptrain.engine.batch_sync import BatchSync, DistributedBatchSync, SyncedBatch
from mptrain.engine.buffer_guard import Thawed
from mptrain.engine.checkpointing import Checkpointing
from mptrain.engine.failure_diagnosis import Termination, require_success
from mptrain.engine.fingerprints import data_order
from mptrain.engine.interrupt import SignalListener
from mptrain.engine.options import Options
from mptrain.engine.parts import Parts
from mptrain.engine.progress import LearnerTotals, Progress
from mptrain.engine.rehearsal import rehearse_run
from mptrain.engine.resources import forget_peak, memory_by_use, memory_peak
from mptrain.engine.step_log import LearnerLog
from mptrain.engine.step_runner import StepRunner, capture_on
from mptrain.engine.telemetry import Telemetry
from mptrain.engine.validation import Monitor, Validation, early_stop, stopped_by_program
from mptrain.precision.support import supports, unaligned_share
from mptrain.precision.upcast import uses_upcast
from mptrain.system.errors import StorageError
from mptrain.system.process_state import random_state
from mptrain.system.records import EventRecord

if TYPE_CHECKING:
    from mptrain.engine.telemetry import NoStorage, Storage
    from mptrain.runlog.record_writer import Sink
    from mptrain.workloads.base.batch import Batch


class Loop:
    """Training loop of one run, new or resumed: trains, evaluates and saves until the planned end."""

    def __init__(
        self, parts: Parts, options: Options, storage: Storage | NoStorage, displays: Sequence[Sink] = ()
    ) -> None:
        self.parts, self.options, self.storage = parts, options, storage
        self.progress = Progress(learners={learner.name: LearnerTotals() for learner in parts.learners})
        self.interrupts = SignalListener()
        self.telemetry = Telemetry(parts, options, storage, self.progress, self.planned, displays)
        self.checkpointing = Checkpointing(parts, options, storage, self.progress, self.telemetry)
        self._monitor = Monitor(parts, options, self.progress, self.telemetry, self.planned)
        self._validation = Validation(parts, storage.paths.samples, self.progress, self.telemetry, self._monitor)
        self._termination = Termination(
            parts, storage.paths, self.progress, self.planned, self.telemetry, self.checkpointing
        )
        one_rank = parts.comm.world_size == 1
        self._batch_sync = (
            BatchSync(self.interrupts, self._time_is_over)
            if one_rank
            else DistributedBatchSync(self.interrupts, self._time_is_over, parts.learners[0].strategy, parts.plan.guard)
        )
        graphs = options.train.engine == "graph" and one_rank
        self._runner = StepRunner(parts, self.telemetry.rings, capture_on(parts.device) if graphs else None)
        self._within_step = False
        self._activations: int | None = None  # bytes that a pass saves; None before the rehearsal
        self._random: dict[str, Any] = {}  # random state before the last step, if that step may end the run

    @property
    def planned(self) -> int:
        """Number of training steps that will be attempted, if the time limit allows."""
        return self.options.train.planned(self.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Number of training batches in one epoch."""
        return self.parts.loaders["train"].steps_per_epoch

    @property
    def _finished(self) -> bool:
        return self.progress.step >= self.planned or self._batch_sync.late or bool(self._monitor.stopped)

    def _time_is_over(self) -> bool:
        minutes = self.options.train.max_minutes
        return minutes is not None and self.progress.seconds >= 60 * minutes

    def run(self) -> dict[str, Any]:
        """Train, evaluate and save until the run is finished; return the contents of its ``summary.json``.

        Raises:
            NumericsError: The last ``train.max_consecutive_overflows`` steps of a learner all overflowed.
            Preempted: A signal asked the run to stop, and it was saved; or another rank was lost.
            DataError: A sample cannot be used.
            StorageError: A file cannot be written.
        """
        forget_peak(self.parts.device)
        try:
            with self.interrupts, self.telemetry.watchdog, self.checkpointing.saver:
                try:
                    self._train()
                except BaseException as error:
                    self._end_records(error)
                    raise
        except StorageError as error:  # the last checkpoint on record may be missing
            self.telemetry.event("storage", message=str(error))
            raise
        logs = self.telemetry.step_log.learner_logs
        return summarise(self.parts, self.options, self.progress, logs, self._activations)

    def require_success(self) -> None:
        """Raise NumericsError if the run trained nothing because of its numerics; warn if it was too short to."""
        parts, logs, root = self.parts, self.telemetry.step_log.learner_logs, self.storage.paths.root
        for warning in require_success(self.progress, logs, parts.task.metric, root, half=parts.policy.reduced):
            self.telemetry.warn(warning)

    def _train(self) -> None:
        parts, progress, checkpointing = self.parts, self.progress, self.checkpointing
        if parts.loaders.keys() == {"train"}:
            self.telemetry.warn(f"{parts.dataset.name} has neither validation nor test data: nothing is evaluated")
        self._batch_sync.should_stop()  # the time limit of a resumed run may be reached already
        while not self._finished or progress.evaluated_at != progress.step:
            self.train_epoch()
            completed = progress.epoch + (progress.batch >= self.steps_per_epoch)
            if not self._validation.end_epoch(completed, self._move_on, last=self._finished):
                self._obey_signals()
            if completed > progress.epoch:
                checkpointing.carried.whole()
                progress.begin_epoch(completed)
            if self._finished or checkpointing.due_after_epoch():
                self._batch_sync.should_stop()  # as after a step
                checkpointing.save()
        self._evaluate_test()

    def train_epoch(self) -> None:
        """Train on the remaining batches of the current epoch, and save a checkpoint after each step that needs one."""
        parts, progress, telemetry, checkpointing = self.parts, self.progress, self.telemetry, self.checkpointing
        for upcoming, waited in self._rest_of_epoch():
            started = time.perf_counter()
            self.attempt(parts.prepare(upcoming.batch))
            progress.samples += upcoming.samples
            if telemetry.clock.lap(upcoming.terms, waited, waited + time.perf_counter() - started):
                telemetry.sync()  # steady time starts with an idle device
            telemetry.show_progress()
            checkpointing.saver.check()
            self._obey_signals()
            if checkpointing.due_after_step() and not self._finished:
                telemetry.sync()
                self._batch_sync.should_stop()  # raises if the ranks' steps were not the same
                checkpointing.save()

    def _rest_of_epoch(self) -> Iterator[tuple[SyncedBatch, float]]:
        """Yield the remaining batches of the current epoch, each with the seconds spent waiting for it."""
        progress, clock = self.progress, self.telemetry.clock
        if progress.batch >= self.steps_per_epoch or self._finished:
            return
        self.parts.model.train()
        clock.begin()
        batches = self.parts.loaders["train"].batches(progress.epoch, start=progress.batch)
        while progress.batch < self.steps_per_epoch and not self._finished:
            started = time.perf_counter()
            upcoming = self._batch_sync.next(batches)
            if upcoming is None:  # unusable samples were left out, so the epoch has fewer batches
                progress.batch = self.steps_per_epoch
                break
            waited = time.perf_counter() - started
            self._obey_signals()
            self._look_at(upcoming.batch)
            yield upcoming, waited
        self.telemetry.sync()
        clock.end()
        self.parts.plan.guard.require_seen()

    def _look_at(self, batch: Batch) -> None:
        """Record the data order at the first batch of an epoch, and rehearse at the first batch of the run; untimed."""
        progress, loader, comm = self.progress, self.parts.loaders["train"], self.parts.comm
        # With train.one_batch every epoch is the first one's batch again.
        begins = progress.batch == 0 and not (loader.one_batch and progress.epoch)
        if begins and comm.is_rank_zero:  # rank 0 writes the records
            first = batch if comm.world_size == 1 else loader.whole_batch(progress.epoch)
            order = data_order(loader, progress.epoch, first)
            self.telemetry.expect(EventRecord("data_order", progress.step, order))
        if self._activations is None:
            self._activations = rehearse_run(self.parts, self.options, self.telemetry, batch, self.planned)

    def attempt(self, batch: Batch) -> None:
        """Attempt and record one training step of every learner; NumericsError after too many overflows in a row."""
        parts, progress, telemetry = self.parts, self.progress, self.telemetry
        most, step = self.options.train.max_consecutive_overflows, progress.step + 1
        parts.comm.begin_step(parts.loaders["train"].seed, step)
        parts.plan.products.begin_step(parts.loaders["train"].seed, step, parts.comm.rank)
        if telemetry.step_log.may_reach_limit(most):
            self._random = random_state(parts.device)
        telemetry.expect(*parts.fault.records(step))
        self._within_step = True
        watches = [parts.probe.watch(learner.name, step) for learner in parts.learners]
        with parts.fault.at(step, batch) as given:
            self._runner.run(given, watches, as_usual=not parts.fault.is_at(step))
        telemetry.record_expected()
        for watch in filter(None, watches):
            for seen in watch.records():
                telemetry.sink.take(seen)
        self._within_step = False
        telemetry.heartbeat()
        progress.step, progress.batch = step, progress.batch + 1
        telemetry.step_log.note(step, progress.epoch)
        while self._runner.notes:
            telemetry.warn(self._runner.notes.pop(0))
        over_overflow_limit = telemetry.step_log.over_overflow_limit(most)
        if over_overflow_limit is not None:
            self._termination.by_overflows(over_overflow_limit, batch, given, self._random)
        self._monitor.after_step(given)

    def _evaluate_test(self) -> None:
        epoch = self.progress.epoch
        if "test" in self.parts.loaders and not self._validation.run("test", epoch, self._move_on, intervals=True):
            self._obey_signals()

    def _move_on(self) -> bool:
        self.telemetry.heartbeat()
        return self._batch_sync.should_stop()

    def _obey_signals(self) -> None:
        if self._batch_sync.asked is not None:
            self._termination.by_signal(self._batch_sync.asked, self.interrupts.exit_code)

    def _end_records(self, error: BaseException) -> None:
        """Write the records that are still on the device, whatever ended the run."""
        comm, telemetry = self.parts.comm, self.telemetry
        comm.send_error(error)
        lost = comm.is_lost(error)
        if not lost:
            telemetry.record_expected()
        if not lost or self.parts.device.type == "cpu":  # an accelerator may wait for the lost rank forever
            telemetry.step_log.flush()
        if lost:
            self._termination.by_lost_rank(error, within_step=self._within_step)
        if isinstance(error, Thawed) and self._within_step and comm.world_size == 1:
            self._termination.by_thawed(error)


def summarise(
    parts: Parts,
    options: Options,
    progress: Progress,
    learner_logs: Sequence[LearnerLog],
    activations: int | None = None,
) -> dict[str, Any]:
    """Return the contents of a finished run's ``summary.json`` as plain values.

    ``metric`` is from the last evaluation on test data, or on validation data if there are no test data; ``intervals``
    has the 95 % confidence intervals of all metrics of that evaluation, and ``val_intervals`` those of the last one on
    validation data, by which settings are chosen. Ratios are fractions, not per cent. Units are
    bytes, seconds, joules and loss terms per second; ``steady`` figures leave out the warm-up of each attempt.
    ``activations`` are the bytes that a pass saves for its backward pass; None without any training step.
    """
    record = "test" if "test" in progress.last else "val"
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    early = stopped_by_program(progress, planned)
    early = early or early_stop(parts.task, options.train.early_stopping, progress.early_stopping)
    return {
        "metric_name": parts.task.metric,
        "higher_is_better": parts.task.higher_is_better if parts.task.metric else None,
        "metric": progress.last.get(record, {}).get(parts.task.metric or ""),
        "metric_split": record,
        "intervals": progress.intervals.get(record, {}),
        "val_intervals": progress.intervals.get("val", {}),
        "best_val": progress.best,
        "val": progress.last.get("val"),
        "test": progress.last.get("test"),
        "steps": progress.step,
        "learners": {log.name: _of_learner(log, progress) for log in learner_logs},
        "planned_steps": planned,
        "epochs": progress.epoch,
        "planned_epochs": options.train.epochs,
        "max_steps": options.train.max_steps,
        "max_minutes": options.train.max_minutes,
        "stopped_early": early if early and progress.step < planned else None,
        "samples": progress.samples,
        "term": parts.task.term,
        "terms": progress.terms,
        "terms_per_second": progress.terms / max(progress.seconds, 1e-9),
        "steady_terms_per_second": progress.steady_terms / progress.steady_seconds if progress.steady_terms else None,
        "steady_steps": progress.steady_steps,
        "train_seconds": progress.seconds,
        "data_wait": progress.waited / max(progress.seconds, 1e-9),
        "energy_joules": None if progress.joules is None or math.isnan(progress.joules) else progress.joules,
        "memory_before": parts.origin.memory,
        "peak_memory": memory_peak(parts.device),
        "memory_by_use": None if activations is None else memory_by_use(parts, activations),
        "unusable_samples": {name: loader.split.skipped for name, loader in parts.loaders.items()},
        "converted_files": {name: len(loader.split.faults.remarks) for name, loader in parts.loaders.items()},
        "device": str(parts.device),
        "threads": torch.get_num_threads(),
        "facts": facts(parts),
    }


def _of_learner(log: LearnerLog, progress: Progress) -> dict[str, Any]:
    path = progress.learners[log.name].scale_path
    return {
        "updates": log.updates,
        "skipped": log.skipped,
        "skip_rate": log.skipped / progress.step if progress.step else 0.0,
        "overflows": log.history.counts,
        "scale": dict(zip(("first", "min", "max", "last"), path, strict=False)),
    }


def facts(parts: Parts) -> dict[str, Any]:
    """Return facts about a run's model and device that explain its speed, for ``summary.json``.

    ``upcast`` says that half-precision products are computed in FP32 and rounded once, on a CPU without half
    arithmetic; ``support`` says how the device supports the precision mode.
    """
    return {
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "unaligned": unaligned_share(parts.model),
        "convolutions": any(parameter.ndim >= 4 for parameter in parts.model.parameters()),
        "upcast": uses_upcast(parts.policy, parts.device),
        "support": supports(parts.policy, parts.device).reason,
    }
