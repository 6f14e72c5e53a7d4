"""Draws histograms of exponents against the range of FP16, and what was seen of them over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from mptrain.numerics.exponents import HIGHEST, NORMAL, TINIEST, nonzero
from mptrain.report.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    numbers_up,
    steps_across,
)
from mptrain.report.wording import MINUS

if TYPE_CHECKING:
    from mptrain.records import ExponentCounts
    from mptrain.report.histogram_summary import Seen

#: Colours of the histograms of one figure, in order.
COLOURS: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE)

#: What FP16 does with the numbers from the first to the second power of two, and the shade of that part.
ZONES: Final = (
    ("lost", -math.inf, TINIEST - 1, "#f7d9d2"),
    ("", TINIEST - 1, TINIEST, "#fbeae6"),
    ("subnormal", TINIEST, NORMAL, "#fdf3d8"),
    ("normal", NORMAL, HIGHEST + 1, "#e6f4ee"),
    ("inf", HIGHEST + 1, math.inf, "#f7d9d2"),
)

#: Powers of two that a figure shows at least and at most.
_LEAST: Final = (-30, 19)
_MOST: Final = (-60, 40)

#: A bar below this share of a histogram cannot be seen.
_SEEN: Final = 0.002


def exponents_figure(name: str, histograms: Mapping[str, ExponentCounts]) -> str:
    """Histograms over powers of two, with the zones of FP16 behind them.

    Args:
        name: Of the figure.
        histograms: By what they are called; those without a value are left out.
    """
    shown = {label: counts for label, counts in histograms.items() if nonzero(counts)}
    low, high = _span(list(shown.values()))
    labels = list(shown) if len(shown) > 1 else []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        handles, tallest = [], 0.0
        for (_, counts), colour in zip(shown.items(), COLOURS, strict=False):
            edges, percent = _bars(counts, low, high)
            axes.stairs(percent, edges, fill=True, color=colour, alpha=0.22 if labels else 0.55, linewidth=0)
            axes.stairs(percent, edges, color=colour, linewidth=1.5)
            handles.append(Patch(facecolor=colour, alpha=0.6))
            tallest = max(tallest, *percent)
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.24 * max(tallest, 1e-9))
        fp16_zones(axes)
        numbers_up(axes)
        axes.set_ylabel("values (%)")
        axes.set_xlabel("magnitude")
        legend_below(figure, handles, labels)

    return drawn(name, 2.5 + legend_height(labels), paint)


def fp16_zones(axes: Axes) -> None:
    """Shades what FP16 does with the numbers of each part of a horizontal axis of exponents, and says it on top."""
    low, high = axes.get_xlim()
    for label, start, end, shade in ZONES:
        left, right = max(start, low), min(end, high)
        if right <= left:
            continue
        axes.axvspan(left, right, color=shade, linewidth=0, zorder=0)
        if label:
            axes.text(
                (left + right) / 2, 0.97, label, transform=axes.get_xaxis_transform(),
                ha="center", va="top", fontsize=9, color="#4b5563",
            )  # fmt: skip
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(FixedLocator([place for place in _ticks(low, high) if low <= place <= high]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{value:g}".replace("-", MINUS)))


def _ticks(low: float, high: float) -> list[int]:
    """The borders of FP16's zones, and round powers of two beyond them."""
    below = range(TINIEST - 12, math.floor(low) - 1, -12)
    above = range(HIGHEST + 1 + 12, math.ceil(high) + 1, 12)
    return [*below, TINIEST, NORMAL, 0, HIGHEST + 1, *above]


def _span(shown: Sequence[ExponentCounts]) -> tuple[int, int]:
    """The powers of two that are drawn: without the outermost values, which would not be seen."""
    tall = [
        counts.lowest + at
        for counts in shown
        for at, count in enumerate(counts.counts)
        if count > _SEEN * nonzero(counts)
    ]
    first, last = min(tall, default=0), max(tall, default=0) + 1
    return max(min(first, _LEAST[0]), _MOST[0]), min(max(last, _LEAST[1]), _MOST[1])


def _bars(counts: ExponentCounts, low: int, high: int) -> tuple[list[int], list[float]]:
    """Edges and percents; what lies beyond the ends is in the first and the last bar."""
    whole, bars = nonzero(counts), [0.0] * (high - low)
    for exponent, count in enumerate(counts.counts, counts.lowest):
        bars[min(max(exponent - low, 0), len(bars) - 1)] += 100 * count / whole
    return list(range(low, high + 1)), bars


def looks_figure(name: str, seen: Sequence[Seen], steps: int) -> str:
    """Underflow, headroom and lost updates over the steps that were looked at, an axis for each that there is."""
    finite = [each for each in seen if math.isfinite(each.headroom)]
    changed = [each for each in seen if each.updates]
    rows: list[Callable[[Axes], None]] = [lambda axes: _shares(axes, seen)]
    if finite:
        rows.append(lambda axes: _headroom(axes, finite))
    if changed:
        rows.append(lambda axes: _unchanged(axes, changed))

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, row in zip(grid, rows, strict=True):
            row(axes)
        steps_across(grid[-1], max(steps, seen[-1].step))

    return drawn(name, 0.5 + 1.35 * len(rows), paint)


_LINE: Final[dict[str, Any]] = {"marker": "o", "markersize": 4}


def _shares(axes: Axes, seen: Sequence[Seen]) -> None:
    steps = [each.step for each in seen]
    curves = [("zero", BLUE, [each.zeros for each in seen]), ("subnormal", ORANGE, [each.subnormal for each in seen])]
    for label, colour, shares in curves:
        axes.plot(steps, [100 * share for share in shares], color=colour, label=label, **_LINE)
    axes.set_ylim(-4, 104)
    axes.set_title("activation gradients in FP16 (%)")
    axes.legend(loc="best", ncols=2)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2.5, 5, 10]))


def _headroom(axes: Axes, seen: Sequence[Seen]) -> None:
    axes.axhspan(-1e3, 0, color=ZONES[-1][3], linewidth=0)
    axes.plot([each.step for each in seen], [each.headroom for each in seen], color=GREEN, **_LINE)
    axes.set_ylim(min(-0.5, min(each.headroom for each in seen) - 1), max(each.headroom for each in seen) + 1.5)
    axes.set_title("headroom of the largest gradient (doublings)")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _unchanged(axes: Axes, seen: Sequence[Seen]) -> None:
    percent = [100 * each.unchanged / each.updates for each in seen]
    axes.plot([each.step for each in seen], percent, color=PURPLE, **_LINE)
    axes.set_ylim(0, max(1.15 * max(percent), 1))
    axes.set_title("updates that leave an FP16 weight as it was (%)")
    numbers_up(axes)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2.5, 5, 10]))
