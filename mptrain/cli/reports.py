"""``mptrain report``: writes reports from records, and what it prints with ``--json``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from mptrain import shelves
from mptrain.cli.answer import Answer, Data
from mptrain.cli.command import Outcome, named_folder_or_last
from mptrain.cli.messages import say
from mptrain.report.html_and_markdown import ReportFiles, write_report
from mptrain.report.run_blocks import OpenedRun, open_with_history
from mptrain.report.run_history import BUCKETS, Overflows
from mptrain.runlog.directory import RunDirectory, open_run
from mptrain.runlog.run_state import RunState
from mptrain.system.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator


def report_folders(arguments: Namespace) -> Outcome:
    """Write the HTML and Markdown report of each folder, or with ``--together`` one report of several runs.

    Args:
        arguments: Parsed command line; its words are folders of runs, sweeps, comparisons or recipes, or ``last`` for
            the run that was started last. With ``--follow N`` the report of one run is written again every N seconds
            until the run has ended.

    Returns:
        The written files, whose paths are printed, with the exit code 0.

    Raises:
        StorageError: A folder is not a run, sweep or comparison, or it cannot be read or written.
        UsageError: The options do not fit the number of folders.
    """
    written = {}
    for folder, files in _write(arguments):
        written[folder] = files
        if not arguments.json:  # a later folder may be refused
            say(f"{files.html}\n{files.md}")

    def data() -> Answer:

        return answer_of(written)

    return Outcome(EXIT_OK, lambda: None, data)


def _write(arguments: Namespace) -> Iterator[tuple[Path, ReportFiles]]:
    folders = list(dict.fromkeys(map(named_folder_or_last, arguments.words)))
    if arguments.together and (arguments.follow or len(folders) < 2):
        raise UsageError(
            "--together takes two runs or more, and no --follow", "write mptrain report RUN RUN --together"
        )
    if arguments.follow and len(folders) > 1:
        raise UsageError("--follow takes one run", "write mptrain report RUN --follow 10")
    if arguments.together:
        yield shelves.load("study", "--together").written_together(folders)
        return
    if arguments.follow:
        _follow(folders[0], arguments.follow, quiet=arguments.json)
    for folder in folders:
        yield folder, write_report(folder)


def _follow(folder: Path, seconds: int, *, quiet: bool) -> None:
    """Write the report of a run every so many seconds while it trains; its page reloads itself until then."""
    run = open_run(folder)
    try:
        _rewrite(folder, run, seconds, quiet=quiet)
    except KeyboardInterrupt:  # or another signal, `EndRequested`
        write_report(folder)  # a page that no longer reloads itself
        raise


def _rewrite(folder: Path, run: RunDirectory, seconds: int, *, quiet: bool) -> None:
    while (state := run.read_state()) is not None and state.status == "running" and run.holder() is not None:
        files = write_report(folder, reload=seconds)
        if not quiet:
            say(f"{files.html}: written again every {seconds} s until the run has ended")
            quiet = True
        time.sleep(seconds)


class Tensor(Data):
    """Overflows of a parameter's gradient.

    Attributes:
        kinds: ``inf`` and ``nan`` to number of overflows.
        first: First step that overflowed there, and ``last`` the last one, counted from 1.
    """

    kinds: dict[str, int]
    first: int
    last: int


class Learner(Data):
    """Records of one learner (a model with its optimizer) of a run.

    Attributes:
        attempts: Number of attempted steps.
        updates: Number of applied updates.
        skipped: Number of skipped updates.
        loss_scale: ``first``, ``min``, ``max`` and ``last`` loss scale; empty without steps.
        overflows: Phase of the loss scaler (calibrating, growth probe, unexpected) to number of overflows.
        tensors: Parameters whose gradients overflowed, by name, the most frequent first.
    """

    attempts: int
    updates: int
    skipped: int
    loss_scale: dict[str, float]
    overflows: dict[str, int]
    tensors: dict[str, Tensor]


class Run(Data):
    """Run as its report shows it.

    Attributes:
        state: Content of ``run.json``: status, reason of the end, hint, command, parts, attempts.
        killed: Whether its status is running although no process works on it.
        watched: Whether another program trained, watched by ``mptrain.watch``.
        steps: Number of attempted steps, skipped ones included.
        learners: Records of each learner by name; ``main`` if there is only one.
        overflows: First and last overflow events, as in ``events.jsonl``, with step, loss scale and tensors.
        events: Unusual events, the first and last ones: step, kind and text.
        notes: Problems when reading the records, one sentence each.
        summary: Content of ``summary.json``: the final metric, throughput and memory; empty while it runs.
    """

    state: RunState
    killed: bool
    watched: bool
    steps: int
    learners: dict[str, Learner]
    overflows: tuple[dict[str, Any], ...]
    events: tuple[tuple[int, str, str], ...]
    notes: tuple[str, ...]
    summary: dict[str, Any]

    @classmethod
    def opened(cls, run: OpenedRun) -> Self:
        """Return the data of a run that was opened for a report."""
        history, learners = run.history, {}
        for name, learner in history.learners.items():
            overflows, path = history.overflows.get(name, Overflows()), learner.scale_path()
            named = dict(overflows.worst(len(overflows.offenders)))
            learners[name] = Learner.of(
                learner, skipped=learner.refused, loss_scale=path, overflows=overflows.counts, tensors=named
            )
        own = {"learners": learners, "killed": run.dead, "watched": run.is_watched, "summary": run.run.summary}
        kept = {"overflows": history.overflow_rows.kept(), "events": history.occurrences.kept()}
        return cls.of(history, state=run.run.state, **own, **kept)


class Report(Data):
    """Written report of a folder.

    Attributes:
        folder: The folder, to which paths of compared runs are relative.
        kind: Kind of the folder; ``runs`` for one that has only the report of several runs.
        title: Title of the report.
        status: Status in words.
        lead: Main result in one or a few sentences.
        html: Path of the HTML page, and ``markdown`` of the Markdown document.
        run: Records of a run; null for other folders.
    """

    folder: str
    kind: Literal["run", "sweep", "comparison", "recipe", "runs"]
    title: str
    status: str
    lead: str
    html: str
    markdown: str
    run: Run | None

    @classmethod
    def written(cls, folder: Path, files: ReportFiles, **known: Any) -> Self:
        """Return the data of a report; the records are read once more."""
        page = files.page
        kind = page.over.split()[1]
        return cls.of(
            page,
            folder=str(folder),
            kind=kind,
            status=page.status.text,
            html=str(files.html),
            markdown=str(files.md),
            run=Run.opened(open_with_history(folder, BUCKETS)) if kind == "run" else None,
            **known,
        )


class RunReportAnswer(Answer):
    """Object that ``mptrain report --json`` prints where runs are all there is: a report for each folder."""

    SCHEMA = "mptrain.report/1"
    reports: tuple[Report, ...]


def answer_of(reports: Mapping[Path, ReportFiles]) -> Answer:
    """Return the data of written reports by folder."""
    if study := shelves.find("study"):
        answer: Answer = study.answer_of(reports)
        return answer
    return RunReportAnswer(reports=tuple(Report.written(folder, files) for folder, files in reports.items()))
