"""What a display shows, kept up to date from the records as they come by: a few assignments for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mptrain.records import EvalRecord, OverflowRecord, ProgressRecord, Record, StepRecord

#: The most values that the histories of loss and loss scale keep; they span the whole run.
HISTORY = 64

#: Weight of the newest loss in the shown one.
SMOOTHING = 0.05


@dataclass
class LearnerProgress:
    """What is shown of one learner.

    Attributes:
        last: Its newest step.
        loss: Exponentially smoothed finite losses.
        steps: Steps seen by this display.
        overflows: Overflows seen, by phase.
        phase: Phase of the newest overflow.
        scales: Loss scales over the run, thinned.
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

    @property
    def overflow_count(self) -> int:
        """Overflows seen."""
        return sum(self.overflows.values())

    @property
    def overflow_rate(self) -> float:
        """Overflows per step seen."""
        return self.overflow_count / self.steps if self.steps else 0.0

    @property
    def skipped(self) -> int:
        """Refused updates so far, over all attempts."""
        return self.last.step - self.last.updates

    def take(self, record: StepRecord) -> None:
        """Count a step."""
        self.last = record
        if math.isfinite(record.loss):
            self.loss = record.loss if math.isnan(self.loss) else self.loss + SMOOTHING * (record.loss - self.loss)
        if self.steps % self._stride == 0:
            self.scales.append(record.loss_scale)
            self.losses.append(self.loss)
            if len(self.scales) >= HISTORY:
                del self.scales[1::2], self.losses[1::2]
                self._stride *= 2
        self.steps += 1


class RunProgress:
    """The newest of everything, for a display to render when it wants to.

    Attributes:
        learners: By name, in the order in which they were first seen.
        progress: The newest progress record.
        evaluation: The newest evaluation.
    """

    def __init__(self) -> None:
        self.learners: dict[str, LearnerProgress] = {}
        self.progress: ProgressRecord | None = None
        self.evaluation: EvalRecord | None = None

    def take(self, record: Record) -> None:
        """Keep what is shown of a record."""
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
