"""Draws the loss scales of a run beside those of a rule that was replayed over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mptrain.report.canvas import BLUE, GREY, ORANGE, VERMILLION, drawn, legend_below, legend_height, steps_across
from mptrain.report.curves import Curve
from mptrain.report.scale_figures import exponents, powers_on
from mptrain.report.wording import elided

#: Scales over steps, and those of the steps that overflowed.
Scales = tuple[Curve, Curve]

_RECORDED: Final[dict[str, Any]] = {"color": GREY, "linewidth": 3.2, "alpha": 0.45}
_REPLAYED: Final[dict[str, Any]] = {"color": BLUE, "linewidth": 1.4}
_MARKS: Final[tuple[dict[str, Any], dict[str, Any]]] = (
    {"color": ORANGE, "marker": "v", "markersize": 8},
    {"color": VERMILLION, "marker": "X", "markersize": 5.5},
)


def replay_figure(name: str, panels: Sequence[tuple[str, Scales, Scales]]) -> str:
    """A panel for each learner, steps in common.

    Args:
        name: Of the figure.
        panels: Title, recorded and replayed scales, each with its overflows; at least one.
    """
    labels = ["recorded", "replayed"]
    handles = [Line2D([], [], **_RECORDED), Line2D([], [], **_REPLAYED)]
    for which, label in enumerate(("overflow, recorded", "overflow, replayed")):
        if any(len(panel[1 + which][1]) for panel in panels):
            labels.append(label)
            handles.append(Line2D([], [], linestyle="none", markeredgewidth=0, **_MARKS[which]))

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (title, recorded, replayed) in zip(grid, panels, strict=True):
            _panel(axes, recorded, replayed)
            if title:
                axes.set_title(elided(title, 40))
        ends = [curve.extremes()[0][-1] for _, (curve, _), _ in panels if len(curve)]
        steps_across(grid[-1], max(ends, default=1))
        legend_below(figure, handles, labels)

    return drawn(name, (2.8 if len(panels) == 1 else 1.9 * len(panels) + 0.3) + legend_height(labels), paint)


def _panel(axes: Axes, recorded: Scales, replayed: Scales) -> None:
    for (scales, _), style in ((recorded, _RECORDED), (replayed, _REPLAYED)):
        axes.plot(*exponents(scales.extremes()), drawstyle="steps-post", **style)
    for (_, marks), style in ((recorded, _MARKS[0]), (replayed, _MARKS[1])):
        axes.plot(*exponents(marks.extremes()), linestyle="none", markeredgewidth=0, alpha=0.9, **style)
    powers_on(axes)
    axes.set_ylabel("loss scale")
