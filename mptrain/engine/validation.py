"""Evaluates a run at the end of epochs, and records metrics, the epoch's row and the task's exhibits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mptrain.engine.evaluate import evaluate
from mptrain.engine.exhibit import keep_exhibits
from mptrain.records import EpochRecord

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts, Progress
    from mptrain.engine.telemetry import Telemetry


class Validation:
    """Evaluates a run and records the results.

    Args:
        parts: The built run.
        samples: Folder for the task's exhibits.
        progress: Progress of the run; metrics are stored in place.
        telemetry: Receives records.
    """

    def __init__(self, parts: Parts, samples: Path, progress: Progress, telemetry: Telemetry) -> None:
        self._parts, self._samples = parts, samples
        self._progress, self._telemetry = progress, telemetry

    def end_epoch(self, completed: int, stop: Callable[[], bool]) -> bool:
        """Validate, and write the epoch's row.

        Args:
            completed: Number of completed epochs.
            stop: Called between batches; validation is aborted if it returns True.

        Returns:
            Whether validation completed; if not, nothing is recorded.
        """
        progress, telemetry = self._progress, self._telemetry
        telemetry.step_log.flush()
        telemetry.report_faulty_samples()
        if "val" in self._parts.loaders and not self.run("val", completed, stop):
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
        return True

    def run(self, split: str, epoch: int, stop: Callable[[], bool]) -> bool:
        """Evaluate on a split; return False if evaluation was aborted."""
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
            intervals=split == "test",
        )
        if outcome is None:
            return False
        telemetry.report_faulty_samples()  # last exchange between ranks before the evaluation is recorded
        metrics = outcome.record.metrics
        telemetry.sink.take(outcome.record)
        if files := keep_exhibits(self._samples, progress.step, outcome.exhibits):  # empty except on rank 0
            telemetry.event("samples", files=files)
        progress.last[split], progress.intervals[split] = metrics, outcome.record.intervals
        if split == "val" and parts.task.metric is not None:
            value, best = metrics[parts.task.metric], progress.best
            sign = 1.0 if parts.task.higher_is_better else -1.0
            if not math.isnan(value) and (best is None or sign * value > sign * best):
                progress.best = value
        return True
