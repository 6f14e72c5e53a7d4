"""Summary of a run's exponent histograms for its report, read in one pass and in bounded memory.

An exponent histogram counts a tensor's values x by floor(log2 |x|). A sampled step is a step with histograms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mptrain.numerics.exponents import (
    ExponentTails,
    headroom,
    is_half,
    lost_share,
    merged,
    nonzero,
    subnormal_share,
    unseen_magnitude,
    zero_share,
)
from mptrain.numerics.forecast import Forecast, GradientHistory
from mptrain.system.errors import StorageError

if TYPE_CHECKING:
    from mptrain.runlog.run_reader import Run
    from mptrain.system.records import ExponentCounts, HistogramRecord, StepRecord, TensorKind

#: Name of each kind of tensor in the report.
KINDS: Final[dict[TensorKind, str]] = {
    "activation_gradients": "activation gradients",
    "weight_gradients": "weight gradients",
    "activations": "activations",
    "weights": "weights",
    "updates": "updates",
}

#: The kinds that are meaningless at a step that overflowed.
GRADIENTS: Final = ("activation_gradients", "weight_gradients")


@dataclass(frozen=True, slots=True)
class HistogramSummary:
    """Shares of zero and subnormal gradients at one step with exponent histograms, and its ineffective updates.

    Activation gradients are gradients at module outputs, scaled by the loss scale as in the run.

    Attributes:
        zeros: Share of the activation gradients, as scaled, that are zero or round to zero in FP16.
        subnormal: Share of the nonzero activation gradients that are subnormal in FP16.
        headroom: Doublings until the largest gradient overflows FP16; negative if it already overflows.
        updates: Number of weight elements with a nonzero update.
        unchanged: Number of those elements whose value the update would not change in FP16.
    """

    step: int
    zeros: float
    subnormal: float
    headroom: float
    updates: int
    unchanged: int


@dataclass
class LearnerHistograms:
    """Exponent histograms of one learner, merged over all sampled steps.

    Attributes:
        gradients: The gradient history that a forecast of loss scales needs.
        kinds: Counts by kind and tensor name over all sampled steps, as the device saw them. Gradients of steps that
            overflowed are left out.
        seen: Summaries of the sampled steps that did not overflow.
        overflowed: Numbers of the sampled steps that overflowed.
        unchanged: By parameter, the elements with a nonzero update and how many of them would not change in FP16.
        sampled: Number of elements looked at, of each parameter of which not all were, as in `HistogramRecord`.
    """

    gradients: GradientHistory = field(default_factory=GradientHistory)
    kinds: dict[TensorKind, dict[str, ExponentCounts]] = field(default_factory=dict)
    seen: list[HistogramSummary] = field(default_factory=list)
    overflowed: list[int] = field(default_factory=list)
    unchanged: dict[str, tuple[int, int]] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)

    def add(self, record: HistogramRecord) -> None:
        """Add the histograms of one step."""
        self.gradients.add(record)
        for kind, named in record.tensors.items():
            if record.overflow and kind in GRADIENTS:
                continue
            known = self.kinds.setdefault(kind, {})
            for name, counts in named.items():
                known[name] = merged([known[name], counts]) if name in known else counts
        self.sampled |= record.sampled
        for name, (moved, same) in record.unchanged.items():
            before = self.unchanged.get(name, (0, 0))
            self.unchanged[name] = (before[0] + moved, before[1] + same)
        if record.overflow:
            self.overflowed.append(record.step)
        else:
            self.seen.append(_seen(record))

    def together(self, kind: TensorKind) -> ExponentCounts:
        """Return one histogram of all tensors of a kind, such as ``weights``, over all sampled steps."""
        return merged(self.kinds.get(kind, {}).values())

    def unscaled_gradients(self) -> ExponentCounts:
        """Return one histogram of all activation gradients, divided by the loss scale."""
        return self.gradients.together

    def lost_unscaled(self) -> float:
        """Return the share of nonzero activation gradients that FP16 rounds to zero without a loss scale, 0 to 1."""
        return lost_share(merged(self.gradients.activations.values()))


def _seen(record: HistogramRecord) -> HistogramSummary:
    together = merged(record.tensors.get("activation_gradients", {}).values())
    largest = max(
        (counts.largest for kind in GRADIENTS for counts in record.tensors.get(kind, {}).values()), default=0.0
    )
    return HistogramSummary(
        step=record.step,
        zeros=zero_share(together),
        subnormal=subnormal_share(together),
        headroom=headroom(largest),
        updates=sum(moved for moved, _ in record.unchanged.values()),
        unchanged=sum(same for _, same in record.unchanged.values()),
    )


def read_histograms(run: Run, notes: list[str]) -> dict[str, LearnerHistograms]:
    """Read the exponent histograms of a run, merged by learner; empty if the run has none.

    At a damaged record, reading stops and ``notes`` receives a sentence.
    """
    found: dict[str, LearnerHistograms] = {}
    try:
        for record in run.histograms():
            found.setdefault(record.learner, LearnerHistograms()).add(record)
    except StorageError as error:
        notes.append(f"{error}; later histograms are not in this report")
    return found


def forecasts(run: Run, histograms: dict[str, LearnerHistograms]) -> dict[str, Forecast]:
    """Return the forecast of static loss scales for each learner of a run, by name, up to a damaged step record."""
    return {name: one.gradients.forecast(_steps_of(run, name)) for name, one in histograms.items()}


def _steps_of(run: Run, learner: str) -> Iterator[StepRecord]:
    try:
        yield from (step for step in run.steps() if step.learner == learner)
    except StorageError:  # reported where the report shows steps
        return


def unseen_share(counts: ExponentCounts) -> float:
    """Return the largest share of an FP16 gradient's magnitude that its zeros may have had; 0 for other dtypes."""
    return ExponentTails(counts, unseen_magnitude(counts)).unseen_share if is_half(counts) else 0.0


def worst_first(named: dict[str, ExponentCounts], half: bool = False) -> list[tuple[str, ExponentCounts]]:
    """Sort tensors by the share of their magnitude that they lose in FP16, then by lost precision, worst first.

    If they are gradients of an FP16 run (``half``), what zeros may have been is lost too, so those with zeros alone
    come first. Other tensors without a nonzero value are left out.
    """

    def badness(item: tuple[str, ExponentCounts]) -> tuple[float, float, float]:
        tails = ExponentTails(item[1])
        lost = max(unseen_share(item[1]) if half else 0.0, tails.magnitude_below(-25))
        return -lost, -tails.share_below(-25), -tails.share_below(-14)

    shown = ((name, one) for name, one in named.items() if nonzero(one) or (half and one.zeros))
    return sorted(shown, key=badness)
