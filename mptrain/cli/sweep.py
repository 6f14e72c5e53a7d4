"""``mptrain -m``: checks every point, runs them, prints a table."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mptrain.campaign.points import expand, require_devices, validate
from mptrain.campaign.sweep import (
    Job,
    JobOutcome,
    in_this_process,
    prepare,
    run,
    sweep_folder,
    words_to_finish,
)
from mptrain.cli.messages import colourful, each_warning_once, printable, report, warn
from mptrain.config.compose import Composer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mptrain.cli.flags import Flags

_COLOURS = {
    "done": "green",
    "failed": "red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "not run": "dim",
}


def sweep(flags: Flags) -> int:
    """Runs all combinations of a command line's values.

    Returns:
        0; 7 where a job failed; 130 or 75 where a signal ended the sweep.

    Raises:
        ConfigError: A point is wrong; then none is run.
        EnvironmentRefused: This machine cannot run a point; then none is run either.
        StorageError: The sweep's folder cannot be made.
    """
    with each_warning_once():
        return _sweep(flags)


def _sweep(flags: Flags) -> int:
    composer = Composer(flags.config_dirs, flags.config_name)
    points = validate(expand(flags.overrides, composer.catalogue), composer)
    print(f"{len(points)}/{len(points)} points valid")
    warn(sentence for point in points for sentence in point.warnings)
    require_devices(points)
    options = composer.compose(points[0].overrides).run
    folder = sweep_folder(Path(options.root), options.name)
    print(f"sweep={folder}", flush=True)
    jobs = prepare(points, composer, folder)

    from mptrain.cli.train import train

    outcomes, code = run(jobs, in_this_process(train, report, lambda job: _announce(job, len(jobs))))
    print(f"\nsweep={folder}")
    print_outcomes(outcomes)
    if any(outcome.status in ("interrupted", "preempted", "not run") for outcome in outcomes):
        words = words_to_finish(flags.overrides, Path(options.root), folder)
        print(f"\nto run the rest: {shlex.join(['mptrain', *flags.given, *words])}", flush=True)
    return code


def print_outcomes(outcomes: Sequence[JobOutcome]) -> None:
    """Prints one row a job: point, status, exit code, metric, run directory, and why jobs failed.

    Directories are relative to the folder that all jobs have in common.
    """
    terminal = colourful(sys.stdout)
    table = Table(box=None, pad_edge=False, header_style="bold")
    reasons = any(outcome.reason for outcome in outcomes)
    for name in ("#", "point", "status", "exit", "metric", "run", *(["reason"] if reasons else [])):
        table.add_column(name, justify="right" if name in ("#", "exit") else "left", overflow="fold")
    for outcome in outcomes:
        status = f"[{_COLOURS[outcome.status]}]{outcome.status}[/]"
        code = "" if outcome.code is None else str(outcome.code)
        point, metric = outcome.job.point, metric_in_words(outcome.summary)
        cells = [escape(point.label), status, code, metric, escape(outcome.job.root.name)]
        table.add_row(str(point.number), *cells, *([escape(printable(outcome.reason))] if reasons else []))
    console = Console(width=None if terminal else 200, no_color=not terminal, force_terminal=terminal or None)
    with console.capture() as drawn:
        console.print(table)
    print()
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()), flush=True)


def metric_in_words(summary: dict[str, Any]) -> str:
    """The metric of record of a summary: ``top1=0.9673``."""
    metric, name = summary.get("metric"), summary.get("metric_name", "metric")
    return f"{name}={metric:.4f} ({summary.get('metric_split')})" if isinstance(metric, (int, float)) else ""


def _announce(job: Job, count: int) -> None:
    print(f"\npoint {job.point.number + 1}/{count}: {job.point.label}", flush=True)
