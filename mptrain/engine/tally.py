"""Keeps the running totals that epochs and the summary need, from the records as they come by."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from mptrain.records import StepRecord

if TYPE_CHECKING:
    from mptrain.engine.job import Progress
    from mptrain.records import Record


class Tally:
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


class Stopwatch:
    """Measures recent throughput, and how much of the time in training steps went into waiting for data.

    Attributes:
        rate: Loss terms a second at the last `read`; evaluating and saving do not count.
        wait_share: Share of the time spent waiting for data at the last `read`, 0 to 1.
    """

    def __init__(self) -> None:
        self._read_at = time.perf_counter()
        self._terms = 0
        self._waited = 0.0
        self._seconds = 0.0
        self.rate = 0.0
        self.wait_share = 0.0

    def lap(self, terms: int, waited: float, seconds: float) -> None:
        """Count a step that took ``seconds``, of which it waited for data for ``waited``."""
        self._terms += terms
        self._waited += waited
        self._seconds += seconds

    @property
    def elapsed(self) -> float:
        """Wall time since the last `read`, seconds."""
        return time.perf_counter() - self._read_at

    def read(self) -> None:
        """Turn what was counted since the last call into `rate` and `wait_share`."""
        if self._seconds > 0:
            self.rate, self.wait_share = self._terms / self._seconds, min(1.0, self._waited / self._seconds)
        self._read_at, self._terms, self._waited, self._seconds = time.perf_counter(), 0, 0.0, 0.0
