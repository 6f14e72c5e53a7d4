"""Reports of several runs: the points of a sweep with their status, or chosen runs in the same figures.

Failed runs are never left out: they are marked as failed at the edge of the plot.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from mptrain.config.config_diff import IGNORED, is_below, short_label
from mptrain.report import plotting
from mptrain.report.page import (
    Block,
    Bullets,
    Cell,
    Code,
    Fold,
    Page,
    Plot,
    Plots,
    Table,
    facts,
    plots,
    section,
    table,
)
from mptrain.report.plotting import SERIES, ordered_series, series
from mptrain.report.run_blocks import (
    OpenedRun,
    environment,
    job_status,
    open_or_reason,
    open_with_history,
    shared_parts,
)
from mptrain.report.run_history import BUCKETS, EXTREMES, MEAN, Curve, LearnerHistory, in_groups
from mptrain.report.run_page import LONG
from mptrain.runlog.atomic_files import readable_bytes
from mptrain.runlog.run_reader import Run
from mptrain.runlog.sweeps import Sweep, interval_of, overrides_of, varied_keys
from mptrain.study.comparison.ranking import sweep_lead
from mptrain.study.pages.sweep_points import Axis, OpenedPoint, kinds, metric_name, numeric_axis, read_points
from mptrain.system.words import counted, duration, elided, moment, number, rate, scale_path, share


def sweep_page(sweep: Sweep) -> Page:
    """Return the report of a sweep: status, results over the varied keys, table and curves of all runs, commands."""
    points = read_points(sweep, lambda folder: open_or_reason(folder, BUCKETS))
    notes = [f"{point.job.name}: {note}" for point in points if point.opened for note in point.opened.history.notes]
    return Page(
        over="mptrain sweep report",
        title=sweep_title(sweep),
        status=progress_cell(sweep),
        lead=sweep_lead(sweep.jobs, {point.job.number: point.summary for point in points}, number),
        sections=(
            section("Results over the varied keys", sweep_plot(points)),
            section("Points", points_table(points), Bullets(tuple(notes), "warn")),
            section("Curves", overlays(points)),
            section(
                "Environment", *environments(points), *shared_parts(point.opened for point in points if point.opened)
            ),
            section("Commands", *command_blocks(sweep)),
        ),
    )


def sweep_title(sweep: Sweep) -> str:
    """Return the title of a sweep's report: its overrides with several values, such as ``scaler.scale=1,128``.

    Without such overrides the title is all overrides, or the name of the folder if there are none.
    """
    words = [word for word in sweep.words if "," in word or "(" in word]
    return " ".join(words) or " ".join(sweep.words) or sweep.folder.resolve().name


def progress_cell(sweep: Sweep) -> Cell:
    """Return the number of done and failed jobs (runs) of a sweep as a table cell: ``3 of 4 done, 1 failed``."""
    counts = Counter(job.status for job in sweep.jobs)
    done, total = counts["done"], len(sweep.jobs)
    if done == total:
        return Cell(f"{total:,} of {total:,} done", "good")
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    return Cell(f"{done:,} of {total:,} done{failed}", "bad" if failed else "warn")


def sweep_plot(points: Sequence[OpenedPoint]) -> Plots | None:
    """Return the figure of the final metrics of a sweep's runs over a numeric key.

    None without such a key, or if no run has a metric.
    """
    axis = numeric_axis(points)
    if axis is None or all(point.summary.get("metric") is None for point in points):
        return None
    return plots(cliffs_plot("cliffs", points, axis, metric_name(points)))


def points_table(points: Sequence[OpenedPoint]) -> Table:
    """Return the table of a sweep's points (runs): overrides, status, metric, skipped share, loss scale, speed."""
    keys = list(dict.fromkeys(key for point in points for key in point.words))
    intervals = any(point.done and interval_of(point.summary) for point in points)
    rows: list[list[Cell | str]] = []
    for point in points:
        job, summary = point.job, point.summary
        learners = list((summary.get("learners") or {}).values())
        ends = interval_of(summary) if point.metric is not None else None
        rows.append(
            [
                f"{job.number}",
                *(point.words.get(key, "") for key in keys),
                job_status(job),
                number(summary.get("metric") if point.done else None),
                f"{number(ends[0])} to {number(ends[1])}" if ends else "",
                number(summary.get("test_metric")) if point.done else "",
                share(point.skip_rate),
                scale_path(learners[0]["scale"]) if learners and learners[0].get("scale") else "",
                rate(summary.get("steady_terms_per_second") or summary.get("terms_per_second")),
                readable_bytes(int(summary.get("peak_memory") or 0)) if summary else "",
                duration(job.seconds),
                job.reason or point.problem,
            ]
        )
    speed = f"{next((point.summary.get('term') for point in points if point.summary), 'samples')}/s"
    interval = "95 % CI" if intervals else None
    test = "test" if any("test_metric" in point.summary for point in points) else None
    measured = (metric_name(points), interval, test, "skipped", "loss scale", speed, "peak memory", "time")
    first = len(keys) + 2
    numeric = {0, *range(first, first + len(measured))} - {first + measured.index("loss scale")}
    return table(("", *keys, "status", *measured, "reason"), rows, numeric)


def overlays(points: Sequence[OpenedPoint]) -> Plots | None:
    """Return the figures with the curves of all runs of a sweep: losses, and loss scales if any is not 1."""
    runs = [point for point in points if point.opened and point.opened.history.learners]
    if not runs:
        return None
    axis = numeric_axis(runs)
    if axis is not None:
        runs = sorted(runs, key=lambda point: (point.setting(axis.key) is None, point.setting(axis.key) or 0.0))
    groups = kinds(runs)
    along = [name for name, some in groups.items() if axis is not None and some[0].setting(axis.key) is not None]
    if axis is not None and len(axis.values) == len(along):  # one kind for each value, so the value is the label
        groups = {
            short_label({axis.key: some[0].words[axis.key]}) if name in along else name: some
            for name, some in groups.items()
        }
        rest = len(groups) - len(along)
        styles = [
            *plotting.ordered_series(len(along)),
            *((plotting.BLACK, plotting.LINES[at % len(plotting.LINES)]) for at in range(rest)),
        ]
    else:
        styles = (
            plotting.series(len(groups))
            if len(groups) <= 2 * len(plotting.SERIES)
            else plotting.ordered_series(len(groups))
        )
    alone = all(len(point.opened.history.learners) == 1 for point in runs if point.opened)
    whose = "of every run" if alone else "of the first learner of every run"
    losses = {name: [_first(point).loss for point in some] for name, some in groups.items()}
    scales = {name: [_first(point).loss_scale for point in some] for name, some in groups.items()}
    caption = f"Training loss {whose}. Long curves are smoothed."
    figures = [overlay_plot("losses", "training loss", caption, losses, styles)]
    if any(point.opened.history.scaled for point in runs if point.opened):
        figures.append(overlay_plot("scales", "loss scale", f"Loss scale {whose}.", scales, styles))
    return plots(*figures)


def _first(point: OpenedPoint) -> LearnerHistory:
    return next(iter(point.opened.history.learners.values())) if point.opened else LearnerHistory.empty(1)


def environments(points: Sequence[OpenedPoint]) -> list[Block]:
    """Return device, versions and commit of the runs of a sweep, once for each group of runs that agree."""
    groups: dict[Any, list[OpenedPoint]] = {}
    for point in points:
        if point.opened:
            rows = environment(point.opened.run, point.opened.settings).rows
            same = tuple(row for row in rows if row[0] in ("device", "versions", "commit"))
            groups.setdefault(same, []).append(point)
    if len(groups) == 1:
        return [facts(*next(iter(groups)))]
    return [
        facts((counted(len(some), "run"), ", ".join(point.job.name for point in some[:8])), *same)
        for same, some in groups.items()
    ]


def command_blocks(sweep: Sweep) -> list[Block]:
    """Return the command of a sweep or comparison and, collapsed, the command of each of its jobs (runs)."""
    given = [word for folder in sweep.config_dirs for word in ("--config-dir", folder)]
    given += ["--config-name", sweep.config_name] if sweep.config_name != "train" else []
    jobs = "\n".join(shlex.join(["mptrain", *given, *job.overrides]) for job in sweep.jobs)
    blocks: list[Block] = []
    if sweep.kind == "sweep":
        asked = [f"--objective={name}"] if (name := sweep.plan.get("objective")) else []
        blocks.append(Code(shlex.join(["mptrain", "-m", *given, *asked, *sweep.words]), "sh"))
    elif sweep.kind == "comparison":
        asked = [f"--{flag}={sweep.plan[flag]}" for flag in ("reference", "margin", "metric") if sweep.plan.get(flag)]
        claimed = sweep.plan.get("claimed")
        asked += [f"--by={','.join(map(str, claimed))}"] if isinstance(claimed, list) and claimed else []
        blocks.append(Code(shlex.join(["mptrain", "compare", *given, *sweep.words, *asked]), "sh"))
    if sweep.jobs:
        blocks.append(Fold(f"Commands of {counted(len(sweep.jobs), 'job')}", (Code(jobs, "sh"),)))
    started = ("planned", moment(sweep.started))
    return [facts(("folder", str(sweep.folder)), started, ("parallel jobs", str(sweep.parallel))), *blocks]


_FAILED: Final = "failed or diverged"


def cliffs_plot(name: str, points: Sequence[OpenedPoint], axis: Axis, metric: str) -> Plot:
    """Plot the final metric and the share of skipped updates of a sweep's runs over a numeric key.

    Each combination of the other keys has a line through the means of its runs. Failed runs are marked with crosses.
    """
    swept = [point for point in points if point.setting(axis.key) is not None]
    rest = kinds([point for point in points if point.setting(axis.key) is None])
    level = {kind: fmean(known) for kind, members in rest.items() if (known := _metrics(members))}
    groups = kinds(swept, (axis.key,))
    colours = dict(zip([*groups, *level], plotting.series(len(groups) + len(level)), strict=True))
    failed = sorted({axis.position(point) for point in swept if _failed(point)})
    lines: dict[str, Any] = {}
    with plotting.drawing(name, 4.0) as figure:
        above, below = figure.panels(2, (3, 2))
        for kind, members in groups.items():
            shares = [(axis.position(point), 100 * point.skip_rate) for point in members if point.skip_rate is not None]
            metrics = [(axis.position(point), point.metric) for point in members if point.metric is not None]
            for axes, values in ((below, shares), (above, metrics)):
                lines[kind] = plotting.dots_and_means(axes, values, *colours[kind], means={}, edge=True, markersize=4.5)
        levels = [
            above.axhline(mean, color=colours[kind][0], linestyle="--", linewidth=1.3) for kind, mean in level.items()
        ]
        plotting.numeric_y_axis(above)
        for kind, line in [*lines.items(), *zip(level, levels, strict=True)]:
            if kind:
                figure.label(elided(kind, plotting.NAME), line)
        if failed:
            _failures(above, failed)
            figure.label(_FAILED, **plotting.FAILED)
        above.set_ylabel(elided(metric, 22))
        below.set_ylabel("skipped (%)")
        below.set_ylim(-4, 104)
        _key_across(below, axis)
    marks = ["Dots are runs, and lines join their means."]
    marks += ["Crosses mark runs that failed or diverged."] * any(point.metric is None for point in swept)
    marks += ["Dashed lines are means of runs without this key."] * (len(swept) < len(points))
    caption = f"{metric} and share of skipped updates over {axis.key}. {' '.join(marks)}"
    return Plot(name, caption, figure.svg)


def overlay_plot(
    name: str,
    unit: str,
    caption: str,
    groups: Mapping[str, Sequence[Curve]],
    styles: Sequence[tuple[str, str]],
    factor: float = 30,
) -> Plot:
    """Plot one curve for each run of a sweep: smoothed if it is long, or as steps between powers of two for ``scales``.

    Runs of a group differ only in their seed, and each group has a colour and line style. ``unit`` labels
    the vertical axis, which is logarithmic if positive values span more than ``factor``.
    """
    curves = [curve for some in groups.values() for curve in some]
    with plotting.drawing(name, 2.7) as figure:
        (axes,) = figure.panels()
        for (group, some), (colour, line) in zip(groups.items(), styles, strict=True):
            style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.3, "alpha": 0.9}
            for curve in some:
                if name == "scales":
                    figure.line(axes, group or unit, curve.extremes(), powers=True, drawstyle="steps-post", **style)
                else:
                    points = curve.smooth() if len(curve) > LONG else curve.means()
                    figure.line(axes, group or unit, points, **style)
            if 1 < len(groups) <= plotting.MOST_NAMED:
                figure.label(elided(group, plotting.NAME), **style)
        if name == "scales":
            plotting.power_of_two_y_axis(axes)
        else:
            plotting.numeric_y_axis(
                axes, [value for curve in curves for value in curve.means()[1] if not math.isnan(value)], factor
            )
        axes.set_ylabel(unit)
        plotting.step_axis(axes, max((curve.means()[0][-1] for curve in curves if len(curve)), default=1))
    caption += in_groups(curves, EXTREMES if name == "scales" else MEAN)
    return Plot(name, caption, figure.svg, figure.charts)


def _metrics(points: Sequence[OpenedPoint]) -> list[float]:
    return [point.metric for point in points if point.metric is not None]


def _failed(point: OpenedPoint) -> bool:
    return point.metric is None and (point.job.status == "failed" or (point.done and "metric" in point.summary))


def _failures(axes: Axes, positions: Sequence[float]) -> None:
    """Draw crosses at the lower edge with a vertical line, so that they are not mistaken for values."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.06 * (high - low), high)
    axes.vlines(
        positions, 0, 1, transform=axes.get_xaxis_transform(), color=plotting.VERMILLION, linewidth=0.8, alpha=0.35
    )
    plotting.failures_at(axes, positions, 0.03)


def _key_across(axes: Axes, axis: Axis) -> None:
    base = axis.logarithm
    positions = [math.log(value, base) if base else value for value in axis.values]
    span = max(positions[-1] - positions[0], 1e-12)
    shown: list[float] = []
    for position in positions:
        if not shown or position - shown[-1] >= span / 8.5:
            shown.append(position)
    plotting.ticks_at(
        axes.xaxis,
        shown,
        lambda value: plotting.power_of_two(value) if base == 2 else plotting.tick(base**value if base else value),
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(positions[0] - 0.04 * span, positions[-1] + 0.04 * span)
    axes.set_xlabel(f"{elided(axis.key, 40)}{', logarithmic' if base else ''}")


def runs_page(folders: Sequence[Path]) -> Page:
    """Return the report of the runs in several directories: curves of all in the same figures, and a table.

    Raise StorageError if a directory is not a run, or is too damaged to read.
    """
    opened = [open_with_history(folder, BUCKETS) for folder in folders]
    runs = dict(zip(labels([run.run for run in opened]), opened, strict=True))
    notes = tuple(f"{name}: {note}" for name, run in runs.items() for note in run.history.notes)
    rows = [
        (
            *(name, run.status, f"{run.history.steps:,}", run.metric, number(run.run.summary.get("metric"))),
            *(share(run.skip_rate), str(run.run.paths.root)),
        )
        for name, run in runs.items()
    ]
    head = ("run", "status", "steps", "metric", "value", "skipped", "folder")
    return Page(
        over="mptrain runs report",
        title=" and ".join(runs) if len(runs) < 4 else counted(len(runs), "run"),
        status=Cell(""),
        lead=f"Curves of {counted(len(runs), 'run')} without a verdict: differences may be chance.",
        sections=(
            section("Curves", plots(*_figures(runs))),
            section("Runs", table(head, rows, numeric=(2, 4, 5)), Bullets(notes, "warn"), *shared_parts(opened)),
            section("Command", Code(shlex.join(["mptrain", "report", *map(str, folders), "--together"]), "sh")),
        ),
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a distinct label of each run: the overrides in which they differ, with its folder where needed."""
    keys = [key for key in varied_keys(runs) if not is_below(key, IGNORED)]
    tables = [{key: value for key, value in overrides_of(run).items() if key in keys} for run in runs]
    short = [short_label(table) for table in tables]
    folders = Counter(run.paths.root.name for run in runs)
    names = [run.paths.root.name if folders[run.paths.root.name] == 1 else str(run.paths.root) for run in runs]
    repeated = Counter(short)
    return [
        label if label and repeated[label] == 1 else f"{label} ({name})" if label else name
        for label, name in zip(short, names, strict=True)
    ]


def _figures(runs: dict[str, OpenedRun]) -> Iterator[Plot]:
    def of_learners(take: Callable[[LearnerHistory], Curve]) -> dict[str, Curve]:
        return {
            name if len(run.history.learners) == 1 else f"{name}, {learner}": take(history)
            for name, run in runs.items()
            for learner, history in run.history.learners.items()
        }

    def of_metric(metric: str) -> dict[str, Curve]:
        return {name: run.history.evaluations.get("val", {}).get(metric, Curve()) for name, run in runs.items()}

    figures = [("losses", "training loss", of_learners(lambda learner: learner.loss))]
    metrics = ["loss", *dict.fromkeys(run.metric for run in runs.values() if run.metric not in ("", "loss"))]
    figures += [(f"validation-{at}", f"validation {name}", of_metric(name)) for at, name in enumerate(metrics)]
    figures.append(("grad-norms", "gradient norm", of_learners(lambda learner: learner.grad_norm)))
    figures.append(("rates", "learning rate", of_learners(lambda learner: learner.lr)))
    if any(run.history.scaled for run in runs.values()):
        figures.append(("scales", "loss scale", of_learners(lambda learner: learner.loss_scale)))
    names = list(dict.fromkeys(name for *_, curves in figures for name in curves))
    drawn = series(len(names)) if len(names) <= 2 * len(SERIES) else ordered_series(len(names))
    styles = dict(zip(names, drawn, strict=True))
    for file, unit, curves in figures:
        shown = {name: [curve] for name, curve in curves.items() if curve.finite()}
        if shown:
            smoothed = "" if file == "scales" else " Long curves are smoothed."
            caption = f"{unit[0].upper()}{unit[1:]} of every run.{smoothed}"
            factor = math.inf if file == "rates" else 30
            yield overlay_plot(file, unit, caption, shown, [styles[name] for name in shown], factor)
