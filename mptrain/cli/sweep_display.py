"""Sweeps on standard output: a live table while they run, or a line when a job starts and ends; at their end a table of all jobs."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Literal

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mptrain.cli import formatting
from mptrain.cli.messages import KeyValues, printable, say, supports_colour
from mptrain.cli.panel import INTERVAL, LiveDisplay
from mptrain.cli.tables import columns_of, render_table
from mptrain.comparison.ranking import sweep_lead
from mptrain.runlog.sweeps import summary_of

if TYPE_CHECKING:
    from mptrain.runlog.sweeps import Sweep, SweepJob
    from mptrain.sweep.executor import JobProgress
    from mptrain.sweep.runner import SweepDisplay

#: Status to its colour, wherever jobs are shown.
_COLOURS: dict[str, str] = {
    "done": "green",
    "running": "cyan",
    "failed": "bold red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "waiting": "dim",
}

#: Which jobs a table that is too short for all of them shows first.
_URGENCY = ("running", "failed", "interrupted", "preempted", "done", "waiting")

#: Lines of the terminal that are left for what is not a job: heads, what was folded, the summary, the cursor.
_OTHER_LINES = 6

#: The rest of a progress bar.
_REST = "bright_black"

#: Columns of a progress bar; of a terminal that has room for it; and of one that has room for the names of runs in the last table.
_BAR, _WIDE, _WIDE_AT_END = 12, 100, 120


@contextmanager
def watching(sweep: Sweep) -> Iterator[SweepDisplay]:
    """Give the display of a sweep on standard output."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        table = LiveTable(sweep, sys.stdout, colours=supports_colour(sys.stdout))
        try:
            yield table
        finally:
            table.close()
    else:
        yield Lines(sys.stdout)


class Lines:
    """``key=value`` lines without any control character.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._lines = KeyValues(stream)

    def changed(self, sweep: Sweep, job: SweepJob) -> None:
        """One line."""
        fields: dict[str, object] = {"job": f"{job.number + 1}/{len(sweep.jobs)}", "run": job.name}
        fields |= {"arm": job.arm} if job.arm else {}
        fields["status"] = job.status
        if job.code is not None:
            fields |= {"exit": job.code, "seconds": f"{job.seconds or 0:.1f}"}
        if job.status == "done":
            metric = metric_in_words(summary_of(sweep.paths.run(job.name))).partition(" ")[0]
            fields |= dict([metric.split("=")]) if metric else {}
        elif job.reason:
            fields["reason"] = f'"{printable(job.reason)}"'
        self._lines.say(fields)

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Every job prints that into its own log."""

    def stopping(self, name: str) -> None:
        """One line."""
        self._lines.say({"stopping": name})

    def tick(self) -> None:
        """Nothing moves."""


class LiveTable(LiveDisplay):
    """Draws the jobs at most four times a second, as many as the terminal has lines for.

    Args:
        sweep: As it begins.
        stream: The terminal.
        colours: Whether to use any.
    """

    def __init__(self, sweep: Sweep, stream: IO[str], *, colours: bool = True) -> None:
        super().__init__(stream, colours=colours, transient=True)  # what remains on the screen is printed afterwards
        self._sweep = sweep
        self._progress: dict[int, JobProgress] = {}
        self._began: dict[int, float] = {}
        self._start = time.monotonic()
        self._stopping = ""

    def changed(self, sweep: Sweep, job: SweepJob) -> None:
        """Draws it with the next tick."""
        self._sweep = sweep
        self._progress.pop(job.number, None)
        if job.status == "running":
            self._began[job.number] = time.monotonic()
        self._drawn = 0.0

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Draws it with a tick."""
        self._progress[number] = progress

    def stopping(self, name: str) -> None:
        """Draws it with the next tick."""
        self._stopping = name
        self._drawn = 0.0

    def tick(self) -> None:
        """Draws, if the last drawing is old enough."""
        if not self._gone and time.monotonic() - self._drawn >= INTERVAL:
            self.draw(self.render(*self._console.size))

    def render(self, width: int, height: int) -> RenderableType:
        """The table for a terminal of so many columns and lines."""
        shown = choose(self._sweep.jobs, max(height - _OTHER_LINES, 3))
        wide = width >= _WIDE
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        flexible = {"point": 3, "progress": 2, "done": 1}
        titles = (
            "#",
            "point",
            "status",
            "progress" if wide else "done",
            "metric",
            "loss scale",
            "overflows",
            "skipped",
            "left",
        )
        for title in titles if wide else (title for title in titles if title != "overflows"):
            justify: Literal["left", "right"] = "left" if title in (*flexible, "status", "metric") else "right"
            table.add_column(title, justify=justify, ratio=flexible.get(title), no_wrap=True)
        shared = _words_of_arms(self._sweep.jobs)
        for job in shown:
            differing = [word for word in job.varied if word not in shared[job.arm]]
            label = " ".join([job.arm, *differing]) if job.arm else job.label
            status = f"[{_COLOURS[job.status]}]{job.status}[/]"
            table.add_row(str(job.number), escape(printable(label)), status, *self._cells(job, wide=wide))
        lines: list[RenderableType] = [table]
        if len(shown) < len(self._sweep.jobs):
            lines.append(Text.from_markup(f"[dim]... {_counts(set(self._sweep.jobs) - set(shown))} not shown[/]"))
        if self._stopping:
            words = f"{self._stopping}: running jobs save themselves; Ctrl-C once more ends them at once"
            lines.append(Text(words, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines, self._summary())

    def _cells(self, job: SweepJob, *, wide: bool) -> list[RenderableType]:
        """Progress, metric, loss scale, overflows where there is room, skipped, time left."""
        progress = self._progress.get(job.number)
        doing: RenderableType
        metric = left = scales = overflows = skipped = ""
        if job.status == "done":
            summary = summary_of(self._sweep.paths.run(job.name))
            learners = (summary.get("learners") or {}).values()
            doing = "[dim]before[/]"
            if job.seconds is not None:
                doing = f"[dim]{formatting.duration(job.seconds)}{' in all' * wide}[/]"
            metric = metric_in_words(summary).partition(" ")[0].replace("=", " ")
            scales = _scales(learner["scale"]["last"] for learner in learners if "last" in learner.get("scale", {}))
            overflows = str(sum(sum(learner["overflows"].values()) for learner in learners))
            skipped = skipped_in_words(summary)
        elif progress is not None and job.status == "running":
            doing = f"{100 * progress.step / max(progress.steps, 1):.0f} %"
            if wide:
                doing = Table.grid(padding=(0, 1, 0, 0))
                bar = ProgressBar(max(progress.steps, 1), progress.step, width=_BAR, complete_style="cyan", style=_REST)
                doing.add_row(bar, f"{progress.step:,}/{progress.steps:,}")
            metric = f"{progress.metric_name} {progress.metric:.4f}" if progress.metric_name else ""
            scales, overflows, skipped = _scales(progress.scales), str(progress.overflows), str(progress.skipped)
            left = formatting.duration(progress.eta)
        else:
            starts = job.status == "running" and not job.reason
            doing = "[dim]starting[/]" if starts else f"[dim]{escape(printable(job.reason))}[/]"
        return [doing, escape(printable(metric)), scales, *([overflows] if wide else []), skipped, left]

    def _summary(self) -> RenderableType:
        left = remaining(self._sweep, self._progress, {n: time.monotonic() - at for n, at in self._began.items()})
        elapsed = formatting.duration(time.monotonic() - self._start)
        ends = f"   [dim]left[/] about {formatting.duration(left)}" if math.isfinite(left) else ""
        counts = escape(_counts(self._sweep.jobs))
        where = escape(printable(str(self._sweep.folder)))
        line = Text.from_markup(f"[bold]{counts}[/]   [dim]elapsed[/] {elapsed}{ends}   [dim]{where}[/]")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def _words_of_arms(jobs: Sequence[SweepJob]) -> dict[str, set[str]]:
    """Return the words that all jobs of an arm share, by the arm, whose name stands for them."""
    found: dict[str, set[str]] = {}
    for job in jobs:
        found[job.arm] = found.get(job.arm, set(job.varied)) & set(job.varied)
    return found


def choose(jobs: tuple[SweepJob, ...], most: int) -> list[SweepJob]:
    """Return the jobs that a table of so many rows shows: those that run, then failures, the newest ends, the next to come."""
    if len(jobs) <= most:
        return list(jobs)

    def urgency(job: SweepJob) -> tuple[int, int]:
        return _URGENCY.index(job.status), job.number if job.status in ("running", "waiting") else -job.number

    coming = [job for job in jobs if job.status == "waiting"][:1]  # so that it is seen that there are any
    others = sorted((job for job in jobs if job not in coming), key=urgency)[: most - len(coming)]
    return sorted((*others, *coming), key=lambda job: job.number)


def remaining(sweep: Sweep, progress: dict[int, JobProgress], elapsed: dict[int, float]) -> float:
    """Estimated seconds to the end of a sweep; infinite before anything is known.

    Args:
        sweep: As it stands.
        progress: Of the jobs that run.
        elapsed: Seconds since each of them was started.
    """
    took = [job.seconds for job in sweep.jobs if job.status == "done" and job.seconds is not None]
    running = {job.number: elapsed.get(job.number, 0.0) for job in sweep.jobs if job.status == "running"}
    known = {
        number: progress[number].eta
        for number in running
        if number in progress and progress[number].step and math.isfinite(progress[number].eta)
    }
    whole = took or [running[number] + eta for number, eta in known.items()]
    if not whole:
        return math.inf
    mean = sum(whole) / len(whole)
    lefts = [known.get(number, max(0.0, mean - seconds)) for number, seconds in running.items()]
    waiting = sum(job.status == "waiting" for job in sweep.jobs)
    together = max(1, min(sweep.parallel, len(running) + waiting))
    return max((sum(lefts) + waiting * mean) / together, *lefts, 0.0)


def _counts(jobs: tuple[SweepJob, ...] | set[SweepJob]) -> str:
    """``7 done, 1 failed, 2 running, 2 waiting``."""
    counts: Counter[str] = Counter(job.status for job in jobs)
    order = ("done", *_URGENCY[1:4], "running", "waiting")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


def _scales(scales: Iterable[float]) -> str:
    """The loss scale of each learner; once where all have the same."""
    return " ".join(dict.fromkeys(formatting.scale(value) for value in scales))


def print_outcome(sweep: Sweep) -> None:
    """Print one row a job, relative to the sweep's folder, and which setting was best as far as 95 % CIs tell.

    Then comes a row for each job that failed, with the file of its output.

    Raises:
        StorageError: Standard output takes no more.
    """
    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= _WIDE_AT_END
    left_out = ("" if any(job.arm for job in sweep.jobs) else "arm", "" if wide else "run")  # named after their points
    summaries = {job.number: summary_of(sweep.paths.run(job.name)) for job in sweep.jobs if job.status == "done"}
    rows = []
    for job in sweep.jobs:
        summary = summaries.get(job.number, {})
        row = {
            "#": str(job.number),
            "arm": escape(printable(job.arm)),
            "point": escape(printable(job.label)),
            "status": f"[{_COLOURS[job.status]}]{job.status}[/]",
            "exit": "" if job.code is None else str(job.code),
            "metric": escape(printable(metric_in_words(summary))),
            "skipped": skipped_in_words(summary),
            "run": escape(printable(job.name)),
        }
        rows.append({title: cell for title, cell in row.items() if title not in left_out})
    _print(rows)
    if sweep.kind == "sweep" and sum(summary.get("metric") is not None for summary in summaries.values()) > 1:
        say(f"\n{printable(sweep_lead(sweep.jobs, summaries, '{:.4f}'.format))}")
    if living := [job for job in sweep.jobs if job.status == "running" and job.reason]:
        are = "are" if len(living) > 1 else "is"
        say(f"\n{len(living)} of the jobs {are} still run by processes of an earlier time, which were left alone:")
        for job in living:
            say(f"  {job.number}  {printable(job.label)}  {printable(job.reason)}")
    failed = [job for job in sweep.jobs if job.status == "failed"]
    _print(
        [
            {
                "#": str(job.number),
                "why it failed": escape(printable(job.reason)),
                "what it printed": escape(printable(str(sweep.paths.log(job.name)))),
            }
            for job in failed
        ]
    )


def _print(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of cells by their titles, below an empty line; nothing where there are none."""
    if rows:
        columns = columns_of(list(rows[0]), [list(row.values()) for row in rows], numeric=("#", "exit", "skipped"))
        say("\n" + "\n".join(render_table(columns, piped_width=200)), styled=True)


def metric_in_words(summary: Mapping[str, Any]) -> str:
    """Return the metric of record of a summary: ``top1=0.9673 (test)``."""
    metric, name = summary.get("metric"), summary.get("metric_name", "metric")
    return f"{name}={metric:.4f} ({summary.get('metric_split')})" if isinstance(metric, (int, float)) else ""


def skipped_in_words(summary: Mapping[str, Any]) -> str:
    """Return the skipped updates of all learners of a summary."""
    learners = summary.get("learners") or {}
    return str(sum(learner["skipped"] for learner in learners.values())) if learners else ""
