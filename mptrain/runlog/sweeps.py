"""The folder of a sweep: ``sweep.json``, which alone says what its jobs are and how they stand, and files beside it.

One of these is ``sweep.csv``: one row for each job, its final numbers taken from the ``summary.json`` of its run. A cell is empty where
there is nothing to say. Nothing reads that file back. Text that a spreadsheet would compute (``=1+1``) begins with an apostrophe, which
spreadsheets take for "this is text".

Comparisons and recipes are sweeps whose jobs have arms. Reading and writing is all that happens here; which process
works on a sweep is the business of `mptrain.sweep.runner`.
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

from mptrain.errors import EXIT_NUMERICS, StorageError
from mptrain.fields import NonNegativeInt
from mptrain.masking import masked
from mptrain.runlog.atomic_files import require_no_links, write_atomically
from mptrain.runlog.run_paths import PathInside, RunPaths, name_problem
from mptrain.runlog.run_state import now
from mptrain.runlog.schema_checks import build
from mptrain.runlog.strict_json import read_object
from mptrain.runlog.summary_file import read_summary

#: Version of the layout of ``sweep.json``, and of ``verdict.json`` beside it.
SCHEMA = 2
SWEEP_JSON = "sweep.json"
JobStatus = Literal["waiting", "running", "done", "failed", "interrupted", "preempted"]
Kind = Literal["sweep", "comparison", "recipe"]

#: Numbers of a whole run, under the names they have in its summary.
_OF_RUN = ("metric", "metric_low", "metric_high", "metric_name", "metric_split")
_COSTS = ("terms_per_second", "train_seconds", "peak_memory")
_OF_LEARNER = ("updates", "skipped", "skip_rate", "scale_first", "scale_min", "scale_max", "scale_last")

#: First characters of cells that some spreadsheet takes for formulas; some take the full-width forms too.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Every path of one sweep.

    Attributes:
        root: The folder itself.
    """

    root: Path

    #: Content and status of the sweep and its jobs (see `Sweep`).
    json = PathInside(SWEEP_JSON)
    #: One row for each job with its final numbers, for spreadsheets.
    csv = PathInside("sweep.csv")
    #: The file whose kernel lock says that a process is working on this sweep.
    lock = PathInside("sweep.lock")
    #: Result of a comparison, JSON.
    comparison = PathInside("comparison.json")
    #: Verdict on a recipe's expectations, JSON.
    verdict = PathInside("verdict.json")
    #: The self-contained report for a browser.
    report_html = PathInside("report.html")
    #: The same report in Markdown.
    report_md = PathInside("report.md")
    #: The pictures of the report in Markdown.
    figures = PathInside("figures")

    def run(self, name: str) -> Path:
        """The run directory of a job."""
        return self.root / name

    def log(self, name: str) -> Path:
        """Return the file of what a job printed, over all its attempts."""
        return self.root / f"{name}.log"


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job and how it stands.

    Attributes:
        number: From 0.
        name: Its run directory, below the sweep's folder.
        overrides: The whole command line of its point.
        varied: The words in which points differ.
        arm: Which arm of a comparison it belongs to; empty in a plain sweep.
        status: ``waiting``, ``running``, ``done``, ``failed``, ``interrupted`` (Ctrl-C) or ``preempted``.
        code: Exit code of its process; negative where that signal killed it; None before its end.
        reason: Why it is not done, in one line; of a job that runs, who runs it where that is not this sweep's own process.
        seconds: Wall time of all its processes, their starts included; of those that no sweep saw end, that of the attempt.
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
        """The words in which points differ, for messages and tables."""
        return " ".join(self.varied) or "(no overrides)"


@dataclass(frozen=True, slots=True)
class Sweep:
    """The content of ``sweep.json``.

    Attributes:
        folder: Where it is; not written, so that the folder can be moved.
        kind: ``sweep``, ``comparison`` or ``recipe``.
        words: The overrides that were expanded.
        config_dirs: Further folders of groups and options, absolute.
        config_name: The file at the top.
        parallel: Jobs at a time.
        jobs: In the order of their numbers.
        started: When it was planned, UTC.
        plan: What is to be judged once the jobs are done, JSON values; empty in a plain sweep.
        schema: Version of this layout.
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
        """Paths of everything in its folder."""
        return SweepPaths(self.folder)

    def has_ended(self, job: SweepJob) -> bool:
        """Return whether a job needs no further run: it is done; where arms are judged, a failure of its numerics is a finding."""
        return job.status == "done" or (self.kind != "sweep" and job.status == "failed" and job.code == EXIT_NUMERICS)

    def with_job(self, job: SweepJob) -> Sweep:
        """The same sweep with one job as it stands now."""
        jobs = (*self.jobs[: job.number], job, *self.jobs[job.number + 1 :])
        return replace(self, jobs=jobs)


def _write_state(sweep: Sweep) -> None:
    """Replace ``sweep.json`` atomically and durably.

    Raises:
        StorageError: It cannot be written; the old content is untouched.
    """
    jobs = [{name: getattr(job, name) for name in SweepJob.__dataclass_fields__} for job in sweep.jobs]
    written = [name for name in Sweep.__dataclass_fields__ if name not in ("schema", "folder")]
    fields = {"schema": sweep.schema, **{name: getattr(sweep, name) for name in written}, "jobs": jobs}
    text = json.dumps(fields, indent=1, allow_nan=False)
    write_atomically(sweep.paths.json, text + "\n")


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder.

    Raises:
        StorageError: There is none, ``sweep.json`` is damaged or of another schema, or there are symbolic links in it.
    """
    path = SweepPaths(folder).json
    require_no_links(folder, [SweepPaths(folder).figures])
    if not (fields := read_object(path, SCHEMA, missing_ok=True)):
        raise StorageError(f"{folder} is not a sweep: it has no {SWEEP_JSON}", "name the folder of one")
    try:
        sweep = replace(build(Sweep, {**fields, "folder": ""}, lenient=True), folder=folder)
        if sweep.parallel < 1:
            raise ValueError(f"parallel {sweep.parallel!r} is not a number of jobs")
        for number, job in enumerate(sweep.jobs):
            if job.number != number:
                raise ValueError(f"job {number} says that its number is {job.number!r}")
            if why := "leads out of the folder" if "/" in job.name else name_problem(f"{job.name}.log"):
                raise ValueError(f"the name {job.name!r} {why}")
    except ValueError as error:
        raise StorageError(f"{path} is damaged: {error}", "restore the file from a copy, or start it again") from error
    return sweep


def is_sweep(path: Path) -> bool:
    """Return whether a path is the folder of a sweep."""
    return SweepPaths(path).json.is_file()


def write_sweep(sweep: Sweep) -> None:
    """Replace ``sweep.json`` and ``sweep.csv``, each atomically.

    Raises:
        StorageError: One cannot be written; its old content is untouched.
    """
    _write_state(sweep)
    _write_rows(sweep)


def _write_rows(sweep: Sweep) -> None:
    """Replace ``sweep.csv`` atomically; after a power failure ``sweep.json`` and the runs can make it again.

    Raises:
        StorageError: It cannot be written; the old content is untouched.
    """
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
    """Return a value for a cell of a spreadsheet: text that would be computed there behind an apostrophe, all else as it is."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def interval_of(summary: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the ends of the 95 % CI over test samples of a summary's metric; None where there is none."""
    found = (summary.get("intervals") or {}).get(summary.get("metric_name"))
    return (float(found[0]), float(found[1])) if found else None


def overrides_of(job: SweepJob) -> dict[str, str]:
    """Key to value of the command line of a job, without Hydra's marks of adding and removing; the last word counts."""
    parts = [word.partition("=") for word in job.overrides]
    return {key.lstrip("+~"): value for key, _, value in parts}


def varied_keys(jobs: Iterable[SweepJob]) -> list[str]:
    """The keys in which the command lines of jobs differ, in the order in which they appear."""
    tables = [overrides_of(job) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def summary_of(run: Path) -> dict[str, Any]:
    """The final numbers of a run; empty where it has none, or where they cannot be read."""
    path = RunPaths(run).summary
    try:
        found = path.stat()
        return _read(path, found.st_mtime_ns, found.st_ino)
    except (OSError, StorageError):
        return {}


@functools.cache  # a sweep of a thousand jobs writes its table two thousand times
def _read(path: Path, written: int, inode: int) -> dict[str, Any]:  # a clock may stand still between two writes
    return read_summary(path)


def _row(
    job: SweepJob, summary: dict[str, Any], keys: Sequence[str], learners: Sequence[str], run: str
) -> dict[str, Any]:
    values = overrides_of(job)
    row: dict[str, Any] = {"number": job.number, "arm": job.arm, "status": job.status, "exit": job.code}
    row |= {key: values.get(key) for key in keys}
    low, high = interval_of(summary) or (None, None)
    of_run = {**summary, "metric_low": low, "metric_high": high}
    row |= {name: of_run.get(name) for name in _OF_RUN}
    for name in learners or [""]:
        of_learner = (summary.get("learners") or {}).get(name) or {}
        numbers = {**of_learner, **{f"scale_{which}": at for which, at in (of_learner.get("scale") or {}).items()}}
        prefix = f"{name}." if len(learners) > 1 else ""
        row |= {f"{prefix}{key}": numbers.get(key) for key in _OF_LEARNER}
    row |= {name: summary.get(name) for name in _COSTS}
    return {**row, "seconds": job.seconds, "run": run, "reason": job.reason}
