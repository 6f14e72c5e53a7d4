"""Draws a comparison: differences against the margin, every run, curves of the arms, speed and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from mptrain.comparison.results import ArmResult, Comparison, Interval
from mptrain.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    SKY,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    numbers_up,
    steps_across,
    tick,
)
from mptrain.report.comparison_tables import difference_and_interval
from mptrain.report.curves import Curve, together
from mptrain.report.run_figures import NAME
from mptrain.report.sweep_figures import MOST_NAMED, rows_named
from mptrain.report.wording import elided

#: Colour of each verdict; the word stands beside it.
VERDICTS: Final = {"better": BLUE, "equivalent": GREEN, "worse": VERMILLION, "undecided": GREY}


def forest_figure(name: str, comparison: Comparison) -> str:
    """Differences from the reference with their intervals, the band of the margin behind them.

    The axis is made for what lies near the margin; an arm far away from it is an arrow with its numbers.
    """
    arms = [result for result in comparison.arms if result.verdict.word != "reference"]
    labels = ["95 % interval", f"90 % interval ({_TESTS})", f"margin ±{tick(comparison.margin)}"]
    limit = _limit(comparison.margin, [_reach(result.difference) for result in arms])

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvspan(-comparison.margin, comparison.margin, color=SKY, alpha=0.22, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_xlim(-limit, limit)
        for row, result in enumerate(arms):
            _difference(axes, row, result, limit)
        rows_named(axes, [result.arm.name for result in arms])
        _across(axes, f"{elided(comparison.metric, 22)}, minus {elided(comparison.reference, 22)}")
        handles = [
            Line2D([], [], color=GREY, linewidth=1.4),
            Line2D([], [], color=GREY, linewidth=4.5),
            Patch(color=SKY, alpha=0.3, linewidth=0),
        ]
        legend_below(figure, handles, labels)

    return drawn(name, 0.95 + 0.38 * len(arms) + legend_height(labels), paint)


#: An arm whose interval reaches so many margins from zero is far away, if others are not.
_FAR: Final = 12


def _reach(difference: Interval | None) -> float:
    """How far from zero an interval, or a single difference, reaches; NaN where there is none."""
    if difference is None:
        return math.nan
    return max(
        (abs(end) for end in (difference.low, difference.high) if math.isfinite(end)), default=abs(difference.mean)
    )


def _limit(margin: float, reaches: Sequence[float]) -> float:
    known = [reach for reach in reaches if math.isfinite(reach)]
    near = [reach for reach in known if reach <= _FAR * margin]
    return 1.12 * max([*(near or known), 1.5 * margin])


def _difference(axes: Axes, row: int, result: ArmResult, limit: float) -> None:
    """The intervals of one arm, its verdict beside them."""
    colour = VERDICTS.get(result.verdict.word, GREY)
    found, beside = result.difference, axes.get_yaxis_transform()
    axes.text(1.02, row, result.verdict.word, transform=beside, va="center", color=colour)
    if found is None or not math.isfinite(found.mean):
        axes.text(0.5, row, "no difference can be given", transform=beside, ha="center", va="center", color=GREY)
        return
    if abs(found.mean) > limit:
        left = found.mean < 0
        axes.plot(
            [0.02 if left else 0.98], [row], transform=beside, marker="<" if left else ">", color=colour, markersize=8
        )
        words = difference_and_interval(found)
        place: dict[str, Any] = {"ha": "left" if left else "right", "va": "center", "transform": beside}
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(0.06 if left else 0.94, row, words, bbox=white, **place)
        return
    flat: dict[str, Any] = {"color": colour, "solid_capstyle": "butt"}
    axes.plot([found.low, found.high], [row, row], linewidth=1.4, **flat)
    if result.equivalence is not None:
        axes.plot([result.equivalence.low, result.equivalence.high], [row, row], linewidth=4.5, **flat)
    axes.plot([found.mean], [row], marker="o", color=colour, markersize=6.5, markeredgecolor="white")


_TESTS: Final = "two one-sided tests"


def seeds_figure(name: str, comparison: Comparison, styles: Mapping[str, tuple[str, str]]) -> str:
    """The metric of every run, those with the same seed joined."""
    values = {
        result.arm.name: {
            run.seed: run.metrics[comparison.metric]
            for run in result.arm.runs
            if math.isfinite(run.metrics.get(comparison.metric, math.nan)) and run.status == "done"
        }
        for result in comparison.arms
    }
    failed = {result.arm.name: result.failed for result in comparison.arms if result.failed}
    names = list(values)
    labels = ["seed", "mean"] + ["failed or diverged"] * bool(failed)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for seed in sorted({seed for found in values.values() for seed in found}):
            line = [values[arm].get(seed, math.nan) for arm in names]
            axes.plot(range(len(names)), line, color=GREY, linewidth=0.8, alpha=0.5)
        for at, (arm, found) in enumerate(values.items()):
            axes.plot(
                [at] * len(found),
                list(found.values()),
                linestyle="none",
                marker="o",
                markersize=5,
                color=styles[arm][0],
            )
            if found:
                mean = math.fsum(found.values()) / len(found)
                axes.plot([at - 0.22, at + 0.22], [mean, mean], color=BLACK, linewidth=1.8)
        numbers_up(axes)
        handles = [Line2D([], [], color=GREY, marker="o", markersize=5, linewidth=0.8), Line2D([], [], color=BLACK)]
        if failed:
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.07 * (high - low), high)
            cross: dict[str, Any] = {
                "color": VERMILLION,
                "marker": "X",
                "linestyle": "none",
                "markersize": 7,
                "markeredgewidth": 0,
            }
            for arm in failed:
                axes.plot([names.index(arm)], [0.035], transform=axes.get_xaxis_transform(), **cross)
            handles.append(Line2D([], [], **cross))
        axes.set_ylabel(elided(comparison.metric, 22))
        _arms_across(axes, names)
        legend_below(figure, handles, labels)

    return drawn(name, 2.9 + legend_height(labels), paint)


def arms_figure(
    name: str, unit: str, arms: Mapping[str, Sequence[Curve]], styles: Mapping[str, tuple[str, str]]
) -> str:
    """A quantity over steps: for each arm the mean over its seeds, and a band from the lowest to the highest.

    Args:
        name: Of the figure.
        unit: Label of the vertical axis.
        arms: By name, the curves of the arm's runs.
        styles: Colour and line style of each arm.
    """
    merged = {arm: together(curves) for arm, curves in arms.items() if any(curve.finite() for curve in curves)}
    labels = [elided(arm, NAME) for arm in merged] if len(merged) <= MOST_NAMED else []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        handles: list[Any] = []
        every: list[float] = []
        for arm, (steps, means, lows, highs) in merged.items():
            colour, line = styles[arm]
            if len(merged) <= 8:
                axes.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
            mark: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= 40 else {}
            handles += axes.plot(steps, means, color=colour, linestyle=line, linewidth=1.5, **mark)
            every += means
        numbers_up(axes, every, 30)
        axes.set_ylabel(elided(unit, 22))
        steps_across(axes, max((steps[-1] for steps, *_ in merged.values() if steps), default=1))
        legend_below(figure, handles, labels)

    return drawn(name, 2.7 + legend_height(labels), paint)


def bars_figure(name: str, unit: str, arms: Mapping[str, Sequence[float]]) -> str:
    """A bar for the mean of each arm, a dot for each of its runs.

    Args:
        name: Of the figure.
        unit: Label of the axis.
        arms: By name, the values of the arm's runs; the first is the reference.
    """

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for row, values in enumerate(arms.values()):
            colour = GREY if row == 0 else SKY
            if values:
                axes.barh([row], [math.fsum(values) / len(values)], height=0.62, color=colour, alpha=0.75, linewidth=0)
                axes.plot(
                    values, [row] * len(values), linestyle="none", marker="o", markersize=3.6, color=BLACK, alpha=0.7
                )
        rows_named(axes, list(arms))
        axes.set_xlim(left=0)
        _across(axes, unit)

    return drawn(name, 0.85 + 0.3 * len(arms), paint)


def _across(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def _arms_across(axes: Axes, names: Sequence[str]) -> None:
    """Names of arms on the horizontal axis, turned where they have no room."""
    axes.xaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: elided(names[int(value)], 20)))
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(visible=False, axis="x")
    if sum(len(elided(name, 20)) + 2 for name in names) > 40:
        for label in axes.get_xticklabels():
            label.set_rotation(40)
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
