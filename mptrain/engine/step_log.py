"""Log of training steps on the host, which converts their values from the device to step, overflow and scale records.

It assigns values to steps, counts applied updates, and detects a run that only overflows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mptrain.engine.observer import OverflowHistory, boundary, nonfinite_parameters
from mptrain.engine.ring import HostValues
from mptrain.system.records import OverflowRecord, ScaleRecord, StepRecord, nonfinite_kind

if TYPE_CHECKING:
    from mptrain.engine.options import LogOptions
    from mptrain.engine.ring import Ring
    from mptrain.engine.step import Learner
    from mptrain.runlog.record_writer import Sink


#: Fields of the step record that are values of the step.
_RECORDED = tuple(
    field.name for field in fields(StepRecord) if field.name in HostValues._fields and field.name != "applied_norm"
)
_recorded = attrgetter(*_RECORDED)


class LearnerLog:
    """Log of the training steps of one learner, whose values reach the host through a ring.

    ``parameters`` are names in the order of the norms. ``floor`` is the lowest loss scale that the scaler can reach;
    ``measures`` is True if it also lowers the scale for finite gradients.

    ``updates`` and ``skipped`` count applied and skipped updates in the steps read so far. ``history`` assigns phases
    to overflows. ``last`` is the newest step record; None before the first. ``finite_losses`` are the first and newest
    finite loss of the steps read in this process.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[str],
        ring: Ring,
        *,
        floor: float = 0.0,
        measures: bool = False,
        buffers: int = 0,
    ) -> None:
        self.name = name
        self.ring = ring
        self.updates = 0
        self.skipped = 0
        self.history = OverflowHistory(floor=floor)
        self.last: StepRecord | None = None
        self.finite_losses: tuple[float, ...] = ()
        self._measures = measures
        self._parameters = parameters
        self._buffers = buffers

    @classmethod
    def of(cls, learner: Learner, ring: Ring, buffers: int) -> LearnerLog:
        """Return the log of a learner of a run, whose model has ``buffers`` that skipped steps restore."""
        scaler, names = learner.scaler, learner.weights.names
        return cls(learner.name, names, ring, floor=scaler.floor, measures=scaler.measure is not None, buffers=buffers)

    def digest(self, step: int, epoch: int, row: HostValues, sink: Sink) -> None:
        """Write the records of a step whose values have reached the host."""
        self.record(step, epoch, row, sink)

    def record(
        self,
        step: int,
        epoch: int,
        row: HostValues,
        sink: Sink,
        *,
        loss_known: bool = True,
        applied_known: bool = False,
    ) -> None:
        """Write a step record, an overflow record on overflow, and a scale record if the loss scale changed.

        Without ``loss_known`` the loss is NaN because nobody has told it, not because it was not finite.
        With ``applied_known`` the norm of the gradients as applied is on record, too.
        """
        skipped = bool(row.skip)
        self.updates += not skipped
        self.skipped += skipped
        self.last = StepRecord(
            learner=self.name,
            step=step,
            updates=self.updates,
            epoch=epoch,
            overflow=row.overflow,
            skipped=skipped,
            applied_norm=row.applied_norm if applied_known else None,
            **dict(zip(_RECORDED, _recorded(row), strict=True)),
        )
        sink.take(self.last)
        if math.isfinite(row.loss):
            self.finite_losses = (*self.finite_losses[:1], row.loss)
        phase = self.history.observe(
            overflow=row.overflow,
            loss=row.loss if loss_known else 0.0,
            scale=row.loss_scale,
            next_scale=row.next_scale,
        )
        if phase is not None:
            count, tensors = nonfinite_parameters(self._parameters, row.norms)
            sink.take(
                OverflowRecord(
                    learner=self.name,
                    step=step,
                    loss_scale=row.loss_scale,
                    phase=phase,
                    loss=(nonfinite_kind(row.loss) or "finite") if loss_known else "unknown",
                    tensors=tensors,
                    count=count,
                    skipped=skipped,
                    restored=self._buffers if skipped else 0,
                    boundary=boundary(self._parameters, row.norms),
                )
            )
        if row.next_scale != row.loss_scale:
            sink.take(ScaleRecord(self.name, step, row.loss_scale, row.next_scale, self._why(row)))

    def _why(self, row: HostValues) -> str:
        """Return why the scale changed. A rule that measures gradients lowers it without an overflow."""
        if row.next_scale > row.loss_scale:
            return "growth"
        return "measured" if self._measures and not row.overflow else "overflow"

    def state_dict(self) -> dict[str, Any]:
        """Return update counts, overflow history and newest record as plain values, for a checkpoint."""
        return {
            "updates": self.updates,
            "refused": self.skipped,
            "history": self.history.state_dict(),
            "last": asdict(self.last) if self.last else None,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the saved state; the floor of the loss scale stays that of the present scaler."""
        self.updates = saved["updates"]
        self.skipped = saved["refused"]
        self.history = OverflowHistory.from_state(saved["history"], self.history.floor)
        self.last = StepRecord(**saved["last"]) if saved["last"] else None


class StepLog:
    """Log of all training steps of a run, which reads the values of all learners from the device periodically."""

    def __init__(self, learner_logs: list[LearnerLog], sink: Sink, options: LogOptions) -> None:
        self.learner_logs = learner_logs
        self._sink = sink
        self._options = options
        self._pending: list[tuple[int, int]] = []
        self._looked = time.monotonic()

    def note(self, step: int, epoch: int) -> None:
        """Assign the values just recorded to a step (from 1), and read values from the device if it is time."""
        self._pending.append((step, epoch))
        now = time.monotonic()
        # Not by the number of pending steps: it includes rows under way, and sending again would wait for them.
        if self.learner_logs[0].ring.full or now - self._looked >= self._options.seconds:
            self.request_rows()
        elif self.learner_logs[0].ring.arrived:
            self._digest(wait=False)

    def request_rows(self) -> None:
        """Start copying recorded values to the host, and write the records of those that have arrived (on a CPU, all).

        It may wait for the previous copy, so call it rarely.
        """
        self._looked = time.monotonic()
        for log in self.learner_logs:
            log.ring.send()
        if self.learner_logs[0].ring.arrived:
            self._digest(wait=False)

    def flush(self) -> None:
        """Wait for the device and write the records of all steps so far."""
        self._digest(wait=True)

    def may_reach_limit(self, limit: int) -> bool:
        """Return whether the next step may complete ``limit`` consecutive overflows, if all unread ones are."""
        return self._possibly_in_a_row() + 1 >= limit

    def over_overflow_limit(self, limit: int) -> LearnerLog | None:
        """Return the log of a learner whose last ``limit`` steps all overflowed, or None.

        It waits for the device only if the unread steps may complete such a sequence. A healthy run therefore never
        waits as long as ``limit`` exceeds the capacity of the rings.
        """
        if self._possibly_in_a_row() < limit:
            return None
        self.flush()
        return next((log for log in self.learner_logs if log.history.consecutive >= limit), None)

    def _possibly_in_a_row(self) -> int:
        return max([log.history.consecutive + log.ring.unread for log in self.learner_logs])

    def _digest(self, *, wait: bool) -> None:
        rows = [log.ring.take(wait=wait) for log in self.learner_logs]
        # A step that an exception interrupted has rows, but was never noted.
        count = min(len(self._pending), *(len(taken) for taken in rows))
        for log, taken in zip(self.learner_logs, rows, strict=True):
            log.ring.give_back(taken[count:])
        noted, self._pending = self._pending[:count], self._pending[count:]  # first, because the sink may fail
        for (step, epoch), *row in zip(noted, *(taken[:count] for taken in rows), strict=True):
            for log, values in zip(self.learner_logs, row, strict=True):
                log.digest(step, epoch, values, self._sink)
