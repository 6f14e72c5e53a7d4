"""Draws what happened in one run: losses, metrics, gradient norms, learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mptrain.report.canvas import (
    BLACK,
    BLUE,
    VERMILLION,
    drawn,
    legend_below,
    legend_height,
    numbers_up,
    series,
    steps_across,
)
from mptrain.report.curves import Curve
from mptrain.report.history import History
from mptrain.report.wording import elided

#: From so many points on a curve is drawn smoothed, over its raw extremes.
LONG = 100

#: Up to so many evaluations are dots.
_FEW = 60

#: Letters of a name in a legend.
NAME = 30

_LOST = "loss not finite"


def loss_figure(history: History) -> str:
    """Training loss of every learner over steps, raw and smoothed, and the loss on validation data."""
    learners = history.learners
    validation = history.evaluations.get("val", {}).get("loss", Curve())
    lost = sorted({step for learner in learners.values() for step in learner.loss.lost()})
    labels = ["training loss"] if len(learners) == 1 else [elided(name, NAME) for name in learners]
    labels += ["validation loss"] * bool(validation.finite()) + [_LOST] * bool(lost)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        colours = [colour for colour, _ in series(len(learners))]
        handles = [
            curve_with_raw(axes, learner.loss, colour)
            for learner, colour in zip(learners.values(), colours, strict=True)
        ]
        if validation.finite():
            handles += axes.plot(
                *validation.means(), color=BLACK, marker="o", markersize=3, linewidth=1, linestyle="--"
            )
        numbers_up(axes, [value for learner in learners.values() for value in learner.loss.finite()], 30)
        if lost:
            style: dict[str, Any] = {"color": VERMILLION, "marker": "X", "linestyle": "none", "markeredgewidth": 0}
            axes.plot(lost, [0.97] * len(lost), transform=axes.get_xaxis_transform(), markersize=5, **style)
            handles.append(Line2D([], [], markersize=6, **style))
        axes.set_ylabel("loss")
        steps_across(axes, history.steps)
        legend_below(figure, handles, labels)

    return drawn("loss", 2.7 + legend_height(labels), paint)


def curve_with_raw(axes: Axes, curve: Curve, colour: str) -> Line2D:
    """A curve: as it is where it is short; where it is long its extremes faintly, and a moving mean over them."""
    if len(curve) < LONG:
        alone = len(curve.finite()) <= 2  # the ends of one bucket: a line needs two
        (line,) = axes.plot(*curve.means(), color=colour, marker="o" if alone else "", markersize=4)
        return line
    axes.plot(*curve.extremes(), color=colour, linewidth=0.6, alpha=0.3)
    (line,) = axes.plot(*curve.smooth(), color=colour, linewidth=1.8)
    return line


@dataclass(frozen=True)
class MetricView:
    """Which metric is shown, and which value of it counts as the best (None where the direction is not known)."""

    name: str
    best: float | None = None


def metric_figure(history: History, views: Sequence[MetricView]) -> str:
    """Metrics on validation data over steps, an axis for each, and their values on test data at the end."""
    validation, tests = history.evaluations.get("val", {}), history.evaluations.get("test", {})
    labels = [label for label, there in _METRIC_LABELS if there(validation, tests, views)]

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(views), 1, sharex=True, squeeze=False)[:, 0]
        for axes, view in zip(grid, views, strict=True):
            _metric(axes, view, validation.get(view.name, Curve()), tests.get(view.name, Curve()))
            axes.set_ylabel(elided(view.name, 22)) if len(views) == 1 else axes.set_title(elided(view.name, 40))
        steps_across(grid[-1], history.steps)
        handles = {
            "validation": Line2D([], [], color=BLUE, marker="o", markersize=4),
            "best": Line2D([], [], color=BLACK, marker="o", markersize=8, markerfacecolor="none", linestyle="none"),
            "test": Line2D([], [], color=VERMILLION, marker="D", markersize=6, linestyle="none"),
        }
        legend_below(figure, [handles[label] for label in labels], labels)

    return drawn("metric", (2.7 if len(views) == 1 else 1.35 * len(views) + 0.3) + legend_height(labels), paint)


_METRIC_LABELS: Sequence[tuple[str, Any]] = (
    ("validation", lambda validation, tests, views: any(view.name in validation for view in views)),
    ("best", lambda validation, tests, views: any(view.best is not None for view in views)),
    ("test", lambda validation, tests, views: any(view.name in tests for view in views)),
)


def _metric(axes: Axes, view: MetricView, validation: Curve, test: Curve) -> None:
    if validation.finite():
        axes.plot(*validation.means(), color=BLUE, marker="o", markersize=3.5 if len(validation) <= _FEW else 0)
    steps, values = validation.extremes()
    best = [(step, value) for step, value in zip(steps, values, strict=True) if value == view.best]
    if best:
        axes.plot(*best[0], marker="o", markersize=9, markerfacecolor="none", color=BLACK)
    if end := test.last():
        axes.plot(*end, marker="D", markersize=6, color=VERMILLION)
    numbers_up(axes)


def quantity_figure(name: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool) -> str:
    """One quantity of every learner over steps.

    Args:
        name: Of the figure.
        unit: Label of the vertical axis.
        curves: By learner.
        logarithmic: A logarithmic axis where the values span a factor of 20; otherwise the axis begins at 0.
    """
    shown = {learner: curve for learner, curve in curves.items() if curve.finite()}
    labels = [elided(learner, NAME) for learner in shown] if len(shown) > 1 else []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        colours = [colour for colour, _ in series(len(shown))]
        handles = [curve_with_raw(axes, curve, colour) for curve, colour in zip(shown.values(), colours, strict=True)]
        if logarithmic:
            numbers_up(axes, [value for curve in shown.values() for value in curve.finite()], 20)
        else:
            numbers_up(axes)
            axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        steps_across(axes, max((curve.means()[0][-1] for curve in shown.values()), default=1))
        legend_below(figure, handles, labels)

    return drawn(name, 2.3 + legend_height(labels), paint)
