"""Draws a comparison: differences against the margin, every run, curves of the arms, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mptrain.comparison.results import ArmResult, Comparison, Interval
from mptrain.report.canvas import (
    BLACK,
    BLUE,
    FAILED,
    GREEN,
    GREY,
    MOST_NAMED,
    NAME,
    SKY,
    VERMILLION,
    dots,
    drawing,
    failures_at,
    named_rows,
    numbers_across,
    numbers_up,
    steps_across,
    tick,
    ticks_at,
)
from mptrain.report.comparison_tables import difference_and_interval
from mptrain.report.curves import Curve, together
from mptrain.report.formatting import elided
from mptrain.report.page import Plot

#: Colour of each verdict; the word stands beside it.
VERDICTS: Final = {"better": BLUE, "equivalent": GREEN, "worse": VERMILLION, "undecided": GREY}

#: An arm whose interval reaches so many margins from zero is far away, if others are not.
_FAR: Final = 12

Styles = Mapping[str, tuple[str, str]]


def forest_plot(name: str, comparison: Comparison) -> Plot | None:
    """Differences from the reference with their intervals, the band of the margin behind them.

    The axis is made for what lies near the margin; an arm far away from it is an arrow with its numbers.
    """
    arms = [result for result in comparison.arms if result.verdict.word != "reference"]
    if len(comparison.arms) < 2:
        return None
    limit = _limit(comparison.margin, [_reach(result.difference) for result in arms])
    with drawing(name, 0.95 + 0.38 * len(arms)) as figure:
        (axes,) = figure.panels()
        axes.axvspan(-comparison.margin, comparison.margin, color=SKY, alpha=0.22, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_xlim(-limit, limit)
        for row, result in enumerate(arms):
            _difference(axes, row, result, limit)
        _rows(axes, [result.arm.name for result in arms])
        _numbers(axes, f"{elided(comparison.metric, 22)}, minus {elided(comparison.reference, 22)}")
        figure.label("95 % interval", color=GREY, linewidth=1.4)
        figure.label("90 % interval (two one-sided tests)", color=GREY, linewidth=4.5)
        figure.label(f"margin ±{tick(comparison.margin)}", Patch(color=SKY, alpha=0.3, linewidth=0))
    caption = (
        "Differences from the reference, paired by seed. An arm is equivalent where its thick interval lies inside the band, "
        "better or worse where its thin one lies on one side of zero; see the verdicts for the rest."
    )
    return Plot(name, caption, figure.svg)


def _reach(difference: Interval | None) -> float:
    """How far from zero an interval, or a single difference, reaches; NaN where there is none."""
    if difference is None:
        return math.nan
    ends = [abs(end) for end in (difference.low, difference.high) if math.isfinite(end)]
    return max(ends, default=abs(difference.mean))


def _limit(margin: float, reaches: Sequence[float]) -> float:
    known = [reach for reach in reaches if math.isfinite(reach)]
    near = [reach for reach in known if reach <= _FAR * margin]
    return 1.12 * max([*(near or known), 1.5 * margin])


def _difference(axes: Axes, row: int, result: ArmResult, limit: float) -> None:
    """The intervals of one arm, its verdict beside them."""
    colour = VERDICTS.get(result.verdict.word, GREY)
    found = result.difference
    place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(1.02, row, result.verdict.word, color=colour, **place)
    if found is None or not math.isfinite(found.mean):
        axes.text(0.5, row, "no difference can be given", ha="center", color=GREY, **place)
        return
    if abs(found.mean) > limit:
        left = found.mean < 0
        at, mark, text_at, side = (0.02, "<", 0.06, "left") if left else (0.98, ">", 0.94, "right")
        axes.plot([at], [row], transform=place["transform"], marker=mark, color=colour, markersize=8)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(text_at, row, difference_and_interval(found), bbox=white, ha=side, **place)
        return
    flat: dict[str, Any] = {"color": colour, "solid_capstyle": "butt"}
    axes.plot([found.low, found.high], [row, row], linewidth=1.4, **flat)
    if result.equivalence is not None:
        axes.plot([result.equivalence.low, result.equivalence.high], [row, row], linewidth=4.5, **flat)
    axes.plot([found.mean], [row], marker="o", color=colour, markersize=6.5, markeredgecolor="white")


def seeds_plot(name: str, comparison: Comparison, styles: Styles) -> Plot:
    """The metric of every run, those with the same seed joined."""
    metric = comparison.metric
    values = {
        result.arm.name: {
            run.seed: run.metrics[metric]
            for run in result.arm.runs
            if run.status == "done" and math.isfinite(run.metrics.get(metric, math.nan))
        }
        for result in comparison.arms
    }
    failed = [at for at, result in enumerate(comparison.arms) if result.failed]
    with drawing(name, 2.9) as figure:
        (axes,) = figure.panels()
        for seed in sorted({seed for found in values.values() for seed in found}):
            line = [found.get(seed, math.nan) for found in values.values()]
            axes.plot(range(len(values)), line, color=GREY, linewidth=0.8, alpha=0.5)
        for at, (arm, found) in enumerate(values.items()):
            dots(axes, [at] * len(found), list(found.values()), edge=True, markersize=5, color=styles[arm][0])
            if found:
                axes.plot([at - 0.22, at + 0.22], [fmean(found.values())] * 2, color=BLACK, linewidth=1.8)
        numbers_up(axes)
        figure.label("seed", color=GREY, marker="o", markersize=5, linewidth=0.8)
        figure.label("mean", color=BLACK)
        if failed:
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.07 * (high - low), high)
            for at in failed:
                failures_at(axes, [at], [0.035])
            figure.label("failed or diverged", **FAILED)
        axes.set_ylabel(elided(metric, 22))
        _arms_across(axes, list(values))
    return Plot(name, f"{metric} of every run; a line joins the runs of a seed.", figure.svg)


def arms_plot(name: str, unit: str, what: str, arms: Mapping[str, Sequence[Curve]], styles: Styles) -> Plot | None:
    """A quantity over steps: for each arm the mean over its seeds, and a band from the lowest to the highest.

    Args:
        name: Of the figure.
        unit: Label of the vertical axis.
        what: The quantity, in the caption.
        arms: By name, the curves of the arm's runs.
        styles: Colour and line style of each arm.
    """
    merged = {arm: together(curves) for arm, curves in arms.items() if any(curve.finite() for curve in curves)}
    with drawing(name, 2.7) as figure:
        (axes,) = figure.panels()
        for arm, (steps, means, lows, highs) in merged.items():
            colour, line = styles[arm]
            if len(merged) <= 8:
                axes.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
            mark: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= 40 else {}
            (handle,) = axes.plot(steps, means, color=colour, linestyle=line, linewidth=1.5, **mark)
            if len(merged) <= MOST_NAMED:
                figure.label(elided(arm, NAME), handle)
        numbers_up(axes, [value for _, means, *_ in merged.values() for value in means], 30)
        axes.set_ylabel(elided(unit, 22))
        steps_across(axes, max((steps[-1] for steps, *_ in merged.values() if steps), default=1))
    return Plot(name, f"{what}, means over seeds; the band reaches from the lowest to the highest.", figure.svg)


def bars_plot(name: str, unit: str, what: str, arms: Mapping[str, Sequence[float]]) -> Plot:
    """A bar for the mean of each arm, a dot for each of its runs.

    Args:
        name: Of the figure.
        unit: Label of the axis.
        what: The quantity, in the caption.
        arms: By name, the values of the arm's runs; the first is the reference.
    """
    with drawing(name, 0.85 + 0.3 * len(arms)) as figure:
        (axes,) = figure.panels()
        for row, values in enumerate(arms.values()):
            if values:
                colour = GREY if row == 0 else SKY
                axes.barh([row], [fmean(values)], height=0.62, color=colour, alpha=0.75, linewidth=0)
                dots(axes, values, [row] * len(values), edge=True, markersize=3.6, color=BLACK, alpha=0.7)
        _rows(axes, list(arms))
        axes.set_xlim(left=0)
        _numbers(axes, unit)
    return Plot(name, f"{what}; dots are runs.", figure.svg)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    named_rows(axes, names)
    axes.grid(visible=False, axis="y")


def _numbers(axes: Axes, label: str) -> None:
    numbers_across(axes, label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))


def _arms_across(axes: Axes, names: Sequence[str]) -> None:
    """Names of arms on the horizontal axis, turned where they have no room."""
    ticks_at(axes.xaxis, range(len(names)), lambda value: elided(names[int(value)], 20))
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(visible=False, axis="x")
    if sum(len(elided(name, 20)) + 2 for name in names) > 40:
        for label in axes.get_xticklabels():
            label.set(rotation=40, horizontalalignment="right", rotation_mode="anchor")
