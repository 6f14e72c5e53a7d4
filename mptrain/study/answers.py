"""Objects of ``mptrain report --json``, for folders of every kind, and ``mptrain compare --json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self, override

from mptrain.cli.answer import Answer, Data
from mptrain.cli.reports import Report as RunReport
from mptrain.report.html_and_markdown import ReportFiles
from mptrain.report.run_blocks import open_or_reason
from mptrain.report.run_history import BUCKETS
from mptrain.runlog.sweeps import SweepJob, SweepPaths, is_sweep, read_sweep
from mptrain.study.comparison.logs.compare_logs import LogComparison
from mptrain.study.comparison.results import Comparison, RunMeasures, read_comparisons
from mptrain.study.pages.comparison_page import read_verdict
from mptrain.study.pages.sweep_points import read_points


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


class Report(RunReport):
    """Written report of a folder.

    Attributes:
        points: Runs of a sweep, comparison or recipe.
        comparisons: Comparisons by the name of their group in a recipe, which is empty for a single one.
        expectations: Content of a recipe's verdict.json; empty without.
    """

    points: tuple[Point, ...]
    comparisons: dict[str, Comparison]
    expectations: dict[str, Any]

    @classmethod
    @override
    def written(cls, folder: Path, files: ReportFiles, **known: Any) -> Self:
        comparison = SweepPaths(folder).comparison
        sweep = read_sweep(folder) if is_sweep(folder) else None
        return super().written(
            folder,
            files,
            points=read_points(sweep, lambda path: open_or_reason(path, BUCKETS)) if sweep else (),
            comparisons=read_comparisons(comparison) if comparison.exists() else {},
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
