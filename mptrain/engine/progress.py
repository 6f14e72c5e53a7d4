"""Progress of a run: its position, last metrics, early stopping and totals, as plain values for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mptrain.system.records import Record, StepRecord


@dataclass
class LearnerTotals:
    """Totals over the training steps of one learner, those of the current epoch among them.

    ``epoch_losses`` counts the finite losses in ``epoch_loss``. ``scale_path`` has the first, smallest, largest and
    latest loss scale; empty before the first step.
    """

    epoch_loss: float = 0.0
    epoch_losses: int = 0
    epoch_skipped: int = 0
    scale_path: tuple[float, ...] = ()


@dataclass(frozen=True)
class EarlyStoppingState:
    """State of early stopping after a validation.

    ``metric`` is empty before the first validation. ``best`` is the best metric so far, at ``epoch`` completed epochs;
    None before the first finite one. ``bad`` counts consecutive validations without improvement.
    """

    metric: str = ""
    best: float | None = None
    epoch: int = 0
    bad: int = 0

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> EarlyStoppingState:
        """Return the state in the saved fields of a `Progress`; a new one if an older mptrain has saved them."""
        state = saved.get("early_stopping", {})
        best = state.get("best") if isinstance(state.get("best"), float) else None
        return cls(**{name: state[name] for name in ("metric", "epoch", "bad") if name in state}, best=best)


@dataclass
class Progress:
    """Progress of a run: its position, last metrics and totals. It is saved with every checkpoint.

    An attempt is the part of a run between its start, or a resume, and the next end. Loss terms are what the loss is
    averaged over: samples or tokens. Totals are over all attempts; seconds are wall time in training steps.

    Attributes:
        step: Number of attempted steps, skipped ones included.
        epoch: Number of completed epochs, including their evaluation.
        batch: Number of consumed batches of the current epoch; equal to the epoch's length during its evaluation.
        best: Best validation metric so far; None before the first evaluation or if the task has no metric.
        last: Metrics of the last evaluation, by split; ``intervals`` are their 95 % confidence intervals, if requested.
        evaluated_at: Number of attempted steps at the last validation; -1 before the first.
        waited: Part of ``seconds`` spent waiting for data.
        steady_seconds: Part of ``seconds`` after the warm-up of each attempt (`mptrain.engine.resources.WARM_UP`).
        joules: Energy of the device in training steps; None before the first, NaN if not reported.
        stopped: Reason why the program's function has ended training; empty if it has not. It holds for a plan of
            ``stopped_plan`` steps: a run that is given more of them goes on.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float | None = None
    last: dict[str, dict[str, float]] = field(default_factory=dict)
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    evaluated_at: int = -1
    early_stopping: EarlyStoppingState = EarlyStoppingState()
    epoch_seconds: float = 0.0
    epoch_terms: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    steady_seconds: float = 0.0
    steady_terms: int = 0
    steady_steps: int = 0
    joules: float | None = None
    samples: int = 0
    terms: int = 0
    stopped: str = ""
    stopped_plan: int = 0
    learners: dict[str, LearnerTotals] = field(default_factory=dict)

    def begin_epoch(self, completed: int) -> None:
        """Set the number of completed epochs and reset the totals of the current epoch."""
        self.epoch, self.batch = completed, 0
        self.epoch_seconds, self.epoch_terms = 0.0, 0
        for totals in self.learners.values():
            totals.epoch_loss, totals.epoch_losses, totals.epoch_skipped = 0.0, 0, 0

    def become(self, other: Progress) -> None:
        """Overwrite all fields with those of another progress, such as one from a checkpoint."""
        vars(self).update(vars(other))

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values by name, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress that a checkpoint has saved."""
        learners = {name: LearnerTotals(**totals) for name, totals in saved["learners"].items()}
        early_stopping = EarlyStoppingState.from_state(saved)
        return cls(**{**saved, "learners": learners, "early_stopping": early_stopping})


class EpochTotals:
    """Receiver of records that adds each step record to the totals of the current epoch in a `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def take(self, record: Record) -> None:
        """Add a step record's loss, skipped update and loss scale to its learner's totals; ignore other records."""
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
        """Do nothing, because no record is held back."""
