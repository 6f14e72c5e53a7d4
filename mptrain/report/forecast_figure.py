"""Draws what every loss scale would do: what underflows on the left, what overflows on the right, what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from mptrain.numerics.overflow_limits import EXPONENTS
from mptrain.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    SKY,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    numbers_up,
    series,
)
from mptrain.report.run_figures import NAME
from mptrain.report.wording import elided

if TYPE_CHECKING:
    from mptrain.numerics.forecast import Forecast
    from mptrain.report.sweep_measurements import Measured

_RANGE: Final = "#d9efe6"
_LINES: Final[dict[str, dict[str, Any]]] = {
    "gradients lost": {"color": BLUE, "marker": "o", "markersize": 3.5},
    "lost, worst module": {"color": SKY, "linestyle": "--"},
    "steps overflowing": {"color": VERMILLION, "marker": "s", "markersize": 3.5},
}


def forecast_figure(name: str, forecast: Forecast, measured: Measured | None = None) -> str:
    """Shares over the exponent of the scale, with the usable range and the recommended scale; below, a sweep.

    Args:
        name: Of the figure.
        forecast: With scales.
        measured: What a sweep found at some scales; None where there is none.
    """
    labels = [*_LINES, *(["usable range"] if forecast.has_range else [])]
    labels += ["recommended"] if forecast.recommended is not None else []
    kinds = measured.kinds if measured else {}
    several = len(kinds) > 1
    labels += [f"measured: {elided(kind, NAME)}" for kind in kinds] if several else []

    def paint(figure: Figure) -> None:
        rows = 3 if measured else 1
        grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=(5, 3, 3)[:rows])[:, 0]
        handles: list[Any] = [_over(grid[0], forecast, label) for label in _LINES]
        grid[0].set_ylim(-4, 104)
        grid[0].set_ylabel("forecast (%)")
        if measured:
            handles_below = _measured(grid[1], grid[2], measured)
        for axes in grid:
            _mark(axes, forecast)
        handles += [Patch(facecolor=_RANGE)] if forecast.has_range else []
        handles += [Line2D([], [], color=GREEN, linewidth=2)] if forecast.recommended is not None else []
        handles += handles_below if several else []
        _scales_across(grid[-1])
        legend_below(figure, handles, labels)

    return drawn(name, (2.6 if measured is None else 4.9) + legend_height(labels), paint)


def _over(axes: Axes, forecast: Forecast, label: str) -> Line2D:
    shares = {
        "gradients lost": [each.lost for each in forecast.scales],
        "lost, worst module": [each.taken.share for each in forecast.scales],
        "steps overflowing": [each.overflow_share for each in forecast.scales],
    }[label]
    (line,) = axes.plot([each.exponent for each in forecast.scales], [100 * share for share in shares], **_LINES[label])
    return line


def _mark(axes: Axes, forecast: Forecast) -> None:
    if forecast.has_range and forecast.lowest is not None and forecast.top is not None:
        axes.axvspan(forecast.lowest - 0.25, forecast.top + 0.25, color=_RANGE, linewidth=0, zorder=0)
    if forecast.recommended is not None:
        axes.axvline(forecast.recommended, color=GREEN, linewidth=2, alpha=0.9, zorder=1)


def _measured(above: Axes, below: Axes, measured: Measured) -> list[Line2D]:
    """Every run of a sweep as a dot, a line through the means of each scale; the skipped share below."""
    handles = []
    styles = series(len(measured.kinds)) if len(measured.kinds) > 1 else [(BLACK, "-")]
    for runs, (colour, line) in zip(measured.kinds.values(), styles, strict=True):
        for axes, values in (
            (above, [(run.exponent, run.metric) for run in runs]),
            (below, [(run.exponent, None if run.skipped is None else 100 * run.skipped) for run in runs]),
        ):
            handle = _dots(axes, values, colour, line)
        handles.append(handle)
        failed = sorted({run.exponent for run in runs if run.failed})
        if failed:  # a line without points beyond the axes would make the layout collapse
            above.plot(
                failed, [0.06] * len(failed), transform=above.get_xaxis_transform(), linestyle="none", marker="X",
                markersize=7, markeredgewidth=0, color=VERMILLION, clip_on=False,
            )  # fmt: skip
    numbers_up(above)
    above.yaxis.set_major_locator(MaxNLocator(4))
    above.set_ylabel(elided(measured.metric, 18))
    below.set_ylabel("skipped (%)")
    below.set_ylim(-6, 106)
    below.yaxis.set_major_locator(FixedLocator([0, 50, 100]))
    return handles


def _dots(axes: Axes, values: Sequence[tuple[float, float | None]], colour: str, line: str) -> Line2D:
    known = [(at, value) for at, value in values if value is not None]
    by_place: dict[float, list[float]] = {}
    for at, value in sorted(known):
        by_place.setdefault(at, []).append(value)
    axes.plot([at for at, _ in known], [value for _, value in known], linestyle="none", marker="o", markersize=3.5, color=colour, alpha=0.55, markeredgewidth=0)  # fmt: skip
    means = [math.fsum(found) / len(found) for found in by_place.values()]
    (handle,) = axes.plot(list(by_place), means, color=colour, linestyle=line, linewidth=1.3)
    return handle


def _scales_across(axes: Axes) -> None:
    axes.set_xlim(EXPONENTS[0] - 0.6, EXPONENTS[-1] + 0.6)
    axes.xaxis.set_major_locator(FixedLocator(list(EXPONENTS[::4])))
    axes.xaxis.set_minor_locator(FixedLocator(list(EXPONENTS)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{value:g}"))
    axes.set_xlabel("loss scale")
