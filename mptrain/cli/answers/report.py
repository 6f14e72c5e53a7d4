"""Objects of ``mptrain report --json`` and ``mptrain compare --json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from mptrain.cli.answers.answer import Answer, Data
from mptrain.comparison.logs.compare_logs import LogComparison
from mptrain.comparison.results import Comparison, RunMeasures, read_comparisons
from mptrain.report.recipe_blocks import read_verdict
from mptrain.report.report_files import ReportFiles
from mptrain.report.run_blocks import OpenedRun, open_or_reason, open_with_history
from mptrain.report.run_history import Overflows
from mptrain.report.sweep_points import BUCKETS, read_points
from mptrain.runlog.run_state import RunState
from mptrain.runlog.sweeps import SweepJob, SweepPaths, is_sweep, read_sweep


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
        for name, one in history.learners.items():
            found, path = history.overflows.get(name, Overflows()), one.scale_path()
            named = dict(found.worst(len(found.offenders)))
            learners[name] = Learner.of(
                one, skipped=one.refused, loss_scale=path, overflows=found.counts, tensors=named
            )
        own = {"learners": learners, "killed": run.dead, "watched": run.is_watched, "summary": run.run.summary}
        kept = {"overflows": history.overflow_rows.kept(), "events": history.occurrences.kept()}
        return cls.of(history, state=run.run.state, **own, **kept)


class Point(Data):
    """Point of a sweep or comparison: one run.

    Attributes:
        job: The job that trains it; ``name`` is its run directory below the folder.
        words: Key to value of the overrides in which the points differ.
        problem: Reason why the run cannot be read; empty if there is none.
        metric: Final metric on validation data, if there are any; null if it is not done or not finite.
        skip_rate: Share of skipped updates, 0 to 1; null if no step is recorded.
    """

    job: SweepJob
    words: dict[str, str]
    problem: str
    metric: float | None
    skip_rate: float | None


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
        points: Runs of a sweep, comparison or recipe.
        comparisons: Comparisons by the name of their group in a recipe, which is empty for a single one.
        expectations: Content of a recipe's verdict.json; empty without.
    """

    folder: str
    kind: Literal["run", "sweep", "comparison", "recipe", "runs"]
    title: str
    status: str
    lead: str
    html: str
    markdown: str
    run: Run | None
    points: tuple[Point, ...]
    comparisons: dict[str, Comparison]
    expectations: dict[str, Any]

    @classmethod
    def written(cls, folder: Path, files: ReportFiles) -> Self:
        """Return the data of a report; the records are read once more."""
        comparison, page = SweepPaths(folder).comparison, files.page
        kind = page.over.split()[1]
        groups = read_comparisons(comparison) if comparison.exists() else {}
        sweep = read_sweep(folder) if is_sweep(folder) else None
        return cls.of(
            page,
            folder=str(folder),
            kind=kind,
            status=page.status.text,
            html=str(files.html),
            markdown=str(files.md),
            run=None if groups or sweep or kind == "runs" else Run.opened(open_with_history(folder, BUCKETS)),
            points=read_points(sweep, lambda path: open_or_reason(path, BUCKETS)) if sweep else (),
            comparisons=groups,
            expectations=read_verdict(folder).fields,
        )


class ReportAnswer(Answer):
    """Object that ``mptrain report --json`` prints: a report for each folder."""

    SCHEMA = "mptrain.report/1"
    reports: tuple[Report, ...]

    @classmethod
    def written(cls, reports: Mapping[Path, ReportFiles]) -> Self:
        """Return the data of written reports by folder."""
        return cls(reports=tuple(Report.written(folder, files) for folder, files in reports.items()))


class CompareAnswer(Answer):
    """Object that ``mptrain compare --json`` prints.

    Attributes:
        comparison: The comparison; null if single runs cannot be judged.
        folder: Folder with comparison.json and the report, to which paths of runs are relative; empty without one.
        html: Path of the report; empty without one.
        no_verdict: Reason why there is no verdict; empty if there is one.
        runs: The single runs that cannot be judged, with their paths as given.
        differing: Configuration keys in which these differ, to the value of each run.
        logs: The comparison of logs (``--logs``); null for others. ``folder`` has its certificate.
    """

    SCHEMA = "mptrain.compare/1"
    comparison: Comparison | None = None
    folder: str = ""
    html: str = ""
    no_verdict: str = ""
    runs: tuple[RunMeasures, ...] = ()
    differing: dict[str, tuple[str, ...]] = {}
    logs: LogComparison | None = None
