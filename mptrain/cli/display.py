"""State of a training run as its displays show it, and the display that prints lines if the output is not a terminal.

The display for a terminal is in `mptrain.cli.panel`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import IO

from mptrain.cli.messages import KeyValues
from mptrain.system import words as words
from mptrain.system.records import EpochRecord, EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord

#: Maximum length of the histories of loss and loss scale; they are thinned and always span the whole run.
HISTORY = 64

#: Weight of the newest loss in the exponential moving average; the first losses have equal weights.
SMOOTHING = 0.1


@dataclass
class LearnerProgress:
    """Displayed state of one learner (a model with its optimizer; a GAN has two) of a training run.

    Attributes:
        last: Newest training step.
        loss: Exponential moving average of the finite losses.
        steps: Number of steps seen by this display.
        overflows: Number of overflows seen, by phase (see `mptrain.system.records.OverflowRecord`).
        phase: Phase of the newest overflow; empty for none.
        scales: Loss scales over the run, thinned to fewer than `HISTORY`.
        losses: Smoothed losses at the same steps.
    """

    last: StepRecord
    loss: float = math.nan
    steps: int = 0
    overflows: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _stride: int = 1
    _finite: int = 0

    @property
    def overflow_count(self) -> int:
        """Number of overflows that this display has seen."""
        return sum(self.overflows.values())

    @property
    def overflow_rate(self) -> float:
        """Share of the steps seen by this display that overflowed, 0 to 1."""
        return self.overflow_count / self.steps if self.steps else 0.0

    @property
    def skipped(self) -> int:
        """Number of training steps skipped so far (attempted steps without an update), over all attempts at the run."""
        return self.last.step - self.last.updates

    def take(self, record: StepRecord) -> None:
        """Add a training step to the counts, the smoothed loss and the histories."""
        self.last = record
        if math.isfinite(record.loss):
            self._finite += 1
            before = 0.0 if math.isnan(self.loss) else self.loss
            self.loss = before + max(SMOOTHING, 1 / self._finite) * (record.loss - before)
        if self.steps % self._stride == 0:
            self.scales.append(record.loss_scale)
            self.losses.append(self.loss)
            if len(self.scales) >= HISTORY:
                del self.scales[1::2], self.losses[1::2]
                self._stride *= 2
        self.steps += 1


class RunProgress:
    """Latest state of a training run, from its records; a display may render it at any time.

    Attributes:
        learners: Displayed state of the learners by name, in the order in which they first appeared.
        progress: Newest progress record.
        evaluation: Newest evaluation.
    """

    def __init__(self) -> None:
        self.learners: dict[str, LearnerProgress] = {}
        self.progress: ProgressRecord | None = None
        self.evaluation: EvalRecord | None = None

    def take(self, record: Record) -> None:
        """Update the state from a step, overflow, progress or evaluation record; others are ignored."""
        if isinstance(record, StepRecord):
            learner = self.learners.get(record.learner)
            if learner is None:
                learner = self.learners[record.learner] = LearnerProgress(record)
            learner.take(record)
        elif isinstance(record, OverflowRecord):
            learner = self.learners.get(record.learner)
            if learner is not None:
                learner.overflows[record.phase] = learner.overflows.get(record.phase, 0) + 1
                learner.phase = record.phase
        elif isinstance(record, ProgressRecord):
            self.progress = record
        elif isinstance(record, EvalRecord):
            self.evaluation = record


class PlainLines:
    """Sink that prints a training run as ``key=value`` lines, for output that is not a terminal.

    It prints a progress line at intervals, and a line for each epoch and each evaluation.

    Args:
        stream: Output stream.
        seconds: Seconds between two progress lines; 0 prints every progress record.
        term: Plural noun for the terms of the loss, in which throughput is counted.
    """

    def __init__(self, stream: IO[str], seconds: float, term: str = "samples") -> None:
        self._lines = KeyValues(stream)
        self._term = term
        self._seconds = seconds
        self._seen = RunProgress()
        self._printed = time.monotonic()

    def take(self, record: Record) -> None:
        """Update the run's state from a record, and print a line if one is due.

        Every epoch and evaluation has a line; progress has one per interval.
        """
        self._seen.take(record)
        if isinstance(record, EvalRecord):
            metrics = {name: f"{value:.4f}" for name, value in record.metrics.items()}
            self._lines.say({"eval": record.split, "step": record.step, **metrics})
        elif isinstance(record, EpochRecord):
            several = {"learner": record.learner} if len(self._seen.learners) > 1 else {}
            counts = {"step": record.step, "updates": record.updates, "skipped": record.skipped}
            numbers = {
                "train_loss": f"{record.train_loss:.4f}",
                "loss_scale": words.digits(record.loss_scale),
                "lr": f"{record.lr:.3g}",
                "seconds": f"{record.seconds:.1f}",
                f"{self._term}_per_second": f"{record.terms_per_second:.1f}",
            }
            self._lines.say({"epoch": record.epoch, **several, **counts, **numbers})
        elif isinstance(record, ProgressRecord) and time.monotonic() - self._printed >= self._seconds:
            self._printed = time.monotonic()
            self._lines.say(self._progress(record))

    def close(self) -> None:
        """Do nothing; every line is already printed."""

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
                f"{prefix}loss_scale": words.digits(learner.last.loss_scale),
                f"{prefix}overflows": learner.overflow_count,
                f"{prefix}skipped": learner.skipped,
            }
            if learner.phase:
                fields[f"{prefix}last_overflow"] = learner.phase.replace(" ", "_")
        fields |= {
            f"{self._term}_per_second": f"{progress.terms_per_second:.1f}",
            "data_wait": f"{progress.data_wait:.2f}",
            "memory_mb": round(progress.memory / 1e6),
            "eta": words.duration(progress.eta).replace(words.UNKNOWN, "-"),
            "doing": progress.doing,
        }
        return fields
