"""The display of a run where there is no terminal: ``key=value`` lines without any control character."""

from __future__ import annotations

import time
from typing import IO

from mptrain.cli import wording
from mptrain.cli.progress import RunProgress
from mptrain.cli.rows import KeyValues
from mptrain.records import EpochRecord, EvalRecord, ProgressRecord, Record


class PlainLines:
    """A sink that prints a line every so often, and one for each epoch and each evaluation.

    Args:
        stream: Where lines go.
        seconds: Between two lines about progress; 0 prints every progress record.
    """

    def __init__(self, stream: IO[str], seconds: float) -> None:
        self._lines = KeyValues(stream)
        self._seconds = seconds
        self._seen = RunProgress()
        self._printed = time.monotonic()

    def take(self, record: Record) -> None:
        """Note the record, and print what is due."""
        self._seen.take(record)
        if isinstance(record, EvalRecord):
            self._lines.say({"eval": record.split, "step": record.step, **_metrics(record.metrics)})
        elif isinstance(record, EpochRecord):
            self._lines.say(self._epoch(record))
        elif isinstance(record, ProgressRecord) and time.monotonic() - self._printed >= self._seconds:
            self._printed = time.monotonic()
            self._lines.say(self._progress(record))

    def close(self) -> None:
        """Nothing is held back."""

    def _progress(self, progress: ProgressRecord) -> dict[str, object]:
        fields: dict[str, object] = {
            "step": f"{progress.step}/{progress.steps}",
            "epoch": f"{min(progress.epoch + 1, progress.epochs)}/{progress.epochs}",
        }
        for name, learner in self._seen.learners.items():
            prefix = f"{name}." if len(self._seen.learners) > 1 else ""
            fields |= {
                f"{prefix}loss": f"{learner.loss:.4f}",
                f"{prefix}lr": f"{learner.last.lr:.3g}",
                f"{prefix}loss_scale": wording.scale(learner.last.loss_scale),
                f"{prefix}overflows": learner.overflow_count,
                f"{prefix}skipped": learner.skipped,
            }
            if learner.phase:
                fields[f"{prefix}last_overflow"] = learner.phase.replace(" ", "_")
        fields |= {
            f"{progress.term}_per_second": f"{progress.terms_per_second:.1f}",
            "data_wait": f"{progress.data_wait:.2f}",
            "memory_mb": round(progress.memory / 1e6),
            "eta": wording.duration(progress.eta),
            "doing": progress.doing,
        }
        return fields

    def _epoch(self, record: EpochRecord) -> dict[str, object]:
        several = {"learner": record.learner} if len(self._seen.learners) > 1 else {}
        term = self._seen.progress.term if self._seen.progress else "terms"
        return {
            "epoch": record.epoch,
            **several,
            "step": record.step,
            "updates": record.updates,
            "skipped": record.skipped,
            "train_loss": f"{record.train_loss:.4f}",
            "loss_scale": wording.scale(record.loss_scale),
            "lr": f"{record.lr:.3g}",
            "seconds": f"{record.seconds:.1f}",
            f"{term}_per_second": f"{record.terms_per_second:.1f}",
        }


def _metrics(metrics: dict[str, float]) -> dict[str, object]:
    return {name: f"{value:.4f}" for name, value in metrics.items()}
