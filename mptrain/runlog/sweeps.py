"""Files of a sweep of training runs: ``sweep.json``, the only source for the jobs and their status, and others.

``sweep.csv`` has one row for each job, with the final numbers from the ``summary.json`` of its run. A cell without a
value is empty. mptrain never reads this file. Text that a spreadsheet would evaluate (``=1+1``) starts with an
apostrophe, which marks a text cell in spreadsheets.

Comparisons and recipes are sweeps whose jobs have arms (an arm: all runs of one configuration).
"""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mptrain.runlog.atomic_files import require_no_links, write_atomically
from mptrain.runlog.run_paths import PathInside, RunPaths, name_problem
from mptrain.runlog.run_reader import Run
from mptrain.runlog.run_state import now, read_summary
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import EXIT_NUMERICS, StorageError
from mptrain.system.fields import NonNegativeInt
from mptrain.system.masking import masked
from mptrain.system.validation import build

#: Version of the layout of ``sweep.json`` and ``verdict.json``.
SCHEMA = 2
SWEEP_JSON = "sweep.json"
JobStatus = Literal["waiting", "running", "done", "failed", "interrupted", "preempted"]
Kind = Literal["sweep", "comparison", "recipe"]

#: Numbers of a whole run, by their names in its summary.
_OF_RUN = ("metric", "metric_low", "metric_high", "metric_name", "metric_split", "val_metric")
_COSTS = ("terms_per_second", "train_seconds", "peak_memory")
_OF_LEARNER = ("updates", "skipped", "skip_rate", "scale_first", "scale_min", "scale_max", "scale_last")

#: First characters that spreadsheets interpret as formulas, including the full-width forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Paths of all files and folders in the folder of a sweep, which need not exist."""

    root: Path

    #: Content and status of the sweep and its jobs (see `Sweep`).
    json = PathInside(SWEEP_JSON)
    #: One CSV row for each job with its final numbers.
    csv = PathInside("sweep.csv")
    #: Lock file; the process that runs this sweep holds its kernel lock.
    lock = PathInside("sweep.lock")
    #: Result of a comparison, JSON.
    comparison = PathInside("comparison.json")
    #: Verdict on a recipe's expectations, JSON.
    verdict = PathInside("verdict.json")
    #: The self-contained HTML report.
    report_html = PathInside("report.html")
    #: The report in Markdown.
    report_md = PathInside("report.md")
    #: Figures of the Markdown report.
    figures = PathInside("figures")

    def run(self, name: str) -> Path:
        """Return the run directory of the job with this name."""
        return self.root / name

    def log(self, name: str) -> Path:
        """Return the file with the output of the job with this name, over all its attempts."""
        return self.root / f"{name}.log"


@dataclass(frozen=True, slots=True)
class SweepJob:
    """Job of a sweep: one point (one run), with the status of the process that trains it.

    Attributes:
        number: Index of the job in the sweep, from 0.
        name: Name of its run directory inside the sweep's folder.
        overrides: All ``KEY=VALUE`` overrides of its point.
        varied: Those of the overrides in which the points of the sweep differ.
        arm: Name of its arm in a comparison; empty in a plain sweep.
        status: ``waiting``, ``running``, ``done``, ``failed``, ``interrupted`` (Ctrl-C) or ``preempted``.
        code: Exit code of its process; negative if a signal of that number killed it; None before its end.
        reason: Reason why it is not done, in one line; empty if there is none. For a running job, the process that runs
            it if that is not part of the sweep.
        seconds: Wall time of all its processes, including their start. For a process whose end the sweep did not
            observe, the wall time of the run's attempt. None before the first process ends.
    """

    number: NonNegativeInt
    name: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    arm: str = ""
    status: JobStatus = "waiting"
    code: int | None = None
    reason: str = ""
    seconds: float | None = None

    @property
    def label(self) -> str:
        """Short name of the job for messages and tables: the overrides in which points differ, such as ``seed=2``."""
        return " ".join(self.varied) or "(no overrides)"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep of training runs with the status of its jobs: the content of ``sweep.json``.

    Attributes:
        folder: The folder of the sweep; not stored in the file, so that the folder can be moved.
        words: The overrides that were expanded to the points.
        config_dirs: Additional configuration folders, absolute paths.
        config_name: Name of the primary configuration file.
        parallel: Maximum number of concurrent jobs.
        jobs: The jobs in the order of their numbers.
        started: Time at which the sweep was planned, UTC in ISO 8601.
        plan: Criteria for the evaluation of the finished jobs, JSON values; empty in a plain sweep.
        schema: Version of the file's layout.
    """

    folder: Path
    kind: Kind
    words: tuple[str, ...]
    config_dirs: tuple[str, ...]
    config_name: str
    parallel: NonNegativeInt
    jobs: tuple[SweepJob, ...]
    started: str = field(default_factory=now)
    plan: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def paths(self) -> SweepPaths:
        """Paths of the files in the sweep's folder."""
        return SweepPaths(self.folder)

    def has_ended(self, job: SweepJob) -> bool:
        """Return whether a job of the sweep needs no further run.

        A done job has ended. In comparisons and recipes, a numerics failure (exit code 4) is a result and also counts
        as an end.
        """
        return job.status == "done" or (self.kind != "sweep" and job.status == "failed" and job.code == EXIT_NUMERICS)

    def with_job(self, job: SweepJob) -> Sweep:
        """Return the sweep with the job of the same number replaced."""
        jobs = (*self.jobs[: job.number], job, *self.jobs[job.number + 1 :])
        return replace(self, jobs=jobs)


def _write_state(sweep: Sweep) -> None:
    jobs = [{name: getattr(job, name) for name in SweepJob.__dataclass_fields__} for job in sweep.jobs]
    written = [name for name in Sweep.__dataclass_fields__ if name not in ("schema", "folder")]
    fields = {"schema": sweep.schema, **{name: getattr(sweep, name) for name in written}, "jobs": jobs}
    text = json.dumps(fields, indent=1, allow_nan=False)
    write_atomically(sweep.paths.json, text + "\n")


def read_sweep(folder: Path) -> Sweep:
    """Read the sweep in a folder from its ``sweep.json``.

    Raises:
        OtherVersion: Another version of mptrain wrote the sweep.
        StorageError: The folder holds no sweep or has symbolic links, or ``sweep.json`` is damaged or
            has another schema.
    """
    path = SweepPaths(folder).json
    require_no_links(folder, [SweepPaths(folder).figures])
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        raise StorageError(f"{folder} is not a sweep: it has no {SWEEP_JSON}", "give the folder of a sweep")
    try:
        sweep = build(Sweep, {**fields, "folder": folder}, lenient=True)
        if sweep.parallel < 1:
            raise ValueError(f"parallel is {sweep.parallel!r}; it must be at least 1")
        for number, job in enumerate(sweep.jobs):
            if job.number != number:
                raise ValueError(f"job {number} has the number {job.number!r}")
            if why := "leads out of the folder" if "/" in job.name else name_problem(f"{job.name}.log"):
                raise ValueError(f"the name {job.name!r} {why}")
    except ValueError as error:
        hint = "restore the file from a copy, or start the sweep again"
        raise StorageError(f"{path} is damaged: {error}", hint) from error
    return sweep


def is_sweep(path: Path) -> bool:
    """Return whether a path is the folder of a sweep, that is, has a ``sweep.json``."""
    return SweepPaths(path).json.is_file()


def write_sweep(sweep: Sweep) -> None:
    """Write ``sweep.json`` and ``sweep.csv`` to the folder of a sweep, replacing each atomically."""
    _write_state(sweep)
    _write_rows(sweep)


def _write_rows(sweep: Sweep) -> None:
    """Replace ``sweep.csv`` atomically but not durably, because it can be rebuilt from ``sweep.json`` and the runs."""
    summaries = [summary_of(sweep.paths.run(job.name)) if job.status == "done" else {} for job in sweep.jobs]
    keys = varied_keys(sweep.jobs)
    learners = list(dict.fromkeys(name for summary in summaries for name in summary.get("learners") or {}))
    rows = [
        _row(job, summary, keys, learners, str(sweep.paths.run(job.name)))
        for job, summary in zip(sweep.jobs, summaries, strict=True)
    ]
    if not any(job.arm for job in sweep.jobs):
        for row in rows:
            del row["arm"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(as_cell, rows[0] if rows else ["number"]))
    writer.writerows(map(as_cell, row.values()) for row in masked(rows))
    write_atomically(sweep.paths.csv, text.getvalue(), durable=False)


def as_cell(value: Any) -> Any:
    """Return a value for a spreadsheet: text that would be evaluated as a formula gets a leading apostrophe."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def interval_of(summary: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the ends of the 95 % confidence interval of a run's metric over the choice of samples, or None."""
    interval = (summary.get("intervals") or {}).get(summary.get("metric_name"))
    return (float(interval[0]), float(interval[1])) if interval else None


def overrides_of(job: SweepJob | Run) -> dict[str, str]:
    """Return the overrides of a job or run by key, without Hydra's ``+`` and ``~``; the last override of a key wins."""
    parts = [word.partition("=") for word in job.overrides]
    return {key.lstrip("+~"): value for key, _, value in parts}


def varied_keys(jobs: Iterable[SweepJob | Run]) -> list[str]:
    """Return the keys in which the overrides of jobs or runs differ, in order of first appearance."""
    tables = [overrides_of(job) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def summary_of(run: Path) -> dict[str, Any]:
    """Return the final numbers of a run by name, cached until the file changes; empty if none can be read."""
    path = RunPaths(run).summary
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_ino)
    except (OSError, StorageError):
        return {}


@functools.cache  # a sweep of 1,000 jobs writes its table 2,000 times
def _read(path: Path, written: int, inode: int) -> dict[str, Any]:  # two writes may have the same time
    return read_summary(path)


def _row(
    job: SweepJob, summary: dict[str, Any], keys: Sequence[str], learners: Sequence[str], run: str
) -> dict[str, Any]:
    """Return the row of a job in ``sweep.csv``, as column name to value.

    ``summary`` is empty if the job is not done. With several learners, their columns have the name as a prefix.
    """
    values = overrides_of(job)
    row: dict[str, Any] = {"number": job.number, "arm": job.arm, "status": job.status, "exit": job.code}
    row |= {key: values.get(key) for key in keys}
    low, high = interval_of(summary) or (None, None)
    on_val = (summary.get("val") or {}).get(summary.get("metric_name"))
    of_run = {**summary, "metric_low": low, "metric_high": high, "val_metric": on_val}
    row |= {name: of_run.get(name) for name in _OF_RUN}
    for name in learners or [""]:
        of_learner = (summary.get("learners") or {}).get(name) or {}
        numbers = {**of_learner, **{f"scale_{which}": at for which, at in (of_learner.get("scale") or {}).items()}}
        prefix = f"{name}." if len(learners) > 1 else ""
        row |= {f"{prefix}{key}": numbers.get(key) for key in _OF_LEARNER}
    row |= {name: summary.get(name) for name in _COSTS}
    return {**row, "seconds": job.seconds, "run": run, "reason": job.reason}
