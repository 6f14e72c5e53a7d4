"""The report of a sweep: every point with how it ended, and what they show together."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from mptrain.comparison.configurations import in_short
from mptrain.comparison.ranking import sweep_lead
from mptrain.report.canvas import BLACK, LINES, SERIES, ordered_series, series
from mptrain.report.formatting import counted, duration, moment, number, rate, scale_path, share
from mptrain.report.history import LearnerHistory
from mptrain.report.page import Block, Bullets, Cell, Code, Fold, Page, Plots, Table, Tone, facts, plots, section, table
from mptrain.report.run_parts import environment, tried
from mptrain.report.sweep_figures import categories_plot, cliffs_plot, overlay_plot
from mptrain.report.sweep_points import BUCKETS, Point, kinds, metric_name, numeric_axis, read_points
from mptrain.runlog.storage import readable_bytes
from mptrain.runlog.sweep_csv import interval_of
from mptrain.runlog.sweeps import Sweep

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
            section("Points", points_table(points), Bullets(tuple(notes), "warn")),
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


def sweep_plot(points: Sequence[Point]) -> Plots | None:
    """The final metric over what was varied, where there is any."""
    if all(point.summary.get("metric") is None for point in points):
        return None
    name, axis = metric_name(points), numeric_axis(points)
    return plots(categories_plot(points, name) if axis is None else cliffs_plot("cliffs", points, axis, name))


def points_table(points: Sequence[Point]) -> Table:
    """A row for each point."""
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
                Cell(f"{job.status} ({job.code})" if job.code else job.status, _TONES.get(job.status, "")),
                number(summary.get("metric") if point.done else None),
                f"{number(ends[0])} to {number(ends[1])}" if ends else "",
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
    measured = (metric_name(points), interval, "skipped", "loss scale", speed, "peak memory", "time")
    first = len(keys) + 2
    numeric = {0, *range(first, first + len(measured))} - {first + measured.index("loss scale")}
    return table(("", *keys, "status", *measured, "reason"), rows, numeric)


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
    alone = all(len(point.opened.history.learners) == 1 for point in runs if point.opened)
    whose = "of every run" if alone else "of the first learner of every run"
    losses = {name: [_first(point).loss for point in some] for name, some in groups.items()}
    scales = {name: [_first(point).loss_scale for point in some] for name, some in groups.items()}
    caption = f"Training loss {whose}; long ones smoothed."
    found = [overlay_plot("losses", "training loss", caption, losses, styles)]
    if any(point.opened.history.scaled for point in runs if point.opened):
        found.append(overlay_plot("scales", "loss scale", f"Loss scale {whose}.", scales, styles))
    return plots(*found)


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
