"""Reads the histograms of a run into what a report shows, in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mptrain.errors import StorageError
from mptrain.numerics.exponents import ExponentTails, headroom, lost_share, merged, nonzero, subnormal_share, zero_share
from mptrain.numerics.forecast import Forecast, GradientHistory

if TYPE_CHECKING:
    from mptrain.records import ExponentCounts, HistogramRecord, StepRecord, TensorKind
    from mptrain.runlog.run_reader import Run

#: What a kind of tensor is called.
KINDS: Final[dict[TensorKind, str]] = {
    "activation_gradients": "activation gradients",
    "weight_gradients": "weight gradients",
    "activations": "activations",
    "weights": "weights",
    "updates": "updates",
}

#: The kinds that an overflow leaves without a meaning.
_GRADIENTS: Final = ("activation_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True)
class HistogramSummary:
    """One step that was looked at, in short.

    Attributes:
        step: The attempt.
        zeros: The share of the activation gradients that was zero, or is in FP16, as they were scaled.
        lost: The share of the nonzero ones that FP16 rounds to zero.
        subnormal: The share of the nonzero ones that FP16 holds with fewer bits.
        headroom: Doublings until the largest gradient leaves FP16; below 0 it has.
        updates: Elements that were to be changed.
        unchanged: Of those, the ones that stay as they are in FP16.
    """

    step: int
    zeros: float
    lost: float
    subnormal: float
    headroom: float
    updates: int
    unchanged: int


@dataclass
class LearnerHistograms:
    """One learner's histograms.

    Attributes:
        gradients: What a forecast needs.
        kinds: By kind and name, over all looks, as the device saw them; gradients of looks that overflowed left out.
        seen: Every look that did not overflow.
        overflowed: Steps of those that did.
        unchanged: By parameter: elements that were to be changed, and how many of them stay as they are in FP16.
        dtypes: By kind: what its tensors were kept in.
    """

    gradients: GradientHistory = field(default_factory=GradientHistory)
    kinds: dict[TensorKind, dict[str, ExponentCounts]] = field(default_factory=dict)
    seen: list[HistogramSummary] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)
    unchanged: dict[str, tuple[int, int]] = field(default_factory=dict)
    dtypes: dict[TensorKind, set[str]] = field(default_factory=dict)

    def add(self, record: HistogramRecord) -> None:
        """Take in one look."""
        self.gradients.add(record)
        for kind, named in record.tensors.items():
            self.dtypes.setdefault(kind, set()).update(counts.dtype for counts in named.values())
            if record.overflow and kind in _GRADIENTS:
                continue
            known = self.kinds.setdefault(kind, {})
            for name, counts in named.items():
                known[name] = merged([known[name], counts]) if name in known else counts
        for name, (moved, same) in record.unchanged.items():
            before = self.unchanged.get(name, (0, 0))
            self.unchanged[name] = (before[0] + moved, before[1] + same)
        if record.overflow:
            self.overflowed.append(record.step)
        else:
            self.seen.append(_seen(record))

    @property
    def sampled_steps(self) -> int:
        """Return how many steps were looked at."""
        return len(self.seen) + len(self.overflowed)

    def together(self, kind: TensorKind) -> ExponentCounts:
        """All tensors of a kind."""
        return merged(self.kinds.get(kind, {}).values())

    def unscaled_gradients(self) -> ExponentCounts:
        """All activation gradients without the loss scale."""
        return self.gradients.together

    def lost_unscaled(self) -> float:
        """The share of the nonzero ones that FP16 rounds to zero without a loss scale."""
        return lost_share(merged(self.gradients.activations.values()))


def _seen(record: HistogramRecord) -> HistogramSummary:
    together = merged(record.tensors.get("activation_gradients", {}).values())
    largest = max(
        (counts.largest for kind in _GRADIENTS for counts in record.tensors.get(kind, {}).values()), default=0.0
    )
    return HistogramSummary(
        step=record.step,
        zeros=zero_share(together),
        lost=lost_share(together),
        subnormal=subnormal_share(together),
        headroom=headroom(largest),
        updates=sum(moved for moved, _ in record.unchanged.values()),
        unchanged=sum(same for _, same in record.unchanged.values()),
    )


def read_histograms(run: Run, notes: list[str]) -> dict[str, LearnerHistograms]:
    """The histograms of a run by learner, as far as they can be read; empty where it has none.

    Args:
        run: The run.
        notes: Gets a sentence on what could not be read.
    """
    found: dict[str, LearnerHistograms] = {}
    try:
        for record in run.histograms():
            found.setdefault(record.learner, LearnerHistograms()).add(record)
    except StorageError as error:
        notes.append(f"{error}; what follows of the histograms is not in this report")
    return found


def forecasts(run: Run, histograms: dict[str, LearnerHistograms]) -> dict[str, Forecast]:
    """Return what follows from the histograms, by learner; damaged steps end what is known of the steps between."""
    return {name: one.gradients.forecast(_steps_of(run, name)) for name, one in histograms.items()}


def _steps_of(run: Run, learner: str) -> Iterator[StepRecord]:
    try:
        yield from (step for step in run.steps() if step.learner == learner)
    except StorageError:  # the report says so where it shows steps
        return


def worst_first(named: dict[str, ExponentCounts]) -> list[tuple[str, ExponentCounts]]:
    """Tensors with those in front that lose most of their magnitude in FP16, then those that lose precision."""

    def badness(item: tuple[str, ExponentCounts]) -> tuple[float, float, float]:
        tails = ExponentTails(item[1])
        return -tails.magnitude_below(-25), -tails.share_below(-25), -tails.share_below(-14)

    return sorted(((name, counts) for name, counts in named.items() if nonzero(counts)), key=badness)
