"""Prediction from a run's records of whether its steps overflow at loss scales that the run did not use.

An FP16 step that is clean (without overflow) at one scale is clean at every lower one. A step that overflows does so at
every higher one, and at every scale if its loss is not finite. All other cases need histograms: they record the largest
gradient of a step, and hence the scale at which it exceeds FP16. For a step without a histogram it is estimated from
the nearest histograms and from the gradient norm (`mptrain.numerics.exponents`). Without histograms, the outcomes of
neighbouring steps at other scales are used. From a run in a wider format, outcomes in FP16 are always estimates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

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
from mptrain.numerics.overflow_check import LargestMagnitude, Measure, ShareAbove
from mptrain.runlog.run_reader import Run
from mptrain.system.machine import dropping_nothing
from mptrain.system.records import ExponentCounts, HistogramRecord, StepRecord

#: Basis of an answer. ``known``: the step's own records. ``estimated``: records of nearby steps, or of another format.
#: ``unknown``: neither; the answer is the recorded outcome, which tells nothing about the other scale.
Basis = Literal["known", "estimated", "unknown"]


@dataclass(frozen=True)
class CleanStep:
    """Gradient histograms of one training step without overflow, which tell its outcome at other loss scales.

    Attributes:
        step: Number of the step.
        loss_scale: Loss scale of the gradients.
        extreme: Magnitude of the largest of the gradients that can overflow in FP16, without the loss scale.
        weights: Exponent counts of the scaled gradient of each parameter.
    """

    step: int
    loss_scale: float
    extreme: LargestGradient
    weights: tuple[ExponentCounts, ...]

    def overflows(self, scale: float) -> tuple[bool, Basis]:
        """Return whether a gradient of the step would overflow FP16 at another loss scale, and the basis of the answer.

        The basis is ``estimated`` if an FP32 tensor decides that may have passed through FP16, otherwise ``known``.
        """
        certain, all_in_all = (
            largest * scale >= INFINITE_FROM for largest in (self.extreme.certain, self.extreme.value)
        )
        return certain or all_in_all, "known" if certain or not all_in_all else "estimated"

    def largest(self, scale: float) -> float:
        """Return the largest magnitude of the scaled parameter gradients in this step at loss scale ``scale``."""
        return self._largest if scale == self.loss_scale else self._largest / self.loss_scale * scale

    def share_above(self, edge: float, scale: float) -> float:
        """Return the share of the parameters' scaled gradients above a magnitude, as it would be at a loss scale.

        Histograms have one count per power of two, so the share is interpolated between them.
        """
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
    """Records of all steps of one learner, which predict overflows at other loss scales.

    Add histograms first, then the steps in order.

    Args:
        half: Whether the run computed in FP16, so that its own overflow checks are those of FP16.

    Attributes:
        looked_at: Number of steps with histograms, usable or not.
    """

    def __init__(self, half: bool = True) -> None:
        self.looked_at = 0
        self._half = half
        self._looks = _Nearest()
        self._anchors: list[HistogramSample] = []
        self._clean = _Nearest()
        self._overflowed = _Nearest()

    def add(self, record: StepRecord) -> None:
        """Add the record of a training step: its loss scale, gradient norm and overflow."""
        if not record.overflow:
            look: CleanStep | None = self._looks.at(record.step)
            if look and (sample := sample_at(record.step, look.extreme.value, record.grad_norm)):
                self._anchors.append(sample)
            self._clean.add(record.step, record.loss_scale)
        elif math.isfinite(record.loss) and record.loss_scale > 0:
            self._overflowed.add(record.step, record.loss_scale)

    def add_histograms(self, record: HistogramRecord) -> None:
        """Add the gradient histograms of a step. Those of a step with inf or NaN are counted but not used."""
        self.looked_at += 1
        look = _clean_step(record)
        if look is not None:
            self._looks.add(record.step, look)

    def would_overflow(self, record: StepRecord, scale: float) -> tuple[bool, Basis]:
        """Return whether a recorded step would have overflowed at a loss scale, and the basis of the answer.

        The basis is ``known`` from the step's own records, ``estimated`` from nearby steps or another format, or
        ``unknown``. An unknown answer is the recorded outcome.
        """
        if scale == 0 or (record.overflow and not math.isfinite(record.loss)):
            return True, "known"
        if not self._half:
            return self._in_half(record, scale)
        if scale == record.loss_scale:
            return record.overflow, "known"
        # An overflow stays one at every higher scale, and a clean step stays clean at every lower one.
        if record.loss_scale > 0 and record.overflow == (scale > record.loss_scale):
            return record.overflow, "known"
        look: CleanStep | None = self._looks.at(record.step)
        if look is not None:
            return look.overflows(scale)
        largest = self._between(record)
        if largest is not None:
            return largest * scale >= INFINITE_FROM, "estimated"
        # The step was clean at a lower scale, or overflowed at a higher one: use the outcomes of neighbouring steps.
        neighbour: float | None = (self._clean if record.overflow else self._overflowed).to(record.step)
        if neighbour is not None and (scale <= neighbour if record.overflow else scale >= neighbour):
            return not record.overflow, "estimated"
        return record.overflow, "unknown"

    def _in_half(self, record: StepRecord, scale: float) -> tuple[bool, Basis]:
        """Estimate whether a step of a run in a wider format than FP16 would overflow in FP16 at a loss scale."""
        if record.overflow and 0 < record.loss_scale <= scale:
            return True, "estimated"
        look: CleanStep | None = self._looks.at(record.step)
        largest = look.extreme.value if look else self._between(record)
        return (record.overflow, "unknown") if largest is None else (largest * scale >= INFINITE_FROM, "estimated")

    def _between(self, record: StepRecord) -> float | None:
        """Return the largest unscaled gradient of a step without a histogram; None if no step has a histogram."""
        if not record.grad_norm:
            return 0.0
        return largest_at_step(self._anchors, record.step, record.grad_norm) if self._anchors else None

    def measured(self, measure: Measure, step: int, scale: float) -> tuple[float, Basis] | None:
        """Return the measurement of gradients that a scaler requests, as it would be at a loss scale, and its basis.

        It is taken from the histograms of the step, which has no overflow, or of the nearest step that has some. The
        basis is ``known`` or ``estimated``. None without histograms, or if they cannot tell it.
        """
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
        """Return whether any step without overflow has usable gradient histograms."""
        return self._looks.to(1) is not None


class _Nearest:
    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[Any] = []

    def add(self, step: int, value: Any) -> None:
        self._steps.append(step)
        self._values.append(value)

    def at(self, step: int) -> Any:
        index = bisect_left(self._steps, step)
        return self._values[index] if index < len(self._steps) and self._steps[index] == step else None

    def to(self, step: int) -> Any:
        """Return the value of the nearest step, the earlier of two; None if there are no values."""
        steps, at = self._steps, bisect_left(self._steps, step)
        if at and (at == len(steps) or step - steps[at - 1] <= steps[at] - step):
            at -= 1
        return self._values[at] if steps else None


def read_traces(run: Run, half: bool) -> tuple[dict[str, Trace], list[StepRecord]]:
    """Read the records and histograms of a run once; return a `Trace` for each learner, and all step records in order.

    ``half`` says whether the run computed in FP16. Raises StorageError if a record is damaged.
    """
    traces: dict[str, Trace] = {}
    for histogram in run.histograms():
        traces.setdefault(histogram.learner, Trace(half)).add_histograms(histogram)
    with dropping_nothing():
        steps = list(run.steps())
    for record in steps:
        if record.learner not in traces:
            traces[record.learner] = Trace(half)
        traces[record.learner].add(record)
    return traces, steps


def _clean_step(record: HistogramRecord) -> CleanStep | None:
    weights = tuple(record.tensors.get("weight_gradients", {}).values())
    gradients = [*record.tensors.get("activation_gradients", {}).values(), *weights]
    usable = 0 < record.loss_scale < math.inf
    if record.overflow or not usable or any(counts.inf or counts.nan for counts in gradients):
        return None
    return CleanStep(record.step, record.loss_scale, largest_of(gradients_of(record), record.loss_scale), weights)


def _count_above(counts: ExponentCounts, edge: float) -> float:
    """Estimate the number of values above an edge; those in the same power of two count in proportion."""
    if counts.largest <= edge:
        return float(counts.inf + counts.nan)
    if edge <= 0:
        return float(sum(counts.counts) + counts.inf + counts.nan)
    exponent = math.frexp(edge)[1] - 1
    index = exponent - counts.lowest
    beyond = sum(counts.counts[max(index + 1, 0) :])
    within = counts.counts[index] if 0 <= index < len(counts.counts) else 0
    part = within * (2.0 - edge / 2.0**exponent)
    # At least one is above the edge: the largest.
    return counts.inf + counts.nan + max(beyond + part, 1.0)
