"""What the records of a run tell about gradients at loss scales that it did not use.

A step that was clean at one scale is clean at every lower one; one that overflowed does so at every higher one, and at
all of them where its loss was not finite. For everything else the run has to have looked: histograms know the largest
gradient of a step, and so the scale at which it leaves FP16. Steps between two looks are taken like the nearest one. A
run without histograms leaves the verdicts of neighbouring steps at other scales.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mptrain.numerics.exponents import INFINITE_FROM, TINIEST, total
from mptrain.numerics.measures import LargestMagnitude, Measure, ShareAbove

if TYPE_CHECKING:
    from mptrain.records import ExponentCounts, HistogramRecord, StepRecord
    from mptrain.runlog.reader import Run

#: Where an answer comes from: the step's own records; those of a step nearby; neither, so that the recorded verdict is
#: taken over to the other scale.
Basis = Literal["known", "estimated", "assumed"]


@dataclass(frozen=True)
class Look:
    """The gradients of one clean step that was looked at.

    Attributes:
        step: Which.
        loss_scale: The scale that they carried.
        limit: The scale from which on some gradient leaves FP16; inf where there is none.
        weights: The exponents of the parameters' gradients, scaled; one for each parameter.
    """

    step: int
    loss_scale: float
    limit: float
    weights: tuple[ExponentCounts, ...]

    def overflows(self, scale: float) -> bool:
        """Whether a gradient would leave FP16 at that scale."""
        return scale > self.loss_scale and scale >= self.limit

    def largest(self, scale: float) -> float:
        """The largest |g| of the parameters' gradients at that scale."""
        found = max((counts.largest for counts in self.weights), default=0.0)
        return found if scale == self.loss_scale else found / self.loss_scale * scale

    def share_above(self, edge: float, scale: float) -> float:
        """The share of the parameters' gradients above an edge at that scale, from counts of whole powers of two."""
        elements = sum(total(counts) for counts in self.weights)
        above = math.fsum(_count_above(counts, edge * self.loss_scale / scale) for counts in self.weights)
        return above / elements if elements else 0.0


class Trace:
    """What is on record of one learner's steps; they are added in order."""

    def __init__(self) -> None:
        self.looked_at = 0
        self._looks = _Nearest()
        self._clean = _Nearest()
        self._overflowed = _Nearest()

    def add(self, record: StepRecord) -> None:
        """Take in a step."""
        if not record.overflow:
            self._clean.add(record.step, record.loss_scale)
        elif math.isfinite(record.loss) and record.loss_scale > 0:
            self._overflowed.add(record.step, record.loss_scale)

    def look(self, record: HistogramRecord) -> None:
        """Take in what histograms say of a step; where inf or NaN is among them, nothing about the largest gradient."""
        self.looked_at += 1
        look = _look(record)
        if look is not None:
            self._looks.add(record.step, look)

    def would_overflow(self, record: StepRecord, scale: float) -> tuple[bool, Basis]:
        """Whether a step would have overflowed at some scale, and how that is known."""
        if scale == record.loss_scale:
            return record.overflow, "known"
        if scale == 0 or (record.overflow and not math.isfinite(record.loss)):
            return True, "known"
        if record.loss_scale > 0 and record.overflow == (scale > record.loss_scale):
            return record.overflow, "known"
        look: Look | None = self._looks.to(record.step)
        if look is not None:
            return look.overflows(scale), "known" if look.step == record.step else "estimated"
        # Clean at a lower scale, or overflowed at a higher one, and asked about what lies between: its neighbours know.
        neighbour: float | None = (self._clean if record.overflow else self._overflowed).to(record.step)
        if neighbour is not None and (scale <= neighbour if record.overflow else scale >= neighbour):
            return not record.overflow, "estimated"
        return record.overflow, "assumed"

    def measured(self, measure: Measure, step: int, scale: float) -> tuple[float, Basis] | None:
        """What a rule would have measured at a clean step; None where the records cannot tell."""
        look: Look | None = self._looks.to(step)
        if look is None:
            return None
        basis: Basis = "known" if look.step == step else "estimated"
        if isinstance(measure, LargestMagnitude):
            return look.largest(scale), basis
        if isinstance(measure, ShareAbove):
            return look.share_above(measure.edge, scale), basis
        return None

    def tells_gradients(self) -> bool:
        """Whether it has histograms of any step that did not overflow."""
        return self._looks.to(1) is not None


class _Nearest:
    """Values by step; gives that of the nearest one."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[Any] = []

    def add(self, step: int, value: Any) -> None:
        self._steps.append(step)
        self._values.append(value)

    def to(self, step: int) -> Any:
        """The value of the step closest to one, the earlier of two; None where there is none."""
        at = bisect_left(self._steps, step)
        around = range(max(at - 1, 0), min(at + 1, len(self._steps)))
        return self._values[min(around, key=lambda place: abs(self._steps[place] - step))] if around else None


def read_traces(run: Run) -> dict[str, Trace]:
    """What the records of a run tell about each of its learners.

    Raises:
        StorageError: A record is damaged.
    """
    found: dict[str, Trace] = {}
    for record in run.steps():
        found.setdefault(record.learner, Trace()).add(record)
    for histogram in run.histograms():
        found.setdefault(histogram.learner, Trace()).look(histogram)
    return found


def _look(record: HistogramRecord) -> Look | None:
    weights = tuple(record.tensors.get("weight_gradients", {}).values())
    gradients = [*record.tensors.get("activation_gradients", {}).values(), *weights]
    if record.overflow or record.loss_scale <= 0 or any(counts.inf or counts.nan for counts in gradients):
        return None
    largest = max((counts.largest for counts in gradients if _was_half(counts)), default=0.0)
    limit = INFINITE_FROM * record.loss_scale / largest if largest else math.inf
    return Look(record.step, record.loss_scale, limit, weights)


def _was_half(counts: ExponentCounts) -> bool:
    """Whether the values were FP16 numbers on their way.

    Gradients of FP32 parameters under autocast, and FP32 sums of half gradients, are kept as FP32; what came through FP16
    has nothing below its smallest number.
    """
    return counts.dtype == "float16" or (counts.dtype == "float32" and bool(counts.counts) and counts.lowest >= TINIEST)


def _count_above(counts: ExponentCounts, edge: float) -> float:
    """How many values are above an edge: of the power of two that it lies in a part, at least 1 where the largest is."""
    if counts.largest <= edge:
        return float(counts.inf + counts.nan)
    if edge <= 0:
        return float(sum(counts.counts) + counts.inf + counts.nan)
    exponent = math.frexp(edge)[1] - 1
    place = exponent - counts.lowest
    beyond = sum(counts.counts[max(place + 1, 0) :])
    within = counts.counts[place] if 0 <= place < len(counts.counts) else 0
    part = within * (2.0 - edge / 2.0**exponent)
    return counts.inf + counts.nan + max(beyond + part, 1.0)
