"""Records of a run as evidence of gradients at loss scales that it did not use.

A step of FP16 that was clean at one scale is clean at every lower one; one that overflowed does so at every higher one, and
at all of them where its loss was not finite. For everything else the run has to have looked: histograms know the largest
gradient of a step, and so the scale at which it leaves FP16. That of a step between two looks follows from them and from
the norm of its gradients, as a forecast takes it (`mptrain.numerics.exponents`). A run without histograms leaves the verdicts
of neighbouring steps at other scales. What a run in a wider format says of FP16 is never known, only estimated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from mptrain.machine import dropping_nothing
from mptrain.numerics.exponents import (
    INFINITE_FROM,
    HistogramSample,
    LargestGradient,
    gradients_of,
    largest_at_step,
    largest_of,
    sample_at,
    total,
)
from mptrain.numerics.measures import LargestMagnitude, Measure, ShareAbove
from mptrain.records import ExponentCounts, HistogramRecord, StepRecord
from mptrain.runlog.run_reader import Run

#: Where an answer comes from: the step's own records; those of steps nearby, or of another format; neither, so that it is the recorded
#: verdict, which says nothing of the other scale.
Basis = Literal["known", "estimated", "unknown"]


@dataclass(frozen=True)
class CleanStep:
    """The gradients of one clean step that was looked at.

    Attributes:
        step: Which.
        loss_scale: The scale that they carried.
        extreme: The largest of all that FP16 judges.
        weights: The exponents of the parameters' gradients, scaled; one for each parameter.
    """

    step: int
    loss_scale: float
    extreme: LargestGradient
    weights: tuple[ExponentCounts, ...]

    def overflows(self, scale: float) -> tuple[bool, Basis]:
        """Return whether a gradient would leave FP16 at that scale; known where it does not depend on what came through FP16."""
        certain, all_in_all = (
            largest * scale >= INFINITE_FROM for largest in (self.extreme.certain, self.extreme.value)
        )
        return certain or all_in_all, "known" if certain or not all_in_all else "estimated"

    def largest(self, scale: float) -> float:
        """The largest |g| of the parameters' gradients at that scale."""
        return self._largest if scale == self.loss_scale else self._largest / self.loss_scale * scale

    def share_above(self, edge: float, scale: float) -> float:
        """The share of the parameters' gradients above an edge at that scale, from counts of whole powers of two."""
        edge = edge * self.loss_scale / scale
        if edge not in self._shares:
            above = math.fsum(_count_above(counts, edge) for counts in self.weights)
            self._shares[edge] = above / self._elements if self._elements else 0.0
        return self._shares[edge]

    @cached_property
    def _largest(self) -> float:
        return max((counts.largest for counts in self.weights), default=0.0)

    @cached_property
    def _elements(self) -> int:
        return sum(total(counts) for counts in self.weights)

    @cached_property
    def _shares(self) -> dict[float, float]:
        return {}


class Trace:
    """Records of one learner's steps; they are added in order, and what was looked at before all steps.

    Args:
        half: Whether the run computed in FP16, so that its own verdicts are those of FP16.
    """

    def __init__(self, half: bool = True) -> None:
        self.looked_at = 0
        self._half = half
        self._looks = _Nearest()
        self._anchors: list[HistogramSample] = []
        self._clean = _Nearest()
        self._overflowed = _Nearest()

    def add(self, record: StepRecord) -> None:
        """Take in a step."""
        if not record.overflow:
            look: CleanStep | None = self._looks.at(record.step)
            if look and (found := sample_at(record.step, look.extreme.value, record.grad_norm)):
                self._anchors.append(found)
            self._clean.add(record.step, record.loss_scale)
        elif math.isfinite(record.loss) and record.loss_scale > 0:
            self._overflowed.add(record.step, record.loss_scale)

    def add_histograms(self, record: HistogramRecord) -> None:
        """Take in what histograms say of a step; where inf or NaN is among them, nothing about the largest gradient."""
        self.looked_at += 1
        look = _clean_step(record)
        if look is not None:
            self._looks.add(record.step, look)

    def would_overflow(self, record: StepRecord, scale: float) -> tuple[bool, Basis]:
        """Return whether a step would have overflowed at some scale, and how that is known."""
        if scale == 0 or (record.overflow and not math.isfinite(record.loss)):
            return True, "known"
        if not self._half:
            return self._in_half(record, scale)
        if scale == record.loss_scale:
            return record.overflow, "known"
        if record.loss_scale > 0 and record.overflow == (scale > record.loss_scale):
            return record.overflow, "known"
        look: CleanStep | None = self._looks.at(record.step)
        if look is not None:
            return look.overflows(scale)
        largest = self._between(record)
        if largest is not None:
            return largest * scale >= INFINITE_FROM, "estimated"
        # Clean at a lower scale, or overflowed at a higher one, and asked about what lies between: its neighbours know.
        neighbour: float | None = (self._clean if record.overflow else self._overflowed).to(record.step)
        if neighbour is not None and (scale <= neighbour if record.overflow else scale >= neighbour):
            return not record.overflow, "estimated"
        return record.overflow, "unknown"

    def _in_half(self, record: StepRecord, scale: float) -> tuple[bool, Basis]:
        """Estimate the verdict of FP16 on a step in a wider format, whose own verdict says little of that."""
        if record.overflow and 0 < record.loss_scale <= scale:
            return True, "estimated"
        look: CleanStep | None = self._looks.at(record.step)
        largest = look.extreme.value if look else self._between(record)
        return (record.overflow, "unknown") if largest is None else (largest * scale >= INFINITE_FROM, "estimated")

    def _between(self, record: StepRecord) -> float | None:
        """The largest gradient of a step that was not looked at, without its scale; None where no step was."""
        if not record.grad_norm:
            return 0.0
        return largest_at_step(self._anchors, record.step, record.grad_norm) if self._anchors else None

    def measured(self, measure: Measure, step: int, scale: float) -> tuple[float, Basis] | None:
        """Return the measurement of a rule at a clean step, by the nearest look; None where the records cannot tell."""
        look: CleanStep | None = self._looks.to(step)
        if look is None:
            return None
        basis: Basis = "known" if look.step == step and self._half else "estimated"
        if isinstance(measure, LargestMagnitude):
            return look.largest(scale), basis
        if isinstance(measure, ShareAbove):
            return look.share_above(measure.edge, scale), basis
        return None

    def tells_gradients(self) -> bool:
        """Return whether it has histograms of any step that did not overflow."""
        return self._looks.to(1) is not None


class _Nearest:
    """Values by step; gives that of the nearest one."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[Any] = []

    def add(self, step: int, value: Any) -> None:
        self._steps.append(step)
        self._values.append(value)

    def at(self, step: int) -> Any:
        """The value of a step; None where it has none."""
        place = bisect_left(self._steps, step)
        return self._values[place] if place < len(self._steps) and self._steps[place] == step else None

    def to(self, step: int) -> Any:
        """The value of the step closest to one, the earlier of two; None where there is none."""
        steps, at = self._steps, bisect_left(self._steps, step)
        if at and (at == len(steps) or step - steps[at - 1] <= steps[at] - step):
            at -= 1
        return self._values[at] if steps else None


def read_traces(run: Run, half: bool) -> tuple[dict[str, Trace], list[StepRecord]]:
    """Return what the records of a run tell about each of its learners, and its steps, which are read once.

    Args:
        run: The run.
        half: Whether it computed in FP16.

    Raises:
        StorageError: A record is damaged.
    """
    found: dict[str, Trace] = {}
    for histogram in run.histograms():
        found.setdefault(histogram.learner, Trace(half)).add_histograms(histogram)
    with dropping_nothing():
        steps = list(run.steps())
    for record in steps:
        if record.learner not in found:
            found[record.learner] = Trace(half)
        found[record.learner].add(record)
    return found, steps


def _clean_step(record: HistogramRecord) -> CleanStep | None:
    weights = tuple(record.tensors.get("weight_gradients", {}).values())
    gradients = [*record.tensors.get("activation_gradients", {}).values(), *weights]
    usable = 0 < record.loss_scale < math.inf
    if record.overflow or not usable or any(counts.inf or counts.nan for counts in gradients):
        return None
    return CleanStep(record.step, record.loss_scale, largest_of(gradients_of(record), record.loss_scale), weights)


def _count_above(counts: ExponentCounts, edge: float) -> float:
    """Count the values above an edge: of the power of two that it lies in a part, at least 1 where the largest is."""
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
