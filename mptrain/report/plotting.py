"""Style of a report's figures, drawing helpers and SVG output. Only this module sets matplotlib options.

Figures are made without pyplot, so no global state is left behind. Text stays text in the SVG and is shown in the
reader's fonts. It is measured with the font that matplotlib ships, so the same run gives the same bytes everywhere.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from statistics import fmean
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from typing_extensions import override

from mptrain.report.page import Chart, Series
from mptrain.report.run_history import Points
from mptrain.system.words import MINUS, elided, plain

logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # silences notices about its font cache

#: Width of a figure in inches: the full width on a phone, half of the page on a screen.
WIDTH: Final = 4.7

#: Colour-blind safe palette of Okabe and Ito ("Color Universal Design", 2008) without yellow, which is too light.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
SERIES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
GREY: Final = "#6b7280"
FAINT: Final = "#e5e7eb"
LINES: Final = ("-", "--", ":", "-.")

#: Maximum characters of a name in a legend, and maximum number of names in a legend.
NAME, MOST_NAMED = 30, 24

#: Marker style of failed runs.
FAILED: Final[dict[str, Any]] = {
    "color": VERMILLION, "marker": "X", "linestyle": "none", "markersize": 7, "markeredgewidth": 0, "clip_on": False,
}  # fmt: skip

_FONTS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

_STYLE: Final[dict[Any, Any]] = {
    # Names of users may have dollar signs, between which matplotlib would set mathematics.
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
    """A figure of a report under construction; `drawing` makes one.

    The legend is placed below all axes, covers no data and adds to the height, which is in inches.

    Curves over steps are drawn with `line`, `bars` and `name_rows`, which also keep their data for the page's script.

    Attributes:
        svg: The SVG document; empty until `finish`.
        charts: Data of the curves over steps, by axes from top to bottom; empty until `finish`.
    """

    def __init__(self, name: str, height: float) -> None:
        self.name = name
        self.svg = ""
        self.charts: tuple[Chart, ...] = ()
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(self.figure)
        self._height = height
        self._legend: list[tuple[str, Any]] = []
        self._series: dict[Axes, list[Series]] = {}
        self._rows: dict[Axes, tuple[str, ...]] = {}
        self._powers: set[Axes] = set()

    @override
    def __repr__(self) -> str:
        return f"<figure {self.name}>"

    def panels(self, count: int = 1, heights: Sequence[float] | None = None) -> list[Axes]:
        """Add axes in one column with a shared horizontal axis, and return them from top to bottom.

        ``heights`` are ratios; None for equal heights.
        """
        grid = self.figure.subplots(count, 1, sharex=True, squeeze=False, height_ratios=heights)
        return list(grid[:, 0])

    def line(
        self,
        axes: Axes,
        name: str,
        points: Points,
        *,
        band: tuple[Sequence[float], Sequence[float]] | None = None,
        powers: bool = False,
        **style: Any,
    ) -> Line2D:
        """Draw values over steps as a curve or as marks, and return it, for the legend.

        Args:
            axes: Axes of this figure.
            name: Name of the curve on the page, in full.
            points: Steps and values.
            band: Lowest and highest values to shade around the curve.
            powers: Whether the axis shows log2 of the values.
            style: Line properties of matplotlib. Without a line, a ``transform`` says that the height has no meaning.
        """
        if len(points[0]) == 1:
            style.setdefault("marker", "o")  # a line of one point is none
        (drawn,) = axes.plot(*(exponents(points) if powers else points), **style)
        if band is not None:
            axes.fill_between(points[0], *band, color=drawn.get_color(), alpha=0.15, linewidth=0)
        if powers:
            self._powers.add(axes)
        low, high = band or ((), ())
        alpha, size = drawn.get_alpha(), drawn.get_markersize()
        kept = Series(
            name,
            tuple(points[0]),
            tuple(points[1]),
            colour=mpl.colors.to_hex(drawn.get_color()),
            alpha=1.0 if alpha is None else alpha,
            width=drawn.get_linewidth(),
            dash=str(drawn.get_linestyle()),
            marker="ring" if drawn.get_markerfacecolor() == "none" else str((size and drawn.get_marker()) or None),
            size=size,
            low=tuple(low),
            high=tuple(high),
        )
        if drawn.get_drawstyle() == "steps-post":
            kept = replace(kept, kind="stepped")
        elif kept.dash == "None":
            kept = replace(kept, kind="steps" if "transform" in style else "marks")
        self._series.setdefault(axes, []).append(kept)
        return drawn

    def bars(self, axes: Axes, name: str, points: Points, width: float) -> None:
        """Draw values over steps as bars, each over ``width`` steps."""
        axes.bar(*points, width=width * 0.92, color=SKY, edgecolor=BLUE, linewidth=0.4)
        self._series.setdefault(axes, []).append(Series(name, tuple(points[0]), tuple(points[1]), SKY, kind="bars"))

    def name_rows(self, axes: Axes, names: Sequence[str]) -> None:
        """Turn the vertical axis into named rows as `category_y_axis` does, on the page too."""
        category_y_axis(axes, names)
        self._rows[axes] = tuple(elided(name, 22) for name in names)

    def label(self, text: str, handle: Any = None, **style: Any) -> None:
        """Add an entry to the figure's legend: a drawn matplotlib artist, or a line of the given style."""
        self._legend.append((text, Line2D([], [], **style) if handle is None else handle))

    def _repr_svg_(self) -> str:
        return self.svg

    def finish(self) -> None:
        """Add the legend in as many columns as fit, and store the SVG document and the data of curves."""
        labels = [label for label, _ in self._legend]
        if labels:
            columns = max(1, min(len(labels), 56 // (max(map(len, labels)) + 6)))
            self.figure.set_figheight(self._height + (0.19 * -(-len(labels) // columns) + 0.08))
            # matplotlib hides labels that start with an underscore
            shown = [f" {label}" if label.startswith("_") else label for label in labels]
            handles = [handle for _, handle in self._legend]
            self.figure.legend(handles, shown, loc="outside lower center", ncols=columns)
        for text in self.figure.findobj(Text):  # names in them may have control characters
            text.set_text(plain(text.get_text(), lines=True))
        output = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(output, format="svg", metadata=nothing)
        self.svg = _tidied(output.getvalue(), self.name)
        self.charts = tuple(
            Chart(
                axes.get_title(loc="left"),
                axes.get_ylabel(),
                2 if axes in self._powers else 10 if axes.get_yscale() == "log" else 0,
                self._rows.get(axes, ()),
                tuple(kept),
            )
            for axes, kept in self._series.items()
        )


@contextmanager
def drawing(name: str, height: float) -> Iterator[Drawing]:
    """Context manager that yields a figure to draw on, in the style of the reports, ``height`` inches high.

    After the block, the ``svg`` of the `Drawing` holds the SVG document.
    """
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # ignores the user's matplotlibrc
        # Without a salt, ids in an SVG are random, and the same run would not give the same bytes.
        mpl.rcParams.update({**_STYLE, "svg.hashsalt": name})
        # Warnings about glyphs missing in the measuring font (the reader's fonts have them) and about tight layouts.
        warnings.simplefilter("ignore", UserWarning)
        made = Drawing(name, height)
        yield made
        made.finish()


def series(count: int) -> list[tuple[str, str]]:
    """Return colour and line style of ``count`` curves of a figure that have no order, such as learners."""
    return [(SERIES[at % len(SERIES)], LINES[at // len(SERIES) % len(LINES)]) for at in range(count)]


def dashed_series(count: int) -> list[tuple[str, str]]:
    """Return colours and line styles like `series`, but with varying styles so that overlapping curves stay visible."""
    return [
        (SERIES[at % len(SERIES)], LINES[(at % len(SERIES) + at // len(SERIES)) % len(LINES)]) for at in range(count)
    ]


def ordered_series(count: int) -> list[tuple[str, str]]:
    """Return colour and line style of ``count`` curves that are ordered by a number, from dark to light."""
    ramp = mpl.colormaps["viridis"]
    shades = [ramp(0.88 * at / max(count - 1, 1)) for at in range(count)]
    return [(mpl.colors.to_hex(shade), "-") for shade in shades]


def numeric_y_axis(axes: Axes, values: Sequence[float] = (), factor: float = math.inf) -> None:
    """Label the vertical axis of a figure with plain numbers, and make it logarithmic for values of a wide range.

    This is the case if all values are positive and the largest is more than ``factor`` times the smallest.
    """
    if values and min(values) > 0 and max(values) > factor * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        if math.log10(max(values) / min(values)) < 1.5:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def ticks_at(axis: Axis, positions: Sequence[float], text: Callable[[float], str]) -> None:
    """Set the ticks of a figure's axis, with labels that a function of the position returns."""
    axis.set_major_locator(FixedLocator(positions))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(text(value))))


def category_y_axis(axes: Axes, names: Sequence[str]) -> None:
    """Turn the vertical axis of a figure into rows 0, 1, ... labelled with names, the first at the top."""
    ticks_at(axes.yaxis, range(len(names)), lambda value: elided(names[int(value)], 22))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def dots(axes: Axes, across: Sequence[float], up: Sequence[float], *, edge: bool = False, **style: Any) -> None:
    """Draw values as markers without connecting lines in a figure.

    ``edge`` gives markers an outline. ``style`` has line properties of matplotlib; ``marker`` is a dot by default.
    """
    outline = {} if edge else {"markeredgewidth": 0}
    axes.plot(across, up, **{"linestyle": "none", "marker": "o", **outline, **style})


def dots_and_means(
    axes: Axes, points: Sequence[tuple[float, float]], colour: str, line: str, *, means: Any, **style: Any
) -> Line2D:
    """Draw (position, value) pairs as dots in a figure, and return a line through the means at each position.

    ``means`` are further properties of the line, and ``style`` those of the dots.
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


def failures_at(axes: Axes, across: Sequence[float], height: float) -> None:
    """Draw crosses that mark failed runs in a figure.

    Horizontal positions are in data coordinates, and ``height`` is a fraction of the height of the axes.
    """
    dots(axes, across, [height] * len(across), transform=axes.get_xaxis_transform(), **FAILED)


def exponents(points: Points) -> Points:
    """Return a curve's points for an axis of powers of two: log2 of the values, NaN where a value is not positive."""
    steps, values = points
    return steps, [math.log2(value) if value > 0 else math.nan for value in values]


_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_two(exponent: float) -> str:
    """Format the label of a tick at a power of two, ``2⁻²⁴``; tables and sentences, for copying, have ``2^-24``."""
    return "2" + f"{exponent:g}".translate(_SUPERSCRIPTS)


def power_of_two_y_axis(axes: Axes) -> None:
    """Set the ticks of a vertical axis that shows log2 of loss scales: labels 2⁸, 2¹⁰ ..."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max((high - low) / 2, 1.2)
    low, high = middle - half, middle + half
    every = max(math.ceil((high - low) / 6), 1)
    axes.set_ylim(low, high)
    exponents = [exponent for exponent in range(math.ceil(low), math.floor(high) + 1) if exponent % every == 0]
    ticks_at(axes.yaxis, exponents, power_of_two)
    axes.set_ylabel("loss scale")


def step_axis(axes: Axes, last: float) -> None:
    """Set up the horizontal axis of a figure for training steps, from 0 to the last one."""
    axes.set_xlabel("step")
    axes.set_xlim(0, max(last, 1) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


#: Style of what is measured on a split, and of the mean over an epoch of training.
_SPLITS: Final[dict[str, dict[str, Any]]] = {
    split: {"color": colour, "marker": marker, "markersize": 4}
    for split, colour, marker in (("val", BLUE, "o"), ("test", VERMILLION, "D"), ("train", GREEN, "o"))
}


def step_figure(panels: Mapping[str, Mapping[str, Points]], skipped: Sequence[float]) -> Drawing:
    """Return a figure of quantities over the steps of a run, one below the other.

    Args:
        panels: Name of the quantity to its points by split; the name of a split is empty for what each step has.
        skipped: Skipped steps, which crosses mark below what each step has.
    """
    with drawing("steps", 1.2 + 1.6 * len(panels)) as figure:
        grid = figure.panels(len(panels))
        for axes, (name, curves) in zip(grid, panels.items(), strict=True):
            scale = name == "loss_scale"
            for split, (steps, values) in curves.items():
                finite = [value if math.isfinite(value) else math.nan for value in values]
                own = {"color": SERIES[0], "drawstyle": "steps-post" if scale else "default"}
                figure.line(axes, split or name, (steps, finite), powers=scale, **_SPLITS.get(split, own))
            if scale:
                power_of_two_y_axis(axes)
            else:
                every = [value for _, values in curves.values() for value in values if math.isfinite(value)]
                numeric_y_axis(axes, every, 100.0)
                axes.set_ylabel(name.replace("_", " "))
            if skipped and "" in curves:
                failures_at(axes, skipped, 0.03)
        step_axis(grid[-1], max(steps[-1] for curves in panels.values() for steps, _ in curves.values()))
        for split in dict.fromkeys(split for curves in panels.values() for split in curves if split):
            figure.label(split, **_SPLITS.get(split, {}))
        if skipped and any("" in curves for curves in panels.values()):
            figure.label("skipped step", **{name: value for name, value in FAILED.items() if name != "clip_on"})
    return figure


def tick(value: float) -> str:
    """Format the label of a tick: six significant digits below 10,000, and ``12k`` or ``2.5M`` from there on."""
    return thousands(value) if abs(value) >= 10_000 else f"{value:.6g}".replace("-", MINUS)


def thousands(value: float) -> str:
    """Format the label of a tick that is a count: ``400``, ``12k``, ``2.5M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}".replace("-", MINUS)
    return f"{value:g}".replace("-", MINUS)


def inlined(svg: str) -> str:
    """Return an SVG document as an inline element of an HTML page, which scales to the available width."""
    start = svg.index("<svg")
    return re.sub(r' (?:width|height)="[^"]*pt"', "", svg[start:], count=2)


def _tidied(svg: str, name: str) -> str:
    """Prefix the ids in use with the figure's name, drop other ids, set the reader's fonts and remove page styles."""
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))

    def tag(match: re.Match[str]) -> str:
        text = re.sub(r' id="([^"]*)"', lambda id_: f' id="{name}-{id_[1]}"' if id_[1] in used else "", match[0])
        text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
        return re.sub(r"font-family: [^;\"]*", f"font-family: {_FONTS}", text)

    svg = re.sub(r"<[^!?][^>]*>", tag, svg)
    style = "stroke-linejoin: round; stroke-linecap: butt"
    svg = svg.replace("<svg ", f'<svg style="{style}" ', 1)
    return re.sub(r"\n\s*", "\n", svg)
