"""Report of several chosen runs in the same figures, without any verdict on their differences."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mptrain.config.config_diff import IGNORED, is_below, short_label
from mptrain.numerics.words import counted, number, share
from mptrain.report.page import Bullets, Cell, Code, Page, Plot, plots, section, table
from mptrain.report.plotting import SERIES, ordered_series, series
from mptrain.report.run_blocks import OpenedRun, open_with_history, shared_parts
from mptrain.report.run_history import BUCKETS, Curve, LearnerHistory
from mptrain.runlog.run_reader import Run
from mptrain.runlog.sweeps import overrides_of, varied_keys
from mptrain.study.pages.sweep_page import overlay_plot


def runs_page(folders: Sequence[Path]) -> Page:
    """Return the report of the runs in several directories: curves of all in the same figures, and a table.

    Raise StorageError if a directory is not a run, or is too damaged to read.
    """
    opened = [open_with_history(folder, BUCKETS) for folder in folders]
    runs = dict(zip(labels([one.run for one in opened]), opened, strict=True))
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

    found = [("losses", "training loss", of_learners(lambda learner: learner.loss))]
    metrics = ["loss", *dict.fromkeys(run.metric for run in runs.values() if run.metric not in ("", "loss"))]
    found += [(f"validation-{at}", f"validation {name}", of_metric(name)) for at, name in enumerate(metrics)]
    found.append(("grad-norms", "gradient norm", of_learners(lambda learner: learner.grad_norm)))
    found.append(("rates", "learning rate", of_learners(lambda learner: learner.lr)))
    if any(run.history.scaled for run in runs.values()):
        found.append(("scales", "loss scale", of_learners(lambda learner: learner.loss_scale)))
    names = list(dict.fromkeys(name for *_, curves in found for name in curves))
    drawn = series(len(names)) if len(names) <= 2 * len(SERIES) else ordered_series(len(names))
    styles = dict(zip(names, drawn, strict=True))
    for file, unit, curves in found:
        shown = {name: [curve] for name, curve in curves.items() if curve.finite()}
        if shown:
            smoothed = "" if file == "scales" else " Long curves are smoothed."
            caption = f"{unit[0].upper()}{unit[1:]} of every run.{smoothed}"
            factor = math.inf if file == "rates" else 30
            yield overlay_plot(file, unit, caption, shown, [styles[name] for name in shown], factor)
