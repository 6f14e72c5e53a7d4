"""Blocks of a report about FP16 loss scales: their course, the steps that overflowed and the skipped updates.

Reports of runs draw the loss scale figure with a panel for each learner, comparisons with a panel for each arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes

from mptrain.report import plotting
from mptrain.report.page import Block, Cell, Plot, Table, Text, plots, table
from mptrain.report.run_blocks import OpenedRun
from mptrain.report.run_history import EXTREMES, MARK, Curve, LearnerHistory, Offender, Overflows, in_groups
from mptrain.system.records import MAX_TENSORS
from mptrain.system.words import counted, elided, scale

#: Maximum parameters that overflowed in the figure, and in the table.
_MOST_ROWS, _MOST_NAMED = 6, 12


def loss_scale_blocks(opened: OpenedRun) -> list[Block | None]:
    """Return the part of a run's report on its loss scales: figures of scales and skips, tables of overflows."""
    history = opened.history
    if not history.learners:
        return []
    refused = sum(learner.refused for learner in history.learners.values())
    overflows = sum(sum(each.counts.values()) for each in history.overflows.values())
    if not history.scaled and not overflows:
        known = history.not_finite_elsewhere
        of_all = " that was looked at" if history.not_looked_at else ""
        finite = ". " + known if known else f", and no gradient{of_all} overflowed."
        return [Text(f"Losses were not scaled (the loss scale is 1 throughout){finite}")]
    several = len(history.learners) > 1
    panels = [
        Panel(
            name if several else "",
            [learner.loss_scale],
            [history.overflows[name]] if name in history.overflows else [],
        )
        for name, learner in history.learners.items()
    ]
    offenders, on_record = _worst(opened, _MOST_ROWS), " on record" if history.not_looked_at else ""
    caption = (
        f"Loss scale over steps, {counted(overflows, 'overflow')}. {_PHASES if overflows else ''}{_named(offenders)}"
    )
    return [
        plots(
            loss_scale_plot("loss-scale", caption, panels, offenders),
            _skipped_plot(history.learners, refused) if refused else None,
        ),
        None if refused else Text(f"No update{on_record} was skipped{opened.left_out and f'; {opened.left_out}'}."),
        Text(history.not_finite_elsewhere) if history.not_finite_elsewhere else None,
        _offender_table(opened),
        _overflow_table(opened),
    ]


_PHASES: Final = (
    "Calibrating: the scale is still coming down from its initial value. Growth probe: the scale has just grown. "
    "Unexpected overflow: neither of the two. Only unexpected overflows point to a problem."
)


def _worst(opened: OpenedRun, most: int) -> list[tuple[str, Offender]]:
    """Return the parameters of all learners that overflowed most often, with learner names if there are several."""
    several = len(opened.history.learners) > 1
    offenders = [
        (f"{learner}: {name}" if several else name, offender)
        for learner, overflows in opened.history.overflows.items()
        for name, offender in overflows.worst(most)
    ]
    return sorted(offenders, key=lambda item: -item[1].count)[:most]


def _named(offenders: list[tuple[str, Offender]]) -> str:
    if not offenders:
        return ""
    shown = ", ".join(f"{elided(name, 40)} ({offender.count:,})" for name, offender in offenders[:3])
    return f" Lower panel: parameters with non-finite gradients, most often {shown}."


def _offender_table(opened: OpenedRun) -> Table:
    rows = []
    for name, offender in _worst(opened, _MOST_NAMED):
        phases = ", ".join(f"{phase} {marks.count:,}" for phase, marks in offender.marks.items())
        kinds = [f"{offender.kinds.get(kind, 0):,}" for kind in ("inf", "nan")]
        rows.append([name, f"{offender.count:,}", *kinds, phases, f"{offender.first:,}", f"{offender.last:,}"])
    left = sum(len(overflows.offenders) for overflows in opened.history.overflows.values()) - len(rows)
    note = f"{counted(left, 'parameter')} with fewer overflows left out. " if left else ""
    note += f"Each overflow event names up to {MAX_TENSORS} parameters; its full count is in events.jsonl."
    head = ("parameter", "overflows", "inf", "NaN", "phases", "first step", "last step")
    return table(head, rows, numeric=(1, 2, 3, 5, 6), note=note)


def _overflow_table(opened: OpenedRun) -> Table:
    ends = opened.history.overflow_rows
    rows: list[list[Cell | str]] = []
    for event in ends.kept():
        tensors, count = event.get("tensors") or [], int(event.get("count") or 0)
        named = ", ".join(f"{name} ({kind})" for name, kind in tensors[:3])
        loss, phase = str(event.get("loss", "")), str(event["phase"])
        rows.append(
            [
                f"{event['step']:,}",
                str(event["learner"]),
                Cell(phase, "bad" if phase == "unexpected" else ""),
                scale(event["loss_scale"]),
                Cell(loss, "" if loss == "finite" else "bad"),
                named + (f" and {count - 3:,} more" if count > 3 else ""),
            ]
        )
    learner = "learner" if len(opened.history.learners) > 1 else None
    note = f"{counted(ends.between, 'overflow')} in between left out; events.jsonl has all." if ends.between else ""
    head = ("step", learner, "phase", "loss scale", "loss", "tensors with inf or NaN gradients")
    return table(head, rows, numeric=(0,), note=note)


#: Colour and marker of each phase. The markers differ too, so the phases can be told apart without colour.
MARKS: Final = {
    "calibrating": (plotting.ORANGE, "v"),
    "growth probe": (plotting.BLUE, "^"),
    "unexpected": (plotting.VERMILLION, "X"),
}
_OTHER: Final = (plotting.BLACK, "s")

#: Maximum number of bars in the plot of skipped updates.
_WINDOWS: Final = 60


@dataclass(frozen=True)
class Panel:
    """Content of one panel in a figure of loss scales: a learner of a run, or an arm of a comparison.

    There is a curve of loss scales over steps for each run, and its overflows, drawn as markers.
    """

    title: str
    scales: Sequence[Curve]
    overflows: Sequence[Overflows]


def loss_scale_plot(
    name: str, caption: str, panels: Sequence[Panel], offenders: Sequence[tuple[str, Offender]] = ()
) -> Plot:
    """Plot loss scales over steps, one axis for each panel, with markers that show the phase of each overflow.

    ``offenders`` are names and overflows of parameters with non-finite gradients. Each gets a row of markers
    below the panels.
    """
    rows = 0.22 * len(offenders) + 0.1 if offenders else 0.0
    heights = [*[1.75 if len(panels) == 1 else 1.6] * len(panels), *[rows] * bool(offenders)]
    with plotting.drawing(name, (2.5 if len(panels) == 1 else 1.6 * len(panels) + 0.3) + rows) as figure:
        grid = figure.panels(len(heights), heights)
        for axes, panel in zip(grid, panels, strict=False):
            _scale_panel(figure, axes, panel)
        if offenders:
            _offender_rows(figure, grid[-1], offenders)
        ends = [curve.extremes()[0][-1] for panel in panels for curve in panel.scales if len(curve)]
        plotting.step_axis(grid[-1], max(ends, default=1))
        figure.label("loss scale", color=plotting.GREY)
        for phase, (colour, shape) in MARKS.items():
            if any(phase in each.counts for panel in panels for each in panel.overflows):
                figure.label(f"overflow, {phase}", color=colour, marker=shape, linestyle="none", markersize=6)
    marks = [curve for panel in panels for each in panel.overflows for curve in each.marks.values()]
    marks += [curve for _, offender in offenders for curve in offender.marks.values()]
    caption += in_groups([curve for panel in panels for curve in panel.scales], EXTREMES)
    return Plot(name, caption + in_groups(marks, MARK), figure.svg, figure.charts)


def _scale_panel(figure: plotting.Drawing, axes: Axes, panel: Panel) -> None:
    alpha = 0.45 if len(panel.scales) > 1 else 1.0
    style: dict[str, Any] = {"color": plotting.GREY, "linewidth": 1.2, "alpha": alpha, "drawstyle": "steps-post"}
    for curve in panel.scales:
        figure.line(axes, "loss scale", curve.extremes(), powers=True, **style)
    for overflows in panel.overflows:
        for phase, marks in overflows.marks.items():
            figure.line(axes, f"overflow, {phase}", marks.extremes(), powers=True, **_mark(phase), markersize=6)
    plotting.power_of_two_y_axis(axes)
    if panel.title:
        axes.set_title(elided(panel.title, 40))


def _mark(phase: str) -> dict[str, Any]:
    colour, shape = MARKS.get(phase, _OTHER)
    return {"color": colour, "marker": shape, "linestyle": "none", "markeredgewidth": 0, "alpha": 0.85}


def _offender_rows(figure: plotting.Drawing, axes: Axes, offenders: Sequence[tuple[str, Offender]]) -> None:
    for row, (name, offender) in enumerate(offenders):
        for phase, marks in offender.marks.items():
            steps = [step for step, value in zip(*marks.extremes(), strict=True) if value == 1]
            figure.line(axes, f"{name}, {phase}", (steps, [row] * len(steps)), **_mark(phase), markersize=5)
    figure.name_rows(axes, [name for name, _ in offenders])
    axes.tick_params(axis="y", labelsize=9)
    axes.spines["left"].set_visible(False)


def _skipped_plot(learners: Mapping[str, LearnerHistory], refused: int) -> Plot:
    with plotting.drawing("skipped", 2.0 if len(learners) == 1 else 1.4 * len(learners) + 0.3) as figure:
        grid = figure.panels(len(learners))
        for axes, (learner, history) in zip(grid, learners.items(), strict=True):
            steps, shares, width = _windows(history.skipped)
            figure.bars(axes, "skipped (%)", (steps, [100 * share for share in shares]), width)
            axes.set_ylim(0, min(max(1, 115 * max(shares, default=0)), 100))
            axes.set_ylabel("skipped (%)")
            axes.grid(visible=False, axis="x")
            if len(learners) > 1:
                axes.set_title(elided(learner, 40))
        plotting.step_axis(grid[-1], max(history.attempts for history in learners.values()))
    what = f"{counted(refused, 'update')}, shown as a share of the steps in each interval of the run"
    return Plot("skipped", f"Skipped updates over steps: {what}.", figure.svg, figure.charts)


def _windows(skipped: Curve) -> tuple[list[float], list[float], float]:
    """Return the middles of at most `_WINDOWS` intervals, the share of skipped steps in each, and their width."""
    steps, means = skipped.means()
    together = max(math.ceil(len(means) / _WINDOWS), 1)
    groups = range(0, len(means), together)
    shares = [sum(means[at : at + together]) / len(means[at : at + together]) for at in groups]
    middles = [sum(steps[at : at + together]) / len(steps[at : at + together]) for at in groups]
    return middles, shares, together * skipped.width
