"""Draws loss scales over steps on a logarithmic axis, with every overflow marked by its phase.

Used for one run with a panel for each learner, and for comparisons with a panel for each arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from mptrain.report.canvas import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    steps_across,
)
from mptrain.report.curves import Curve, Points
from mptrain.report.history import LearnerHistory, Offender, Overflows
from mptrain.report.wording import elided

#: Colour and shape of each phase: told apart without colour, too.
MARKS: Final = {"calibrating": (ORANGE, "v"), "growth probe": (BLUE, "^"), "unexpected": (VERMILLION, "X")}
_OTHER: Final = (BLACK, "s")

#: Parts of the horizontal axis in which skipped steps are counted.
_WINDOWS: Final = 60


@dataclass(frozen=True)
class Panel:
    """Scales that share an axis: its title, the curves, their overflows."""

    title: str
    scales: Sequence[Curve]
    overflows: Sequence[Overflows]


def loss_scale_figure(name: str, panels: Sequence[Panel], offenders: Sequence[tuple[str, Offender]] = ()) -> str:
    """One axis for each panel, steps in common.

    Args:
        name: Of the figure.
        panels: At least one.
        offenders: Parameters that overflowed, a row of marks for each below the panels.
    """
    phases = [phase for phase in MARKS if any(phase in each.counts for panel in panels for each in panel.overflows)]
    labels = ["loss scale", *(f"overflow, {phase}" for phase in phases)]
    rows = 0.22 * len(offenders) + 0.1 if offenders else 0.0
    high = 1.75 if len(panels) == 1 else 1.6

    def paint(figure: Figure) -> None:
        heights = [*[high] * len(panels), *[rows] * bool(offenders)]
        grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, panel in zip(grid, panels, strict=False):
            _scale_panel(axes, panel)
        if offenders:
            _offender_rows(grid[-1], offenders)
        steps_across(
            grid[-1],
            max((curve.extremes()[0][-1] for panel in panels for curve in panel.scales if len(curve)), default=1),
        )
        handles = [Line2D([], [], color=GREY)]
        for phase in phases:
            colour, shape = MARKS[phase]
            handles.append(Line2D([], [], color=colour, marker=shape, linestyle="none", markersize=6))
        legend_below(figure, handles, labels)

    return drawn(name, (2.5 if len(panels) == 1 else 1.6 * len(panels) + 0.3) + rows + legend_height(labels), paint)


def skipped_figure(name: str, learners: Mapping[str, LearnerHistory]) -> str:
    """The share of skipped updates in short stretches of the run, a panel for each learner."""

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(learners), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (learner, history) in zip(grid, learners.items(), strict=True):
            steps, shares, width = _windows(history.skipped)
            axes.bar(
                steps, [100 * share for share in shares], width=width * 0.92, color=SKY, edgecolor=BLUE, linewidth=0.4
            )
            axes.set_ylim(0, min(max(1, 115 * max(shares, default=0)), 100))
            axes.set_ylabel("skipped (%)")
            axes.grid(visible=False, axis="x")
            if len(learners) > 1:
                axes.set_title(elided(learner, 40))
        steps_across(grid[-1], max(history.attempts for history in learners.values()))

    return drawn(name, 2.0 if len(learners) == 1 else 1.4 * len(learners) + 0.3, paint)


def _scale_panel(axes: Axes, panel: Panel) -> None:
    faint = len(panel.scales) > 1
    for curve in panel.scales:
        steps, values = exponents(curve.extremes())
        axes.plot(steps, values, drawstyle="steps-post", color=GREY, linewidth=1.2, alpha=0.45 if faint else 1.0)
    for overflows in panel.overflows:
        for phase, marks in overflows.marks.items():
            colour, shape = MARKS.get(phase, _OTHER)
            steps, values = exponents(marks.extremes())
            axes.plot(
                steps,
                values,
                linestyle="none",
                marker=shape,
                markersize=6,
                color=colour,
                markeredgewidth=0,
                alpha=0.85,
            )
    powers_on(axes)
    axes.set_ylabel("loss scale")
    if panel.title:
        axes.set_title(elided(panel.title, 40))


def _offender_rows(axes: Axes, offenders: Sequence[tuple[str, Offender]]) -> None:
    """A row for each parameter, with a mark at each step in which its gradient was not finite."""
    for row, (_, offender) in enumerate(offenders):
        for phase, marks in offender.marks.items():
            colour, shape = MARKS.get(phase, _OTHER)
            steps = [step for step, value in zip(*marks.extremes(), strict=True) if value == 1]
            axes.plot(
                steps, [row] * len(steps), linestyle="none", marker=shape, markersize=5, color=colour,
                markeredgewidth=0, alpha=0.85,
            )  # fmt: skip
    axes.yaxis.set_major_locator(FixedLocator(range(len(offenders))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: elided(offenders[int(value)][0], 22)))
    axes.set_ylim(len(offenders) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.spines["left"].set_visible(False)


def exponents(points: Points) -> Points:
    """Points with the logarithm to base 2 of their values; NaN where there is none."""
    steps, values = points
    return steps, [math.log2(value) if value > 0 else math.nan for value in values]


def powers_on(axes: Axes) -> None:
    """Ticks at whole powers of two on a vertical axis that shows exponents."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max((high - low) / 2, 1.2)
    low, high = middle - half, middle + half
    every = max(math.ceil((high - low) / 6), 1)
    ticks = [tick for tick in range(math.ceil(low), math.floor(high) + 1) if tick % every == 0]
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{value:g}"))


def _windows(skipped: Curve) -> tuple[list[float], list[float], float]:
    """The middles of at most `_WINDOWS` stretches, the share of skipped steps in each, and their width."""
    steps, means = skipped.means()
    together = max(math.ceil(len(means) / _WINDOWS), 1)
    groups = range(0, len(means), together)
    shares = [sum(means[at : at + together]) / len(means[at : at + together]) for at in groups]
    middles = [sum(steps[at : at + together]) / len(steps[at : at + together]) for at in groups]
    return middles, shares, together * skipped.width
