"""The report of a sweep: every point with how it ended, and what they show together."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from mptrain.comparison.ranking import metric_in_words, sweep_lead
from mptrain.comparison.settings import in_short
from mptrain.report.canvas import BLACK, LINES, SERIES, ordered_series, series
from mptrain.report.history import LearnerHistory
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
    Tone,
    facts,
    plots,
    section,
    table,
)
from mptrain.report.run_parts import environment, tried
from mptrain.report.sweep_axes import Axis, Point, kinds, numeric_axis, read_points
from mptrain.report.sweep_figures import categories_figure, cliffs_figure, overlay_figure
from mptrain.report.wording import counted, duration, moment, number, rate, scale_path, share
from mptrain.runlog.storage import readable_bytes
from mptrain.runlog.sweeps import Sweep, interval_of

#: Buckets of a curve where many share a figure.
BUCKETS: Final = 300

_TONES: Final[dict[str, Tone]] = {"done": "good", "failed": "bad", "interrupted": "warn", "preempted": "warn"}


def sweep_page(sweep: Sweep) -> Page:
    """The report of a sweep's folder."""
    points = read_points(sweep, lambda folder: tried(folder, BUCKETS))
    notes = [f"{point.job.name}: {note}" for point in points if point.opened for note in point.opened.history.notes]
    return Page(
        over="mptrain, report of a sweep",
        title=sweep_title(sweep),
        status=standing(sweep),
        lead=sweep_lead(sweep.jobs, {point.job.number: point.summary for point in points}, number),
        sections=(
            section("What was varied", sweep_plot(points)),
            section("Points", points_table(points), Bullets(tuple(notes), "warn") if notes else None),
            section("Curves", overlays(points)),
            section("Environment", *environments(points)),
            section("Commands", *command_blocks(sweep)),
        ),
    )


def sweep_title(sweep: Sweep) -> str:
    """The words that were given several values."""
    words = [word for word in sweep.words if "," in word or "(" in word]
    return " ".join(words) or " ".join(sweep.words) or sweep.folder.resolve().name


def standing(sweep: Sweep) -> Cell:
    """How many of its jobs are done."""
    counts = Counter(job.status for job in sweep.jobs)
    done, total = counts["done"], len(sweep.jobs)
    if done == total:
        return Cell(f"{total:,} of {total:,} done", "good")
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    return Cell(f"{done:,} of {total:,} done{failed}", "bad" if failed else "warn")


def metric_name(points: Sequence[Point]) -> str:
    """The metric of the runs, and the split that it is of."""
    found = next((point.opened for point in points if point.opened and point.opened.metric), None)
    return metric_in_words(found.run.summary) if found else "metric"


def sweep_plot(points: Sequence[Point]) -> Plots | None:
    """The final metric over what was varied, where there is any."""
    if all(point.summary.get("metric") is None for point in points):
        return None
    name = metric_name(points)
    axis = numeric_axis(points)
    if axis is None:
        return plots(Plot("categories", f"{name} of every run.", categories_figure(points, name)))
    return plots(cliffs_plot("cliffs", points, axis, name))


def cliffs_plot(name: str, points: Sequence[Point], axis: Axis, metric: str) -> Plot:
    """Metric and skipped share over a numeric key, with what its marks mean."""
    level = any(point.setting(axis.key) is None for point in points)
    failed = any(point.metric is None for point in points if point.setting(axis.key) is not None)
    marks = ["dots are runs, lines go through their means"]
    marks += ["a cross marks runs that failed or diverged"] * failed
    marks += ["a dashed line is the mean of runs without this key"] * level
    caption = f"{metric} and the share of skipped updates over {axis.key}: {'; '.join(marks)}."
    return Plot(name, caption, cliffs_figure(name, points, axis, metric))


def points_table(points: Sequence[Point]) -> Table:
    """A row for each point."""
    keys = list(dict.fromkeys(key for point in points for key in point.words))
    intervals = any(point.done and interval_of(point.summary) for point in points)
    rows: list[list[Cell | str]] = []
    for point in points:
        job, summary = point.job, point.summary
        code = f" ({job.code})" if job.code else ""
        learners = list((summary.get("learners") or {}).values())
        throughput = summary.get("steady_terms_per_second") or summary.get("terms_per_second")
        rows.append(
            [
                f"{job.number}",
                *(point.words.get(key, "") for key in keys),
                Cell(job.status + code, _TONES.get(job.status, "")),
                number(summary.get("metric") if point.done else None),
                *([_interval(point)] if intervals else []),
                share(point.skip_rate),
                scale_path(learners[0]["scale"]) if learners and learners[0].get("scale") else "",
                rate(throughput),
                readable_bytes(int(summary.get("peak_memory") or 0)) if summary else "",
                duration(job.seconds),
                job.reason or point.problem,
            ]
        )
    term = next((point.summary.get("term") for point in points if point.summary), "samples")
    first = len(keys)
    head = (
        "",
        *keys,
        "status",
        metric_name(points),
        *(["95 % CI"] if intervals else []),
        "skipped",
        "loss scale",
        f"{term}/s",
        "peak memory",
        "time",
        "reason",
    )
    numeric = {metric_name(points), "95 % CI", "skipped", f"{term}/s", "peak memory", "time"}
    return table(head, rows, numeric=(0, *(at for at, name in enumerate(head) if at > first and name in numeric)))


def _interval(point: Point) -> str:
    """The 95 % CI over test samples of a point's metric; empty where there is none."""
    ends = interval_of(point.summary) if point.metric is not None else None
    return f"{number(ends[0])} to {number(ends[1])}" if ends else ""


def overlays(points: Sequence[Point]) -> Plots | None:
    """Losses and loss scales of all runs, each in one figure."""
    runs = [point for point in points if point.opened and point.opened.history.learners]
    if not runs:
        return None
    axis = numeric_axis(runs)
    if axis is not None:
        runs = sorted(runs, key=lambda point: (point.setting(axis.key) is None, point.setting(axis.key) or 0.0))
    groups = kinds(runs)
    along = [name for name, some in groups.items() if axis is not None and some[0].setting(axis.key) is not None]
    if axis is not None and len(axis.values) == len(along):  # one kind for each value: the value is name enough
        groups = {
            in_short({axis.key: some[0].words[axis.key]}) if name in along else name: some
            for name, some in groups.items()
        }
        rest = len(groups) - len(along)
        styles = [*ordered_series(len(along)), *((BLACK, LINES[at % len(LINES)]) for at in range(rest))]
    else:
        styles = series(len(groups)) if len(groups) <= 2 * len(SERIES) else ordered_series(len(groups))
    losses = {name: [_first(point).loss for point in some] for name, some in groups.items()}
    scales = {name: [_first(point).loss_scale for point in some] for name, some in groups.items()}
    scaled = any(point.opened.history.scaled for point in runs if point.opened)
    alone = all(len(point.opened.history.learners) == 1 for point in runs if point.opened)
    whose = "of every run" if alone else "of the first learner of every run"
    return plots(
        Plot(
            "losses",
            f"Training loss {whose}; long ones smoothed.",
            overlay_figure("losses", "training loss", losses, styles),
        ),
        Plot("scales", f"Loss scale {whose}.", overlay_figure("scales", "loss scale", scales, styles, powers=True))
        if scaled
        else None,
    )


def _first(point: Point) -> LearnerHistory:
    """The first learner of a run that has one."""
    return next(iter(point.opened.history.learners.values())) if point.opened else LearnerHistory.empty(1)


def environments(points: Sequence[Point]) -> list[Block]:
    """Where the runs were computed: once for all that agree."""
    found: dict[Any, list[Point]] = {}
    for point in points:
        if point.opened:
            rows = environment(point.opened.run, point.opened.settings).rows
            same = tuple(row for row in rows if row[0] in ("device", "versions", "commit"))
            found.setdefault(same, []).append(point)
    if len(found) == 1:
        return [facts(*next(iter(found)))]
    return [
        facts((counted(len(some), "run"), ", ".join(point.job.name for point in some[:8])), *same)
        for same, some in found.items()
    ]


def command_blocks(sweep: Sweep) -> list[Block]:
    """What was asked for, and the plain command of every job."""
    given = [word for folder in sweep.config_dirs for word in ("--config-dir", folder)]
    given += ["--config-name", sweep.config_name] if sweep.config_name != "train" else []
    jobs = "\n".join(shlex.join(["mptrain", *given, *job.overrides]) for job in sweep.jobs)
    blocks: list[Block] = []
    if sweep.kind == "sweep":
        blocks.append(Code(shlex.join(["mptrain", "-m", *given, *sweep.words]), "sh"))
    elif sweep.kind == "comparison":
        asked = [f"--{flag}={sweep.plan[flag]}" for flag in ("reference", "margin", "metric") if sweep.plan.get(flag)]
        claimed = sweep.plan.get("claimed")
        asked += [f"--by={','.join(map(str, claimed))}"] if isinstance(claimed, list) and claimed else []
        blocks.append(Code(shlex.join(["mptrain", "compare", *given, *sweep.words, *asked]), "sh"))
    if sweep.jobs:
        blocks.append(Fold(f"The command of each of its {counted(len(sweep.jobs), 'job')}", (Code(jobs, "sh"),)))
    started = ("planned", moment(sweep.started))
    return [facts(("folder", str(sweep.folder)), started, ("jobs at a time", str(sweep.parallel))), *blocks]
