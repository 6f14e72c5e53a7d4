"""Keeps the running totals that epochs and the summary need, from the records as they come by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mptrain.records import Record, StepRecord

if TYPE_CHECKING:
    from mptrain.engine.job import Progress


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
