"""Draws a sweep: final metrics and skipped shares over what was varied, and the curves of all its runs.

Runs that failed are drawn as failed, at the edge of the figure, and never left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from mptrain.report.canvas import (
    BLACK,
    FAILED,
    GREY,
    MOST_NAMED,
    NAME,
    VERMILLION,
    dots,
    dots_and_means,
    drawing,
    exponents,
    failures_at,
    named_rows,
    numbers_across,
    numbers_up,
    powers_up,
    series,
    steps_across,
    tick,
    ticks_at,
)
from mptrain.report.curves import Curve
from mptrain.report.formatting import elided
from mptrain.report.page import Plot
from mptrain.report.run_page import LONG
from mptrain.report.sweep_points import Axis, Point, kinds

_FAILED: Final = "failed or diverged"


def cliffs_plot(name: str, points: Sequence[Point], axis: Axis, metric: str) -> Plot:
    """Above: the metric over a numeric key, a line for each combination of the others. Below: the skipped share."""
    swept = [point for point in points if point.setting(axis.key) is not None]
    rest = kinds([point for point in points if point.setting(axis.key) is None])
    level = {kind: fmean(known) for kind, found in rest.items() if (known := _metrics(found))}
    groups = kinds(swept, (axis.key,))
    colours = dict(zip([*groups, *level], series(len(groups) + len(level)), strict=True))
    failed = sorted({axis.place(point) for point in swept if _failed(point)})
    lines: dict[str, Any] = {}
    with drawing(name, 4.0) as figure:
        above, below = figure.panels(2, (3, 2))
        for kind, found in groups.items():
            shares = [(axis.place(point), 100 * point.skip_rate) for point in found if point.skip_rate is not None]
            metrics = [(axis.place(point), point.metric) for point in found if point.metric is not None]
            for axes, values in ((below, shares), (above, metrics)):
                lines[kind] = dots_and_means(axes, values, *colours[kind], means={}, edge=True, markersize=4.5)
        levels = [
            above.axhline(mean, color=colours[kind][0], linestyle="--", linewidth=1.3) for kind, mean in level.items()
        ]
        numbers_up(above)
        for kind, line in [*lines.items(), *zip(level, levels, strict=True)]:
            if kind:
                figure.label(elided(kind, NAME), line)
        if failed:
            _failures(above, failed)
            figure.label(_FAILED, **FAILED)
        above.set_ylabel(elided(metric, 22))
        below.set_ylabel("skipped (%)")
        below.set_ylim(-4, 104)
        _key_across(below, axis)
    marks = ["dots are runs, lines go through their means"]
    marks += ["a cross marks runs that failed or diverged"] * any(point.metric is None for point in swept)
    marks += ["a dashed line is the mean of runs without this key"] * (len(swept) < len(points))
    caption = f"{metric} and the share of skipped updates over {axis.key}: {'; '.join(marks)}."
    return Plot(name, caption, figure.svg)


def categories_plot(points: Sequence[Point], metric: str) -> Plot:
    """The metric of every point, a row for each combination of what was varied but the seed."""
    groups = kinds(points)
    mark: dict[str, Any] = {"marker": "|", "markeredgewidth": 2, "color": BLACK}
    with drawing("categories", 0.9 + 0.34 * len(groups)) as figure:
        (axes,) = figure.panels()
        for row, found in enumerate(groups.values()):
            values = _metrics(found)
            dots(axes, values, [row] * len(values), edge=True, markersize=5, color=GREY, alpha=0.6)
            if values:
                axes.plot([fmean(values)], [row], markersize=13, **mark)
            if any(map(_failed, found)):
                failures_at(axes, [0.015], [row], axes.get_yaxis_transform())
        named_rows(axes, list(groups))
        axes.grid(visible=False, axis="y")
        numbers_across(axes, elided(metric, 40))
        figure.label("run", color=GREY, marker="o", linestyle="none", markersize=5)
        figure.label("mean", linestyle="none", markersize=11, **mark)
        if any(map(_failed, points)):
            figure.label(_FAILED, **FAILED)
    return Plot("categories", f"{metric} of every run.", figure.svg)


def overlay_plot(
    name: str, unit: str, caption: str, groups: Mapping[str, Sequence[Curve]], styles: Sequence[tuple[str, str]]
) -> Plot:
    """One curve for each run, smoothed where it is long; steps between powers of two where the name is ``scales``.

    Args:
        name: Of the figure.
        unit: Label of the vertical axis.
        caption: Below it.
        groups: Curves of runs that differ in their seed only, by what they have in common.
        styles: Colour and line style of each group.
    """
    curves = [curve for some in groups.values() for curve in some]
    with drawing(name, 2.7) as figure:
        (axes,) = figure.panels()
        for (group, some), (colour, line) in zip(groups.items(), styles, strict=True):
            style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.3, "alpha": 0.9}
            for curve in some:
                if name == "scales":
                    axes.plot(*exponents(curve.extremes()), drawstyle="steps-post", **style)
                else:
                    axes.plot(*(curve.smooth() if len(curve) > LONG else curve.means()), **style)
            if 1 < len(groups) <= MOST_NAMED:
                figure.label(elided(group, NAME), **style)
        if name == "scales":
            powers_up(axes)
        else:
            numbers_up(axes, [value for curve in curves for value in curve.means()[1] if not math.isnan(value)], 30)
        axes.set_ylabel(unit)
        steps_across(axes, max((curve.means()[0][-1] for curve in curves if len(curve)), default=1))
    return Plot(name, caption, figure.svg)


def _metrics(points: Sequence[Point]) -> list[float]:
    return [point.metric for point in points if point.metric is not None]


def _failed(point: Point) -> bool:
    """It ended, and has no finite metric."""
    return point.metric is None and (point.job.status == "failed" or (point.done and "metric" in point.summary))


def _failures(axes: Axes, places: Sequence[float]) -> None:
    """Crosses at the lower edge, with a line up, so that nobody takes them for values."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.06 * (high - low), high)
    axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), color=VERMILLION, linewidth=0.8, alpha=0.35)
    failures_at(axes, places, [0.03] * len(places))


def _key_across(axes: Axes, axis: Axis) -> None:
    """Ticks at the settings themselves, as many as have room."""
    base = axis.logarithm
    places = [math.log(value, base) if base else value for value in axis.values]
    span = max(places[-1] - places[0], 1e-12)
    shown: list[float] = []
    for place in places:
        if not shown or place - shown[-1] >= span / 8.5:
            shown.append(place)
    ticks_at(axes.xaxis, shown, lambda value: f"2^{value:g}" if base == 2 else tick(base**value if base else value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(places[0] - 0.04 * span, places[-1] + 0.04 * span)
    axes.set_xlabel(f"{elided(axis.key, 40)}{', logarithmic' if base else ''}")
