"""Evaluation of a run at the end of each epoch and of training, with its records."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.engine.evaluate import evaluate
from mptrain.engine.exhibit import keep_exhibits
from mptrain.system.errors import ConfigError
from mptrain.system.records import EpochRecord

if TYPE_CHECKING:
    from mptrain.engine.monitor import Monitor
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.telemetry import Telemetry


class Validation:
    """Evaluation of a run on validation and test data; ``samples`` is the folder for what the task shows."""

    def __init__(self, parts: Parts, samples: Path, progress: Progress, telemetry: Telemetry, monitor: Monitor) -> None:
        self._parts, self._samples, self._monitor = parts, samples, monitor
        self._progress, self._telemetry = progress, telemetry

    def end_epoch(self, completed: int, stop: Callable[[], bool], *, last: bool = False) -> bool:
        """Evaluate on the validation data, if any, and record the epoch; False, and no record, if ``stop`` aborts.

        ``last`` says that training ends here, so that settings may be chosen by this evaluation: it has intervals.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.step_log.flush()
        telemetry.report_faulty_samples()
        if "val" in self._parts.loaders and not self.run("val", completed, stop, intervals=last):
            return False
        for log in telemetry.step_log.learner_logs:
            totals = progress.learners[log.name]
            telemetry.sink.take(
                EpochRecord(
                    learner=log.name,
                    epoch=progress.epoch + 1,
                    step=progress.step,
                    updates=log.updates,
                    skipped=totals.epoch_skipped,
                    train_loss=totals.epoch_loss / totals.epoch_losses if totals.epoch_losses else math.nan,
                    loss_scale=log.last.loss_scale if log.last else math.nan,
                    lr=log.last.lr if log.last else math.nan,
                    val=progress.last["val"] if "val" in self._parts.loaders else {},
                    seconds=round(progress.epoch_seconds, 3),
                    terms_per_second=round(progress.epoch_terms / max(progress.epoch_seconds, 1e-9), 1),
                )
            )
        progress.evaluated_at = progress.step
        if "val" in self._parts.loaders:
            self._monitor.after_validation(completed)
        return True

    def run(self, split: str, epoch: int, stop: Callable[[], bool], *, intervals: bool) -> bool:
        """Evaluate the run on ``val`` or ``test`` and record the metrics; False if ``stop`` aborts it.

        On validation data it also writes what the task shows, and keeps the best metric.
        """
        parts, progress, telemetry = self._parts, self._progress, self._telemetry
        telemetry.show("evaluating")
        outcome = evaluate(
            parts,
            parts.loaders[split],
            split,
            progress.step,
            epoch,
            stop=stop,
            exhibit=split == "val",
            intervals=intervals,
        )
        if outcome is None:
            return False
        telemetry.report_faulty_samples()  # last exchange between ranks before the evaluation is recorded
        metrics = outcome.record.metrics
        telemetry.sink.take(outcome.record)
        if files := keep_exhibits(self._samples, progress.step, outcome.exhibits):  # empty except on rank 0
            telemetry.event("samples", files=files)
        if parts.task.metric is not None and parts.task.metric not in metrics:
            raise ConfigError(
                f"the metric of the task is {parts.task.metric}, but its summarise() returns {', '.join(metrics)}",
                "let summarise() return a value of that name, or set another name as metric",
            )
        progress.last[split], progress.intervals[split] = metrics, outcome.record.intervals
        if split == "val" and parts.task.metric is not None:
            value, best = metrics[parts.task.metric], progress.best
            sign = 1.0 if parts.task.higher_is_better else -1.0
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                progress.best = value
        return True
