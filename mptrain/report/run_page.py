"""Report of one run, finished or not, with its figures, and the page of a classifier's answers by class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mptrain.report import plotting
from mptrain.report.gradient_histogram_blocks import gradient_histogram_blocks
from mptrain.report.loss_scale_blocks import loss_scale_blocks
from mptrain.report.page import (
    Block,
    Bullets,
    Cell,
    Page,
    Picture,
    Plot,
    Plots,
    Table,
    Text,
    Tiles,
    plots,
    section,
    table,
)
from mptrain.report.plotting import (
    BLACK,
    BLUE,
    FAILED,
    NAME,
    VERMILLION,
    Drawing,
    drawing,
    numeric_y_axis,
    series,
    step_axis,
)
from mptrain.report.run_blocks import OpenedRun, commands, environment, exhibits, open_with_history, operator_blocks
from mptrain.report.run_history import MEAN, MOST_BUCKETS, PHASES, Curve, History, Overflows, in_groups
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.run_paths import RunPaths
from mptrain.runlog.run_state import memory_in_words
from mptrain.system.words import UNKNOWN, counted, duration, elided, number, percent, rate, scale_path, share

#: Maximum metrics in one figure if the task has no main metric.
_MOST_METRICS = 4


def run_page(paths: RunPaths) -> Page:
    """Return the report of the run in a directory: summary, curves, overflows, events, environment and command.

    Raise StorageError if the directory is not a run, or ``run.json`` or another small file is damaged.
    """
    opened = open_with_history(paths.root, MOST_BUCKETS)
    history, run = opened.history, opened.run
    notes = Bullets(tuple(history.notes), "warn")
    lost = Bullets(tuple(f"{sentence}." for sentence in history.lost_updates), "warn")
    return Page(
        over="mptrain run report",
        title=opened.title(),
        status=opened.status,
        lead=_lead(opened),
        sections=(
            section(
                "Summary",
                _reason(opened),
                lost,
                Tiles(_tiles(opened)),
                _metric_table(opened),
                _learner_table(opened),
                notes,
            ),
            section("Training", *_training(opened)),
            section("Loss scale and overflows", *loss_scale_blocks(opened)),
            section("Tensors and the FP16 range", *gradient_histogram_blocks(opened)),
            section("Events", _events(opened)),
            section("Samples", *exhibits(run)),
            section("Operator dtypes", *operator_blocks(history.operators)),
            section("Environment", environment(run, opened.settings)),
            section("Command and configuration", *commands(run)),
        ),
    )


def _lead(opened: OpenedRun) -> str:
    summary, history = opened.run.summary, opened.history
    if not history.steps:
        return "No steps were recorded."
    parts = []
    if opened.metric and summary.get("metric") is not None:
        parts.append(f"{opened.metric} {number(summary['metric'])} on {summary.get('metric_split', 'test')} data")
    updates = [learner.updates for learner in history.learners.values()]
    refused = sum(learner.refused for learner in history.learners.values())
    spread = f"{updates[0]:,}" if len(set(updates)) == 1 else f"{min(updates):,} to {max(updates):,}"
    parts.append(f"{spread} updates in {history.steps:,} steps")
    none = "none of these skipped" if history.not_looked_at else "none skipped"
    skipped = f"{counted(refused, 'update')} skipped" if refused else "" if opened.left_out else none
    parts += filter(None, [skipped, opened.left_out, "not everything looked at" if history.not_looked_at else ""])
    return ", ".join(parts) + "."


def _reason(opened: OpenedRun) -> Text | None:
    state = opened.run.state
    unsaid = [what for what in opened.history.not_looked_at if what not in state.reason]
    what_to_do = f". To fix it: {state.hint}" if state.hint else ""
    texts = [f"{state.reason}{what_to_do}"] if state.reason else []
    texts += [f"not looked at: {'; '.join(unsaid)}"] if unsaid else []
    return Text(". ".join(texts), "bad" if state.status == "failed" else "warn") if texts else None


def _tiles(opened: OpenedRun) -> tuple[tuple[str, str, str], ...]:
    summary, history = opened.run.summary, opened.history
    attempts = sum(learner.attempts for learner in history.learners.values())
    refused = sum(learner.refused for learner in history.learners.values())
    planned = summary.get("planned_steps")
    rows = [
        (f"{opened.metric}, {summary.get('metric_split', '')}", number(summary.get("metric")), _about_metric(opened)),
        ("steps", f"{history.steps:,}", f"of {planned:,} planned" if planned and planned != history.steps else ""),
        ("skipped updates", share(refused / attempts) if attempts else UNKNOWN, f"{refused:,} of {attempts:,}"),
        ("throughput", *_throughput(summary)),
        ("peak memory", readable_bytes(int(summary.get("peak_memory") or 0)), _memory_before(summary)),
        ("memory of a step", *memory_in_words(summary.get("memory_by_use") or {}).partition(": ")[::2]),
        ("waiting for data", share(summary.get("data_wait")), "of the training time"),
        ("energy", _energy(summary.get("energy_joules")), "of the whole device during training"),
    ]
    keep = [bool(opened.metric), True, True, *(summary.get(key) for key in _MEASURED)]
    return tuple(row for row, present in zip(rows, keep, strict=True) if present not in (None, False))


_MEASURED = ("terms_per_second", "peak_memory", "memory_by_use", "data_wait", "energy_joules")


def _about_metric(opened: OpenedRun) -> str:
    summary = opened.run.summary
    best, interval = summary.get("best_val"), (summary.get("intervals") or {}).get(opened.metric)
    parts = [f"95 % CI {number(interval[0])} to {number(interval[1])} over test samples"] if interval else []
    parts += [f"best {number(best)} on validation data"] if best is not None else []
    return "; ".join(parts)


def _metric_table(opened: OpenedRun) -> Table | None:
    """Return all metrics of the last evaluations, or None if there are fewer than two."""
    summary = opened.run.summary
    by_split = {split: summary[split] for split in _SPLITS if summary.get(split)}
    names = sorted({name for values in by_split.values() for name in values}, key=lambda name: (name == "loss", name))
    if len(names) < 2:
        return None
    reach = summary.get("intervals") or {}
    rows = [
        [
            name,
            *(number(values.get(name)) for values in by_split.values()),
            " to ".join(map(number, reach[name])) if reach.get(name) else "",
        ]
        for name in names
    ]
    head = ("metric", *(_SPLITS[split] for split in by_split), "95 % CI over test samples" if reach else None)
    return table(head, rows, numeric=range(1, len(head)))


_SPLITS = {"val": "validation data", "test": "test data"}


def _throughput(summary: Mapping[str, Any]) -> tuple[str, str]:
    steady = summary.get("steady_terms_per_second")
    value = rate(steady if steady is not None else summary.get("terms_per_second"))
    warm = " after warm-up" if steady is not None else ""
    return (
        value,
        f"{summary.get('term', 'samples')} a second{warm}; {duration(summary.get('train_seconds'))} of training",
    )


def _memory_before(summary: Mapping[str, Any]) -> str:
    before = summary.get("memory_before")
    return f"{readable_bytes(int(before))} before the model" if before else ""


def _energy(joules: float | None) -> str:
    if joules is None or not math.isfinite(joules):
        return UNKNOWN
    return f"{joules / 1000:,.3g} kJ" if joules >= 1000 else f"{joules:.3g} J"


def _learner_table(opened: OpenedRun) -> Table:
    history = opened.history
    others = {phase for overflows in history.overflows.values() for phase in overflows.counts} - set(PHASES)
    phases = (*PHASES, *sorted(others))  # records of another version may use other phase names
    rows = []
    for name, learner in history.learners.items():
        counts = history.overflows.get(name, Overflows()).counts
        finite = learner.loss.last()
        rows.append(
            [
                name,
                f"{learner.updates:,}",
                f"{learner.refused:,}",
                number(finite[1]) if finite else "not finite",
                scale_path(learner.scale_path()) if history.scaled else "none",
                *(f"{counts.get(phase, 0):,}" for phase in phases),
            ]
        )
    head = ("learner", "updates", "skipped", "last loss", "loss scale", *(f"overflows: {phase}" for phase in phases))
    return table(head, rows, numeric=(1, 2, 3, *range(5, len(head))))


def _training(opened: OpenedRun) -> list[Block | None]:
    history, learners = opened.history, opened.history.learners
    if not learners:
        return [Text("No steps were recorded, so there are no curves.")]
    views = _views(opened)
    norms = {name: learner.grad_norm for name, learner in learners.items()}
    rates = {name: learner.lr for name, learner in learners.items()}
    return [
        plots(
            _loss_plot(history),
            _metric_plot(history, views) if views else None,
            _quantity_plot("grad-norm", "gradient norm", norms, _NORMS),
            _quantity_plot("lr", "learning rate", rates, _RATES_OF_OTHERS if opened.is_watched else _RATES),
        ),
        None if history.evaluations else Text("No evaluation was recorded yet, so there is no metric curve."),
    ]


_NORMS = "Norm of the unscaled gradients before clipping. Steps that overflowed are left out."
_RATES = "Learning rate. The schedule advances with updates, not with steps."
_RATES_OF_OTHERS = "Learning rate. Events name skipped updates after which it moved all the same."


def _views(opened: OpenedRun) -> list[MetricView]:
    """Return the metrics to plot: the task's metric, or else the first other metrics, or else losses.

    Metrics with only one point are left out.
    """
    curves = opened.history.evaluations.get("val") or opened.history.evaluations.get("test") or {}
    plottable = {name: curve for name, curve in curves.items() if len(curve.means()[0]) > 1}
    if opened.metric in plottable:
        return [MetricView(opened.metric, opened.run.summary.get("best_val"))]
    names = [name for name in plottable if name != "loss" and plottable[name].finite()]
    if opened.run.summary or any(name.endswith("_loss") for name in names):
        return [MetricView(name) for name in names[:_MOST_METRICS]]
    return [MetricView(name) for name in names[:1]]


def _events(opened: OpenedRun) -> Table:
    ends = opened.history.occurrences
    tones: dict[str, Any] = {"failure": "bad", "warning": "warn"}
    rows = [[f"{step:,}", Cell(kind, tones.get(kind, "")), text] for step, kind, text in ends.kept()]
    note = f"{counted(ends.between, 'event')} in between left out; events.jsonl has all." if ends.between else ""
    return table(("step", "event", "details"), rows, numeric=(0,), note=note)


#: Number of points from which a curve is drawn smoothed, over its raw extremes.
LONG = 100

#: Maximum number of evaluations that are drawn as dots.
_FEW = 60


@dataclass(frozen=True)
class MetricView:
    """A metric to plot in a run's report; its best validation value is marked, None if the direction is not known."""

    name: str
    best: float | None = None


def _loss_plot(history: History) -> Plot:
    learners = history.learners
    validation = history.evaluations.get("val", {}).get("loss", Curve())
    lost = sorted({step for learner in learners.values() for step in learner.loss.lost()})
    with drawing("loss", 2.7) as figure:
        (axes,) = figure.panels()
        for (name, learner), (colour, _) in zip(learners.items(), series(len(learners)), strict=True):
            label = "training loss" if len(learners) == 1 else elided(name, NAME)
            figure.label(label, _curve_with_raw(figure, axes, label, learner.loss, colour))
        if validation.finite():
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1, "linestyle": "--"}
            line = figure.line(axes, "validation loss", validation.means(), color=BLACK, **style)
            figure.label("validation loss", line)
        numeric_y_axis(axes, [value for learner in learners.values() for value in learner.loss.finite()], 30)
        if lost:
            across = axes.get_xaxis_transform()
            figure.line(
                axes, "loss not finite", (lost, [0.97] * len(lost)), transform=across, **_LOST | {"markersize": 5}
            )
            figure.label("loss not finite", **_LOST)
        axes.set_ylabel("loss")
        step_axis(axes, history.steps)
    caption = f"Loss over steps.{_smoothed([learner.loss for learner in learners.values()])}"
    return Plot("loss", caption, figure.svg, figure.charts)


def _smoothed(curves: Sequence[Curve]) -> str:
    """Return the part of a caption on how long curves are drawn; empty if all are drawn as they are."""
    if all(len(curve) < LONG for curve in curves):
        return ""
    width = max(curve.width for curve in curves)
    faint = "every step" if width == 1 else f"lowest and highest of every {width:,} steps, so that no spike is lost"
    return f" Faint: {faint}. Solid: moving mean over 2 % of the run."


_LOST = {key: value for key, value in FAILED.items() if key != "clip_on"} | {"markersize": 6}


def _curve_with_raw(figure: Drawing, axes: Axes, name: str, curve: Curve, colour: str) -> Line2D:
    """Draw a curve of a run, and return its main line, for the legend.

    A curve of less than `LONG` buckets is drawn as it is, a longer one as faint extremes with a moving mean on top.
    """
    if len(curve) < LONG:
        alone = len(curve.finite()) <= 2  # one bucket: a line needs two
        return figure.line(axes, name, curve.means(), color=colour, marker="o" if alone else "", markersize=4)
    raw = "every step" if curve.width == 1 else f"extremes of {curve.width:,} steps"
    figure.line(axes, f"{name}, {raw}", curve.extremes(), color=colour, linewidth=0.6, alpha=0.3)
    return figure.line(axes, f"{name}, moving mean", curve.smooth(), color=colour, linewidth=1.8)


def _metric_plot(history: History, views: Sequence[MetricView]) -> Plot:
    validation, tests = history.evaluations.get("val", {}), history.evaluations.get("test", {})
    with drawing("metric", 2.7 if len(views) == 1 else 1.35 * len(views) + 0.3) as figure:
        grid = figure.panels(len(views))
        for axes, view in zip(grid, views, strict=True):
            _metric(figure, axes, view, validation.get(view.name, Curve()), tests.get(view.name, Curve()))
            axes.set_ylabel(elided(view.name, 22)) if len(views) == 1 else axes.set_title(elided(view.name, 40))
        step_axis(grid[-1], history.steps)
        if any(view.name in validation for view in views):
            figure.label("validation", color=BLUE, marker="o", markersize=4)
        if any(view.best is not None for view in views):
            figure.label("best", color=BLACK, marker="o", markersize=8, markerfacecolor="none", linestyle="none")
        if any(view.name in tests for view in views):
            figure.label("test", color=VERMILLION, marker="D", markersize=6, linestyle="none")
    caption = f"{', '.join(view.name for view in views)} over steps."
    caption += in_groups([validation[view.name] for view in views if view.name in validation], MEAN)
    return Plot("metric", caption, figure.svg, figure.charts)


def _metric(figure: Drawing, axes: Axes, view: MetricView, validation: Curve, test: Curve) -> None:
    if validation.finite():
        size = 3.5 if len(validation) <= _FEW else 0
        figure.line(axes, "validation", validation.means(), color=BLUE, marker="o", markersize=size)
    if best := [point for point in zip(*validation.extremes(), strict=True) if point[1] == view.best]:
        ring: dict[str, Any] = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "linestyle": "none"}
        figure.line(axes, "best", ([best[0][0]], [best[0][1]]), color=BLACK, **ring)
    if end := test.last():
        diamond: dict[str, Any] = {"marker": "D", "markersize": 6, "linestyle": "none"}
        figure.line(axes, "test", ([end[0]], [end[1]]), color=VERMILLION, **diamond)
    numeric_y_axis(axes)


def _quantity_plot(name: str, unit: str, curves: Mapping[str, Curve], caption: str) -> Plot | None:
    """Plot a positive quantity of every learner over steps; norms on a log axis if they span a factor of 20."""
    shown = {learner: curve for learner, curve in curves.items() if curve.finite()}
    if not shown:
        return None
    with drawing(name, 2.3) as figure:
        (axes,) = figure.panels()
        for (learner, curve), (colour, _) in zip(shown.items(), series(len(shown)), strict=True):
            line = _curve_with_raw(figure, axes, unit if len(shown) == 1 else learner, curve, colour)
            if len(shown) > 1:
                figure.label(elided(learner, NAME), line)
        if name == "lr":
            numeric_y_axis(axes)
            axes.set_ylim(bottom=0)
        else:
            numeric_y_axis(axes, [value for curve in shown.values() for value in curve.finite()], 20)
        axes.set_ylabel(unit)
        step_axis(axes, max(curve.means()[0][-1] for curve in shown.values()))
    return Plot(name, f"{caption}{_smoothed(list(shown.values()))}", figure.svg, figure.charts)


#: Classes that a figure of the confusion matrix names, those that it has counts for, those of a table with the matrix,
#: and confusions that are listed.
_MOST_DRAWN, _MOST_COUNTED, _MOST_TABULATED, _MOST_LISTED = 40, 30, 20, 20

Confusion = Sequence[Sequence[int]]
Mistakes = Sequence[tuple[str, str, str, float, str]]


def by_class_page(
    title: str, split: str, names: Sequence[str], confusion: Confusion, not_finite: int, mistakes: Mistakes, png: bytes
) -> Page:
    """Return the page.

    Args:
        title: Name of the run.
        split: Name of the split.
        names: Names of the C classes.
        confusion: Numbers of samples, C rows of the true class with C columns of the class that the network said.
        not_finite: Number of samples with an output that is not finite, which have no class.
        mistakes: Name of the sample, true class, class that was said, its probability, and the sample's text, if any.
        png: Pictures of the mistakes; empty for none.
    """
    lead, lost = by_class_in_words(split, confusion, not_finite)
    svg = confusion_figure(names, confusion).svg
    figure = Plot("confusion", "Samples by true class and the class that the network said.", svg)
    shown = [
        [sample, true, predicted, number(share), elided(text, 120)] for sample, true, predicted, share, text in mistakes
    ]
    return Page(
        over="mptrain answers by class",
        title=title,
        status=Cell(""),
        lead=lead,
        sections=(
            section("Classes", *lost, class_table(names, confusion)),
            section("Confusions", Plots((figure,)), _confused(names, confusion)),
            section(
                "Most certain mistakes",
                Picture("by-class-mistakes.png", "The mistakes of which the network was most certain.", png)
                if png
                else None,
                table(
                    ("sample", "is", "said", "probability", "text" if any(row[4] for row in shown) else None),
                    shown,
                    (3,),
                ),
            ),
        ),
    )


def by_class_in_words(split: str, confusion: Confusion, not_finite: int) -> tuple[str, list[Block]]:
    """Return how many samples of a split are right, and a block on those without a class; empty if all have one."""
    total = sum(map(sum, confusion)) + not_finite
    right = sum(row[index] for index, row in enumerate(confusion))
    lead = f"{right:,} of {counted(total, 'sample')} of {split} are right ({percent(right / max(1, total), 2)})."
    return lead, [Text(f"{counted(not_finite, 'output')} are not finite, so in no class.", "bad")] if not_finite else []


def confusion_blocks(split: str, names: Sequence[str], confusion: Confusion, not_finite: int) -> list[Block]:
    """Return a confusion matrix as a table; of more than 20 classes, the most frequent confusions."""
    lead, lost = by_class_in_words(split, confusion, not_finite)
    if len(names) > _MOST_TABULATED:
        return [Text(lead), *lost, _confused(names, confusion)]
    short = [elided(name, 12) for name in names]
    rows = [[elided(name, 22), *map(str, row)] for name, row in zip(names, confusion, strict=True)]
    return [Text(lead), *lost, table((r"is \ said", *short), rows, range(1, len(names) + 1))]


def class_table(names: Sequence[str], confusion: Confusion) -> Block:
    """Return the table of the classes with the number of samples, precision, recall and F1, the worst recall first."""
    rows = []
    for index, name in enumerate(names):
        samples, predicted = sum(confusion[index]), sum(row[index] for row in confusion)
        right = confusion[index][index]
        precision = right / predicted if predicted else math.nan
        recall = right / samples if samples else math.nan
        f1 = 2 * right / (samples + predicted) if samples + predicted else math.nan
        rows.append((recall, [name, f"{samples:,}", *map(_share, (precision, recall, f1))]))
    rows.sort(key=lambda row: math.inf if math.isnan(row[0]) else row[0])
    return table(("class", "samples", "precision", "recall", "F1"), [row for _, row in rows], (1, 2, 3, 4))


def _share(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:.3f}"


def _confused(names: Sequence[str], confusion: Confusion) -> Block:
    cells = [
        (count, names[true], names[predicted])
        for true, row in enumerate(confusion)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    cells.sort(key=lambda cell: -cell[0])
    rows = [[true, predicted, f"{count:,}"] for count, true, predicted in cells[:_MOST_LISTED]]
    note = f"The {_MOST_LISTED} most frequent of {len(cells):,}." if len(cells) > _MOST_LISTED else ""
    return table(("is", "said", "samples"), rows, (2,), note)


def confusion_figure(names: Sequence[str], confusion: Confusion, title: str = "") -> Drawing:
    """Return the confusion matrix as a figure, each row as shares of its class, with counts for up to 30 classes.

    Of more than 40 classes, every second one is named, or every third, and so on.
    """
    count, every = len(names), -(-len(names) // _MOST_DRAWN)
    side = 0.36 * min(count, _MOST_DRAWN) + 1.2
    with plotting.drawing("confusion", side + 0.6) as figure:
        figure.figure.set_figwidth(max(plotting.WIDTH, side))
        (axes,) = figure.panels()
        shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        for true, row in enumerate(confusion if count <= _MOST_COUNTED else ()):
            for predicted, samples in enumerate(row):
                colour = "white" if shares[true][predicted] > 0.5 else "black"
                text = f"{samples / 1000:.0f}k" if samples >= 10_000 else f"{samples:,}" if samples else ""
                axes.text(predicted, true, text, color=colour, ha="center", va="center", size=8)
        plotting.category_y_axis(axes, names)
        plotting.ticks_at(axes.yaxis, range(0, count, every), lambda tick: elided(names[int(tick)], 22))
        plotting.ticks_at(axes.xaxis, range(0, count, every), lambda tick: elided(names[int(tick)], 12))
        axes.tick_params(axis="x", rotation=90 if max(map(len, names)) > 3 else 0, length=0)
        figure.figure.suptitle(title, x=0.02, ha="left", size=9.5)
        axes.set_xlabel("the network said")
        axes.set_ylabel("true class")
    return figure
