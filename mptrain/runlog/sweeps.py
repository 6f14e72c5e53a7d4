"""The folder of a sweep: ``sweep.json``, which alone says what its jobs are and how they stand, and files beside it.

Comparisons and recipes are sweeps whose jobs have arms. Reading and writing is all that happens here; which process
works on a sweep is the business of `mptrain.sweep.runner`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mptrain.errors import EXIT_NUMERICS, StorageError
from mptrain.fields import NonNegativeInt
from mptrain.runlog.naming import objection
from mptrain.runlog.schema_checks import build
from mptrain.runlog.state import now
from mptrain.runlog.storage import require_no_links, write_atomically
from mptrain.runlog.strict_json import read_object

#: Version of the layout of ``sweep.json``, and of ``verdict.json`` beside it.
SCHEMA = 2
SWEEP_JSON = "sweep.json"
JobStatus = Literal["waiting", "running", "done", "failed", "interrupted", "preempted"]
Kind = Literal["sweep", "comparison", "recipe"]


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """Every path of one sweep.

    Attributes:
        folder: The folder itself.
    """

    folder: Path

    @property
    def json(self) -> Path:
        """What the sweep is and how its jobs stand (see `Sweep`)."""
        return self.folder / SWEEP_JSON

    @property
    def csv(self) -> Path:
        """One row for each job with its final numbers, for spreadsheets."""
        return self.folder / "sweep.csv"

    @property
    def lock(self) -> Path:
        """The file whose kernel lock says that a process is working on this sweep."""
        return self.folder / "sweep.lock"

    @property
    def comparison(self) -> Path:
        """What a comparison found, JSON."""
        return self.folder / "comparison.json"

    @property
    def verdict(self) -> Path:
        """What a recipe's expectations came to, JSON."""
        return self.folder / "verdict.json"

    @property
    def report_html(self) -> Path:
        """The self-contained report for a browser."""
        return self.folder / "report.html"

    @property
    def report_md(self) -> Path:
        """The same report in Markdown."""
        return self.folder / "report.md"

    @property
    def figures(self) -> Path:
        """The pictures of the report in Markdown."""
        return self.folder / "figures"

    def run(self, name: str) -> Path:
        """The run directory of a job."""
        return self.folder / name

    def log(self, name: str) -> Path:
        """What a job printed, over all its attempts."""
        return self.folder / f"{name}.log"


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
        """Where everything in its folder is."""
        return SweepPaths(self.folder)

    def has_ended(self, job: SweepJob) -> bool:
        """Whether a job needs no further run: it is done; where arms are judged, a failure of its numerics is a finding."""
        return job.status == "done" or (self.kind != "sweep" and job.status == "failed" and job.code == EXIT_NUMERICS)

    def with_job(self, job: SweepJob) -> Sweep:
        """The same sweep with one job as it stands now."""
        jobs = (*self.jobs[: job.number], job, *self.jobs[job.number + 1 :])
        return replace(self, jobs=jobs)


def write_state(sweep: Sweep) -> None:
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
            if why := "leads out of the folder" if "/" in job.name else objection(f"{job.name}.log"):
                raise ValueError(f"the name {job.name!r} {why}")
    except ValueError as error:
        raise StorageError(f"{path} is damaged: {error}", "restore the file from a copy, or start it again") from error
    return sweep


def is_sweep(path: Path) -> bool:
    """Whether a path is the folder of a sweep."""
    return SweepPaths(path).json.is_file()
