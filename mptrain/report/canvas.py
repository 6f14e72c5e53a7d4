"""How figures look, and how they become SVG: the one place that knows matplotlib's settings.

Figures are made without pyplot, so nothing global is left behind. Text stays text: it is written with the reader's own
fonts, measured with the font that matplotlib brings along, so the same run gives the same bytes everywhere.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mptrain.report.wording import MINUS

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


def drawn(name: str, height: float, paint: Callable[[Figure], None]) -> str:
    """A figure as an SVG document.

    Args:
        name: Letters, digits and hyphens; the ids of its parts begin with it, so that figures can share a page.
        height: Inches.
        paint: Draws it.
    """
    output = io.StringIO()
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # whatever the user's own matplotlibrc says
        mpl.rcParams.update({**_STYLE, "svg.hashsalt": name})
        # About letters that the measuring font lacks (the reader's fonts have them) and labels that leave little room.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(output, format="svg", metadata=nothing)
    return _tidied(output.getvalue(), name)


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


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below all axes, where it covers no data, in as many columns as fit."""
    if labels:
        shown = [f" {label}" if label.startswith("_") else label for label in labels]  # matplotlib hides those
        figure.legend(handles, shown, loc="outside lower center", ncols=_columns(labels))


def legend_height(labels: Sequence[str]) -> float:
    """Inches that `legend_below` needs, so that a figure can be made higher by them."""
    return 0.19 * -(-len(labels) // _columns(labels)) + 0.08 if labels else 0.0


def _columns(labels: Sequence[str]) -> int:
    return max(1, min(len(labels), 56 // (max(len(label) for label in labels) + 6)))


def numbers_up(axes: Axes, values: Sequence[float] = (), factor: float = math.inf) -> None:
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


def steps_across(axes: Axes, last: float) -> None:
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
