"""Output of sweeps: a live table or a line for each change of a job, and a table of all jobs at the end."""

from __future__ import annotations

import math
import os
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
from rich.text import Text as RichText

from mptrain.cli.blocks import print_blocks
from mptrain.cli.messages import KeyValues, printable, say, supports_colour
from mptrain.cli.panel import INTERVAL, LiveDisplay
from mptrain.report.page import Bullets, Cell, Section, Text, table
from mptrain.report.run_blocks import job_status
from mptrain.runlog.sweeps import summary_of
from mptrain.study.comparison.ranking import selected, sweep_lead
from mptrain.system import words as words

if TYPE_CHECKING:
    from mptrain.runlog.sweeps import Sweep, SweepJob
    from mptrain.study.sweep.executor import JobProgress
    from mptrain.study.sweep.runner import SweepDisplay

#: Colour of each job status.
_COLOURS: dict[str, str] = {
    "done": "green",
    "running": "cyan",
    "failed": "bold red",
    "interrupted": "yellow",
    "preempted": "yellow",
    "waiting": "dim",
}

#: Order of priority in which a table shows jobs if it is too short for all of them.
_URGENCY = ("running", "failed", "interrupted", "preempted", "done", "waiting")

#: Lines of the terminal reserved for the column titles, the count of hidden jobs, the summary and the cursor.
_OTHER_LINES = 6

#: Style of the remaining part of a progress bar.
_REST = "bright_black"

#: Width of a progress bar, and the minimum width of a terminal to show it.
_BAR, _WIDE = 12, 100


@contextmanager
def watching(sweep: Sweep) -> Iterator[SweepDisplay]:
    """Show a sweep's jobs on standard output while the context is open.

    Yields:
        The display: a live table on a terminal, else a line for each change of a job.
    """
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        table = LiveTable(sweep, sys.stdout, colours=supports_colour(sys.stdout))
        try:
            yield table
        finally:
            table.close()
    else:
        yield Lines(sys.stdout)


class Lines:
    """Display of a sweep as ``key=value`` lines, for output that is not a terminal.

    Args:
        stream: Output stream.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._lines = KeyValues(stream)

    def changed(self, sweep: Sweep, job: SweepJob) -> None:
        """Print a line with the new status of a job (one run of the sweep).

        It has the metric of a finished job, or the reason of a failure.
        """
        fields: dict[str, object] = {"job": f"{job.number + 1}/{len(sweep.jobs)}", "run": job.name}
        fields |= {"arm": job.arm} if job.arm else {}
        fields["status"] = job.status
        if job.code is not None:
            fields |= {"exit": job.code, "seconds": f"{job.seconds or 0:.1f}"}
        if job.status == "done":
            summary = _summary(sweep, job)
            metric = metric_in_words(summary).partition(" ")[0]
            fields |= dict([f"{summary.get('metric_split')}_{metric}".split("=")]) if metric else {}
        elif job.reason:
            fields["reason"] = f'"{printable(job.reason)}"'
        self._lines.say(fields)

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Do nothing; every job of the sweep prints its progress into its own log."""

    def stopping(self, name: str) -> None:
        """Print a line with the name of the signal that stops the sweep."""
        self._lines.say({"stopping": name})

    def tick(self) -> None:
        """Do nothing; lines are not redrawn. See `SweepDisplay.tick`."""


class LiveTable(LiveDisplay):
    """Display of a sweep's jobs as a live table on a terminal, redrawn at most four times a second.

    The table has as many jobs as the terminal has lines for.

    Args:
        sweep: The sweep at its start.
        stream: The terminal.
        colours: Whether to use colours.
    """

    def __init__(self, sweep: Sweep, stream: IO[str], *, colours: bool = True) -> None:
        super().__init__(stream, colours=colours, transient=True)  # print_outcome prints the final table
        self._sweep = sweep
        self._progress: dict[int, JobProgress] = {}
        self._began: dict[int, float] = {}
        self._start = time.monotonic()
        self._stopping = ""

    def changed(self, sweep: Sweep, job: SweepJob) -> None:
        """Record the new status of a job (one run of the sweep), and redraw at the next tick."""
        self._sweep = sweep
        self._progress.pop(job.number, None)
        if job.status == "running":
            self._began[job.number] = time.monotonic()
        self._drawn = 0.0

    def progressed(self, number: int, progress: JobProgress) -> None:
        """Record the training progress of a job for a later redraw.

        Args:
            number: Number of the job in the sweep.
            progress: Its steps, metric, loss scales and so on.
        """
        self._progress[number] = progress

    def stopping(self, name: str) -> None:
        """Record the name of the signal that stops the sweep, and redraw at the next tick."""
        self._stopping = name
        self._drawn = 0.0

    def tick(self) -> None:
        """Redraw the table if a redraw is due; called several times a second."""
        if not self._gone and time.monotonic() - self._drawn >= INTERVAL:
            self.draw(self.render(*self._console.size))

    def render(self, width: int, height: int) -> RenderableType:
        """Return the table of jobs and a summary line for a terminal of ``width`` columns and ``height`` lines."""
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
            lines.append(RichText.from_markup(f"[dim]... {_counts(set(self._sweep.jobs) - set(shown))} not shown[/]"))
        if self._stopping:
            message = f"{self._stopping}: running jobs save checkpoints; press Ctrl-C again to end them at once"
            lines.append(RichText(message, style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines, self._summary())

    def _cells(self, job: SweepJob, *, wide: bool) -> list[RenderableType]:
        """Return the cells for progress, metric, loss scale, overflows (if wide), skipped steps and time left."""
        progress = self._progress.get(job.number)
        doing: RenderableType
        metric = left = scales = overflows = skipped = ""
        if job.status == "done":
            summary = _summary(self._sweep, job)
            learners = (summary.get("learners") or {}).values()
            doing = "[dim]before[/]"
            if job.seconds is not None:
                doing = f"[dim]{words.duration(job.seconds)}{' in all' * wide}[/]"
            metric = metric_in_words(summary).partition(" ")[0].replace("=", " ")
            scales = _scales(learner["scale"]["last"] for learner in learners if "last" in learner.get("scale", {}))
            overflows = str(sum(sum(learner["overflows"].values()) for learner in learners))
            skipped = skipped_in_words(summary)
        elif progress is not None and job.status == "running":
            doing = words.percent(progress.step / max(progress.steps, 1))
            if wide:
                doing = Table.grid(padding=(0, 1, 0, 0))
                bar = ProgressBar(max(progress.steps, 1), progress.step, width=_BAR, complete_style="cyan", style=_REST)
                doing.add_row(bar, f"{progress.step:,}/{progress.steps:,}")
            metric = f"{progress.metric_name} {progress.metric:.4f}" if progress.metric_name else ""
            scales, overflows, skipped = _scales(progress.scales), str(progress.overflows), str(progress.skipped)
            left = words.duration(progress.eta)
        else:
            starts = job.status == "running" and not job.reason
            doing = "[dim]starting[/]" if starts else f"[dim]{escape(printable(job.reason))}[/]"
        return [doing, escape(printable(metric)), scales, *([overflows] if wide else []), skipped, left]

    def _summary(self) -> RenderableType:
        left = remaining(self._sweep, self._progress, {n: time.monotonic() - at for n, at in self._began.items()})
        elapsed = words.duration(time.monotonic() - self._start)
        ends = f"   [dim]left[/] about {words.duration(left)}" if math.isfinite(left) else ""
        counts = escape(_counts(self._sweep.jobs))
        where = escape(printable(str(self._sweep.folder)))
        line = RichText.from_markup(f"[bold]{counts}[/]   [dim]elapsed[/] {elapsed}{ends}   [dim]{where}[/]")
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


def _summary(sweep: Sweep, job: SweepJob) -> dict[str, Any]:
    return selected(sweep, summary_of(sweep.paths.run(job.name)))


def _words_of_arms(jobs: Sequence[SweepJob]) -> dict[str, set[str]]:
    """Return the overrides that all jobs of an arm share, by arm; the table shows the arm's name instead of them."""
    shared: dict[str, set[str]] = {}
    for job in jobs:
        shared[job.arm] = shared.get(job.arm, set(job.varied)) & set(job.varied)
    return shared


def choose(jobs: tuple[SweepJob, ...], most: int) -> list[SweepJob]:
    """Select the jobs of a sweep to show if a table is too short for all of them.

    Running jobs come first, then failed, interrupted and the latest finished ones; one waiting job is always shown.

    Args:
        jobs: All jobs of the sweep.
        most: Number of rows of the table.

    Returns:
        The selected jobs in the order of their numbers.
    """
    if len(jobs) <= most:
        return list(jobs)

    def urgency(job: SweepJob) -> tuple[int, int]:
        return _URGENCY.index(job.status), job.number if job.status in ("running", "waiting") else -job.number

    coming = [job for job in jobs if job.status == "waiting"][:1]  # always show one waiting job if there is any
    others = sorted((job for job in jobs if job not in coming), key=urgency)[: most - len(coming)]
    return sorted((*others, *coming), key=lambda job: job.number)


def remaining(sweep: Sweep, progress: dict[int, JobProgress], elapsed: dict[int, float]) -> float:
    """Estimate the seconds until a sweep ends, from the durations of its jobs; infinite if no estimate is possible yet.

    Args:
        sweep: Current state of the sweep.
        progress: Progress of the running jobs by number.
        elapsed: Seconds since the start of each running job, by number.
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
    """Count jobs by status: ``7 done, 1 failed, 2 running, 2 waiting``."""
    counts: Counter[str] = Counter(job.status for job in jobs)
    order = ("done", *_URGENCY[1:4], "running", "waiting")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


def _scales(scales: Iterable[float]) -> str:
    """Format the loss scales of the learners without duplicates."""
    return " ".join(dict.fromkeys(words.digits(value) for value in scales))


def print_outcome(sweep: Sweep) -> None:
    """Print the results of a sweep: a table with a row per job, the best setting by the 95 % CIs, and the failed jobs.

    Run names are relative to the sweep's folder. The rows of failed jobs have the reason and the path of the log.

    Raises:
        StorageError: Standard output cannot be written.
    """
    summaries = {job.number: _summary(sweep, job) for job in sweep.jobs if job.status == "done"}
    rows: list[list[Cell | str]] = []
    for job in sweep.jobs:
        summary = summaries.get(job.number, {})
        on_test = words.number(summary.get("test_metric")) if "test_metric" in summary else ""
        results = (metric_in_words(summary).partition(" ")[0], on_test, skipped_in_words(summary))
        rows.append([str(job.number), job.arm, job.label, job_status(job), *results, job.name])
    arm = "arm" if any(job.arm for job in sweep.jobs) else None
    splits = {str(summary["metric_split"]) for summary in summaries.values() if summary.get("metric_split")}
    metric = f"metric ({', '.join(sorted(splits))})" if splits else "metric"
    test = "test" if any("test_metric" in summary for summary in summaries.values()) else None
    head = ("#", arm, "point", "status", metric, test, "skipped", "run")  # runs are named after their points
    several = sum(summary.get("metric") is not None for summary in summaries.values()) > 1
    judged = sweep.kind == "sweep" and (several or "objective" in sweep.plan)
    living = [job for job in sweep.jobs if job.status == "running" and job.reason]
    are = "are" if len(living) > 1 else "is"
    still = f"{len(living)} of the jobs {are} still run by processes of an earlier command, which were not stopped:"
    failed = [job for job in sweep.jobs if job.status == "failed"]
    reasons = [(str(job.number), job.reason, str(sweep.paths.log(job.name))) for job in failed]
    say("")
    print_blocks(
        table(head, rows, numeric=(0, 5, 6), optional=("run",)),
        Text(sweep_lead(sweep.jobs, summaries, "{:.4f}".format)) if judged else None,
        Section(still, (Bullets(tuple(f"{job.number} {job.label}: {job.reason}" for job in living)),)),
        table(("#", "reason", "log"), reasons, numeric=(0,)) if failed else None,
    )


def metric_in_words(summary: Mapping[str, Any]) -> str:
    """Format the main metric of a finished run: ``top1=0.9673 (test)``; empty if there is none.

    Args:
        summary: Content of the run's ``summary.json``.
    """
    metric, name = summary.get("metric"), summary.get("metric_name", "metric")
    return f"{name}={metric:.4f} ({summary.get('metric_split')})" if isinstance(metric, (int, float)) else ""


def skipped_in_words(summary: Mapping[str, Any]) -> str:
    """Format the number of skipped steps of a finished run, summed over its learners; empty if unknown.

    Args:
        summary: Content of the run's ``summary.json``.
    """
    learners = summary.get("learners") or {}
    return str(sum(learner["skipped"] for learner in learners.values())) if learners else ""
