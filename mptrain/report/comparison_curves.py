"""The curves of a comparison: losses, metrics and loss scales of all arms over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mptrain.comparison.results import Comparison
from mptrain.report.comparison_figures import arms_figure
from mptrain.report.curves import Curve
from mptrain.report.history import LearnerHistory, Overflows
from mptrain.report.page import Block, Plot, Text, plots
from mptrain.report.run_parts import OpenedRun
from mptrain.report.scale_figures import Panel, loss_scale_figure

#: Panels of one figure of loss scales.
_MOST_PANELS: Final = 8


@dataclass(frozen=True)
class ArmRuns:
    """The records of an arm: its opened runs, and what could not be read of them."""

    name: str
    runs: tuple[OpenedRun, ...]
    problems: tuple[str, ...]

    def learners(self) -> list[LearnerHistory]:
        """The first learner of every run."""
        return [next(iter(run.history.learners.values())) for run in self.runs if run.history.learners]

    def metric(self, name: str) -> list[Curve]:
        """A metric on validation data over steps, of every run that has it."""
        found = [run.history.evaluations.get("val", {}).get(name) for run in self.runs]
        return [curve for curve in found if curve is not None]

    def panel(self) -> Panel | None:
        """Its loss scales with their overflows, where they moved or overflowed; None otherwise."""
        curves = [learner.loss_scale for learner in self.learners()]
        overflows: list[Overflows] = []
        for run in self.runs:
            first = next(iter(run.history.learners), "")
            overflows += [run.history.overflows[first]] if first in run.history.overflows else []
        values = {value for curve in curves for value in curve.finite()}
        return Panel(self.name, curves, overflows) if len(values) > 1 else None


def curve_blocks(
    comparison: Comparison, arms: Sequence[ArmRuns], styles: Mapping[str, tuple[str, str]], prefix: str
) -> list[Block | None]:
    """Losses and metrics with their bands, then the loss scales of the arms in which they move.

    Args:
        comparison: What was found.
        arms: The records of its arms.
        styles: Colour and line style of each arm.
        prefix: Of the names of the figures.
    """
    losses = {arm.name: [learner.loss for learner in arm.learners()] for arm in arms}
    if not any(losses.values()):
        return [Text("The records of the runs are not where they were, so there are no curves.")]
    metrics = {arm.name: arm.metric(comparison.metric) for arm in arms}
    panels = [panel for arm in arms if (panel := arm.panel()) is not None]
    few = panels[:_MOST_PANELS]
    left = f" Shown are the first {len(few)} of {len(panels)} such arms." if len(panels) > len(few) else ""
    band = "means over seeds; the band reaches from the lowest to the highest"
    loss, metric, scales = (f"{prefix}{name}" for name in ("losses", "metrics", "loss-scales"))
    found = [Plot(loss, f"Training loss, {band}.", arms_figure(loss, "training loss", losses, styles))]
    if any(curve.finite() for curves in metrics.values() for curve in curves):
        drawn = arms_figure(metric, comparison.metric, metrics, styles)
        found.append(Plot(metric, f"{comparison.metric} on validation data, {band}.", drawn))
    if few:
        caption = f"Loss scales of all seeds of the arms in which they move, with overflows.{left}"
        found.append(Plot(scales, caption, loss_scale_figure(scales, few)))
    return [plots(*found)]
