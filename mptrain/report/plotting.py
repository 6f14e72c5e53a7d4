"""The looks of figures, what several of them draw, and SVG: the one place that knows matplotlib's settings.

Figures are made without pyplot, so nothing global is left behind. Text stays text: it is written with the reader's own
fonts, measured with the font that matplotlib brings along, so the same run gives the same bytes everywhere.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from statistics import fmean
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mptrain.report.formatting import MINUS, elided

logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it reports on its own cache

#: Inches. A figure fills the width of a telephone, and half of a page on a screen.
WIDTH: Final = 4.7

#: Okabe and Ito's colours for all kinds of colour vision ("Color Universal Design", 2008); the yellow is too light.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
SERIES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY: Final = "#6b7280"
FAINT: Final = "#e5e7eb"
LINES: Final = ("-", "--", ":", "-.")

#: Letters of a name in a legend, and names that a legend can still tell apart.
NAME, MOST_NAMED = 30, 24

#: How what failed is marked.
FAILED: Final[dict[str, Any]] = {
    "color": VERMILLION, "marker": "X", "linestyle": "none", "markersize": 7, "markeredgewidth": 0, "clip_on": False,
}  # fmt: skip

_FONTS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

_STYLE: Final[dict[Any, Any]] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.labelcolor": "#374151",
    "axes.edgecolor": "#9ca3af",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": "#9ca3af",
    "ytick.color": "#9ca3af",
    "xtick.labelcolor": "#374151",
    "ytick.labelcolor": "#374151",
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.06,
}


class Drawing:
    """A figure in the making. Its legend stands below all axes, where it covers no data, and makes the figure higher.

    Args:
        name: Letters, digits and hyphens; the ids of its parts begin with it, so that figures can share a page.
        height: Inches, without the legend.
    """

    def __init__(self, name: str, height: float) -> None:
        self.name = name
        self.svg = ""
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(self.figure)
        self._height = height
        self._legend: list[tuple[str, Any]] = []

    def panels(self, count: int = 1, heights: Sequence[float] | None = None) -> list[Axes]:
        """Axes below each other that share the horizontal one; ``heights`` are their ratios."""
        grid = self.figure.subplots(count, 1, sharex=True, squeeze=False, height_ratios=heights)
        return list(grid[:, 0])

    def label(self, text: str, handle: Any = None, **style: Any) -> None:
        """Enter a name in the legend, beside what was drawn, or beside a line of a style."""
        self._legend.append((text, Line2D([], [], **style) if handle is None else handle))

    def finish(self) -> None:
        """Add the legend, in as many columns as fit, and write the SVG document."""
        labels = [label for label, _ in self._legend]
        if labels:
            columns = max(1, min(len(labels), 56 // (max(map(len, labels)) + 6)))
            self.figure.set_figheight(self._height + (0.19 * -(-len(labels) // columns) + 0.08))
            shown = [f" {label}" if label.startswith("_") else label for label in labels]  # matplotlib hides those
            handles = [handle for _, handle in self._legend]
            self.figure.legend(handles, shown, loc="outside lower center", ncols=columns)
        output = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(output, format="svg", metadata=nothing)
        self.svg = _tidied(output.getvalue(), self.name)


@contextmanager
def drawing(name: str, height: float) -> Iterator[Drawing]:
    """A `Drawing` to paint on; behind the block its ``svg`` is an SVG document."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # whatever the user's own matplotlibrc says
        mpl.rcParams.update({**_STYLE, "svg.hashsalt": name})
        # About letters that the measuring font lacks (the reader's fonts have them) and labels that leave little room.
        warnings.simplefilter("ignore", UserWarning)
        made = Drawing(name, height)
        yield made
        made.finish()


def series(count: int) -> list[tuple[str, str]]:
    """Colour and line style of so many series without an order."""
    return [(SERIES[at % len(SERIES)], LINES[at // len(SERIES) % len(LINES)]) for at in range(count)]


def dashed_series(count: int) -> list[tuple[str, str]]:
    """As `series`, with another line style for each, so that of curves on top of each other both are seen."""
    return [
        (SERIES[at % len(SERIES)], LINES[(at % len(SERIES) + at // len(SERIES)) % len(LINES)]) for at in range(count)
    ]


def ordered_series(count: int) -> list[tuple[str, str]]:
    """Colour and line style of so many series along a number, from dark to light."""
    ramp = mpl.colormaps["viridis"]
    shades = [ramp(0.88 * at / max(count - 1, 1)) for at in range(count)]
    return [(mpl.colors.to_hex(shade), "-") for shade in shades]


def numeric_y_axis(axes: Axes, values: Sequence[float] = (), factor: float = math.inf) -> None:
    """Plain numbers on the vertical axis, which is logarithmic where positive values span more than a factor."""
    if values and min(values) > 0 and max(values) > factor * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        if math.log10(max(values) / min(values)) < 1.5:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def ticks_at(axis: Axis, places: Sequence[float], text: Callable[[float], str]) -> None:
    """Ticks at these places, with the text of each."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def category_y_axis(axes: Axes, names: Sequence[str]) -> None:
    """Names on the vertical axis, the first on top."""
    ticks_at(axes.yaxis, range(len(names)), lambda value: elided(names[int(value)], 22))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def dots(axes: Axes, across: Sequence[float], up: Sequence[float], *, edge: bool = False, **style: Any) -> None:
    """Marks without lines between them.

    Args:
        axes: Where.
        across: Horizontal places.
        up: Vertical places.
        edge: Whether marks have an outline.
        style: Of matplotlib's lines: ``marker``, a dot without it, ``markersize``, ``color`` ...
    """
    outline = {} if edge else {"markeredgewidth": 0}
    axes.plot(across, up, **{"linestyle": "none", "marker": "o", **outline, **style})


def dots_and_means(
    axes: Axes, points: Sequence[tuple[float, float]], colour: str, line: str, *, means: Any, **style: Any
) -> Line2D:
    """Every value as a dot, and a line through the means at each place.

    Args:
        axes: Where.
        points: Places and values.
        colour: Of both.
        line: Style of the line.
        means: More about the line.
        style: More about the dots.

    Returns:
        The line.
    """
    by_place: dict[float, list[float]] = {}
    for at, value in sorted(points, key=itemgetter(0)):
        by_place.setdefault(at, []).append(value)
    across = [at for at, values in by_place.items() for _ in values]
    dots(axes, across, [value for values in by_place.values() for value in values], color=colour, **style)
    (drawn,) = axes.plot(
        list(by_place), [fmean(values) for values in by_place.values()], color=colour, linestyle=line, **means
    )
    return drawn


def failures_at(axes: Axes, across: Sequence[float], up: Sequence[float], transform: Any = None) -> None:
    """Crosses of what failed; without another transform ``up`` is a share of the height of the axes."""
    dots(axes, across, up, transform=transform or axes.get_xaxis_transform(), **FAILED)


def exponents(points: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
    """Points with the logarithm to base 2 of their values; NaN where there is none."""
    steps, values = points
    return steps, [math.log2(value) if value > 0 else math.nan for value in values]


def power_of_two_y_axis(axes: Axes) -> None:
    """Ticks at whole powers of two on a vertical axis that shows exponents of loss scales."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max((high - low) / 2, 1.2)
    low, high = middle - half, middle + half
    every = max(math.ceil((high - low) / 6), 1)
    axes.set_ylim(low, high)
    places = [place for place in range(math.ceil(low), math.floor(high) + 1) if place % every == 0]
    ticks_at(axes.yaxis, places, lambda value: f"2^{value:g}")
    axes.set_ylabel("loss scale")


def numeric_x_axis(axes: Axes, label: str) -> None:
    """Plain numbers and a label on the horizontal axis."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def step_axis(axes: Axes, last: float) -> None:
    """Steps on the horizontal axis, from 0 to the last."""
    axes.set_xlabel("step")
    axes.set_xlim(0, max(last, 1) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def tick(value: float) -> str:
    """A number at an axis."""
    return thousands(value) if abs(value) >= 10_000 else f"{value:.6g}".replace("-", MINUS)


def thousands(value: float) -> str:
    """A count at an axis: ``400``, ``12k``, ``2.5M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}".replace("-", MINUS)
    return f"{value:g}".replace("-", MINUS)


def inlined(svg: str) -> str:
    """An SVG document as an element of a page: it takes the width it is given."""
    start = svg.index("<svg")
    return re.sub(r' (?:width|height)="[^"]*pt"', "", svg[start:], count=2)


def _tidied(svg: str, name: str) -> str:
    """Ids that are used made unique to the figure, others gone; fonts of the reader; no style for the whole page."""
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))

    def tag(found: re.Match[str]) -> str:
        text = re.sub(r' id="([^"]*)"', lambda id_: f' id="{name}-{id_[1]}"' if id_[1] in used else "", found[0])
        text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
        return re.sub(r"font-family: [^;\"]*", f"font-family: {_FONTS}", text)

    svg = re.sub(r"<[^!?][^>]*>", tag, svg)
    style = "stroke-linejoin: round; stroke-linecap: butt"
    svg = svg.replace("<svg ", f'<svg style="{style}" ', 1)
    return re.sub(r"\n\s*", "\n", svg)
