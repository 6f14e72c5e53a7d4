"""What is printed when a sweep has ended: a row for each job, and why jobs failed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from mptrain.cli.messages import drawing_console, printable, say
from mptrain.comparison.ranking import sweep_lead
from mptrain.runlog.sweeps import summary_of

if TYPE_CHECKING:
    from mptrain.runlog.sweeps import Sweep, SweepJob

#: Status to its colour, wherever jobs are shown.
COLOURS: dict[str, str] = {
    "done": "green",
    "running": "cyan",
    "failed": "bold red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "waiting": "dim",
}


_WIDE = 120


def print_outcome(sweep: Sweep) -> None:
    """Print one row a job, relative to the sweep's folder, and which setting was best as far as 95 % CIs tell.

    Then comes a row for each job that failed, with the file of its output.

    Raises:
        StorageError: Standard output takes no more.
    """
    arms = any(job.arm for job in sweep.jobs)
    runs = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= _WIDE  # they are named after their points
    table = _table(
        "#", *(["arm"] if arms else []), "point", "status", "exit", "metric", "skipped", *(["run"] if runs else [])
    )
    summaries = {job.number: summary_of(sweep.paths.run(job.name)) for job in sweep.jobs if job.status == "done"}
    for job in sweep.jobs:
        summary = summaries.get(job.number, {})
        status = f"[{COLOURS[job.status]}]{job.status}[/]"
        code = "" if job.code is None else str(job.code)
        cells = [*([escape(printable(job.arm))] if arms else []), escape(printable(job.label)), status, code]
        cells += [
            escape(printable(metric_in_words(summary))),
            skipped_in_words(summary),
            *([escape(printable(job.name))] if runs else []),
        ]
        table.add_row(str(job.number), *cells)
    _print(table)
    if sweep.kind == "sweep" and sum(summary.get("metric") is not None for summary in summaries.values()) > 1:
        say(f"\n{printable(sweep_lead(sweep.jobs, summaries, '{:.4f}'.format))}")
    _print_living([job for job in sweep.jobs if job.status == "running" and job.reason])
    failed = [job for job in sweep.jobs if job.status == "failed"]
    if failed:
        reasons = _table("#", "why it failed", "what it printed")
        for job in failed:
            log = str(sweep.paths.log(job.name))
            reasons.add_row(str(job.number), escape(printable(job.reason)), escape(printable(log)))
        _print(reasons)


def _print_living(jobs: Sequence[SweepJob]) -> None:
    """Name the jobs that were left to the processes that still run them."""
    if not jobs:
        return
    say(
        f"\n{len(jobs)} of the jobs {'are' if len(jobs) > 1 else 'is'} still run by processes of an earlier time, which were left alone:"
    )
    for job in jobs:
        say(f"  {job.number}  {printable(job.label)}  {printable(job.reason)}")


def metric_in_words(summary: Mapping[str, Any]) -> str:
    """The metric of record of a summary: ``top1=0.9673 (test)``."""
    metric, name = summary.get("metric"), summary.get("metric_name", "metric")
    return f"{name}={metric:.4f} ({summary.get('metric_split')})" if isinstance(metric, (int, float)) else ""


def skipped_in_words(summary: Mapping[str, Any]) -> str:
    """The refused updates of all learners of a summary."""
    learners = summary.get("learners") or {}
    return str(sum(learner["skipped"] for learner in learners.values())) if learners else ""


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in ("#", "exit", "skipped") else "left", overflow="fold")
    return table


def _print(table: Table) -> None:
    console = drawing_console(None if sys.stdout.isatty() else 200)
    with console.capture() as drawn:
        console.print(table)
    say("\n" + "\n".join(line.rstrip() for line in drawn.get().splitlines()), styled=True)
