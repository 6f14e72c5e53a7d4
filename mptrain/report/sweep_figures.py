"""Draws a sweep: final metrics and skipped shares over what was varied, and the curves of all its runs.

Runs that failed are drawn as failed, at the edge of the figure, and never left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from mptrain.report.canvas import (
    BLACK,
    GREY,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    numbers_up,
    series,
    steps_across,
    tick,
)
from mptrain.report.curves import Curve
from mptrain.report.run_figures import LONG, NAME
from mptrain.report.scale_figures import exponents, powers_on
from mptrain.report.sweep_axes import Axis, Point, kinds
from mptrain.report.wording import elided

_FAILED: Final = "failed or diverged"

#: Series that a legend can still tell apart.
MOST_NAMED: Final = 24


def cliffs_figure(name: str, points: Sequence[Point], axis: Axis, metric: str) -> str:
    """Above: the metric over a numeric key, a line for each combination of the others. Below: the skipped share."""
    swept = [point for point in points if point.setting(axis.key) is not None]
    rest = kinds([point for point in points if point.setting(axis.key) is None])
    level = {kind: mean for kind, found in rest.items() if (mean := _mean(found)) is not None}
    groups = kinds(swept, (axis.key,))
    colours = dict(zip([*groups, *level], series(len(groups) + len(level)), strict=True))
    failed = any(_failed(point) for point in swept)
    labels = [elided(kind, NAME) for kind in [*groups, *level] if kind] + [_FAILED] * failed

    def paint(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        handles = []
        for kind, found in groups.items():
            line = _over(above, axis, found, [point.metric for point in found], colours[kind])
            _over(below, axis, found, [_percent(point.skip_rate) for point in found], colours[kind])
            handles += [line] * bool(kind)
        for kind, mean in level.items():
            handles.append(above.axhline(mean, color=colours[kind][0], linestyle="--", linewidth=1.3))
        numbers_up(above)
        handles += _failures(above, [(_at(axis, point), point) for point in swept if _failed(point)])
        above.set_ylabel(elided(metric, 22))
        below.set_ylabel("skipped (%)")
        below.set_ylim(-4, 104)
        _keyed(below, axis)
        legend_below(figure, handles, labels)

    return drawn(name, 4.0 + legend_height(labels), paint)


def categories_figure(points: Sequence[Point], metric: str) -> str:
    """The metric of every point, a row for each combination of what was varied but the seed."""
    groups = kinds(points)
    failed = any(_failed(point) for point in points)
    labels = ["run", "mean"] + [_FAILED] * failed

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for row, found in enumerate(groups.values()):
            values = [point.metric for point in found if point.metric is not None]
            axes.plot(values, [row] * len(values), linestyle="none", marker="o", markersize=5, color=GREY, alpha=0.6)
            if values:
                axes.plot(
                    [math.fsum(values) / len(values)], [row], marker="|", markersize=13, markeredgewidth=2, color=BLACK
                )
            if any(_failed(point) for point in found):
                axes.plot([0.015], [row], transform=axes.get_yaxis_transform(), **_CROSS)
        rows_named(axes, list(groups))
        axes.set_xlabel(elided(metric, 40))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        handles = [
            Line2D([], [], color=GREY, marker="o", linestyle="none", markersize=5),
            Line2D([], [], color=BLACK, marker="|", linestyle="none", markersize=11, markeredgewidth=2),
            Line2D([], [], **_CROSS),
        ][: len(labels)]
        legend_below(figure, handles, labels)

    return drawn("categories", 0.9 + 0.34 * len(groups) + legend_height(labels), paint)


def rows_named(axes: Axes, names: Sequence[str]) -> None:
    """Names on the vertical axis, the first on top."""
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: elided(names[int(value)], 22)))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def overlay_figure(
    name: str,
    unit: str,
    kinds_: Mapping[str, Sequence[Curve]],
    styles: Sequence[tuple[str, str]],
    *,
    powers: bool = False,
) -> str:
    """One curve for each run, smoothed where it is long.

    Args:
        name: Of the figure.
        unit: Label of the vertical axis.
        kinds_: Curves of runs that differ in their seed only, by what they have in common.
        styles: Colour and line style of each kind.
        powers: The values are loss scales: an axis of powers of two, steps between them.
    """
    labels = [elided(label, NAME) for label in kinds_] if 1 < len(kinds_) <= MOST_NAMED else []
    curves = [curve for some in kinds_.values() for curve in some]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        handles: list[Any] = []
        for some, (colour, line) in zip(kinds_.values(), styles, strict=True):
            style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.3, "alpha": 0.9}
            for curve in some:
                if powers:
                    axes.plot(*exponents(curve.extremes()), drawstyle="steps-post", **style)
                else:
                    axes.plot(*(curve.smooth() if len(curve) > LONG else curve.means()), **style)
            handles.append(Line2D([], [], **style))
        if powers:
            powers_on(axes)
        else:
            numbers_up(axes, [value for curve in curves for value in curve.means()[1] if not math.isnan(value)], 30)
        axes.set_ylabel(unit)
        steps_across(axes, max((curve.means()[0][-1] for curve in curves if len(curve)), default=1))
        if labels:
            legend_below(figure, handles, labels)

    return drawn(name, 2.7 + legend_height(labels), paint)


_CROSS: Final[dict[str, Any]] = {
    "color": VERMILLION,
    "marker": "X",
    "linestyle": "none",
    "markersize": 7,
    "markeredgewidth": 0,
    "clip_on": False,
}


def _failed(point: Point) -> bool:
    """It ended, and has no finite metric."""
    return point.metric is None and (point.job.status == "failed" or (point.done and "metric" in point.summary))


def _over(
    axes: Axes, axis: Axis, points: Sequence[Point], values: Sequence[float | None], style: tuple[str, str]
) -> Line2D:
    """Every value as a dot, and a line through the means of each setting."""
    colour, line = style
    by_setting: dict[float, list[float]] = {}
    for point, value in zip(points, values, strict=True):
        if value is not None:
            by_setting.setdefault(_at(axis, point), []).append(value)
    dots = [(at, value) for at, found in sorted(by_setting.items()) for value in found]
    axes.plot(
        [at for at, _ in dots], [value for _, value in dots], linestyle="none", marker="o", color=colour, markersize=4.5
    )
    means = [(at, math.fsum(found) / len(found)) for at, found in sorted(by_setting.items())]
    (drawn_line,) = axes.plot([at for at, _ in means], [mean for _, mean in means], color=colour, linestyle=line)
    return drawn_line


def _failures(axes: Axes, failed: Sequence[tuple[float, Point]]) -> list[Line2D]:
    """Crosses at the lower edge, with a line up, so that nobody takes them for values."""
    if not failed:
        return []
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.06 * (high - low), high)
    places = sorted({at for at, _ in failed})
    axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), color=VERMILLION, linewidth=0.8, alpha=0.35)
    return axes.plot(places, [0.03] * len(places), transform=axes.get_xaxis_transform(), **_CROSS)


def _at(axis: Axis, point: Point) -> float:
    value = point.setting(axis.key) or 0.0
    return math.log(value, axis.logarithm) if axis.logarithm else value


def _keyed(axes: Axes, axis: Axis) -> None:
    """Ticks at the settings themselves, as many as have room."""
    places = [math.log(value, axis.logarithm) if axis.logarithm else value for value in axis.values]
    span = max(places[-1] - places[0], 1e-12)
    shown: list[float] = []
    for place in places:
        if not shown or place - shown[-1] >= span / 8.5:
            shown.append(place)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    base = axis.logarithm
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"2^{value:g}" if base == 2 else tick(base**value) if base else tick(value))
    )
    axes.set_xlim(places[0] - 0.04 * span, places[-1] + 0.04 * span)
    how = {2: ", logarithmic", 10: ", logarithmic"}.get(base or 0, "")
    axes.set_xlabel(f"{elided(axis.key, 40)}{how}")


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _mean(points: Sequence[Point]) -> float | None:
    values = [point.metric for point in points if point.metric is not None]
    return math.fsum(values) / len(values) if values else None
