"""``sweep.csv``: one row for each job, its final numbers taken from the ``summary.json`` of its run.

A cell is empty where there is nothing to say. Nothing reads this file back. Text that a spreadsheet would compute (``=1+1``) begins
with an apostrophe, which spreadsheets take for "this is text".
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mptrain.errors import StorageError
from mptrain.masking import masked
from mptrain.runlog.layout import RunPaths
from mptrain.runlog.storage import write_atomically
from mptrain.runlog.summary import read_summary
from mptrain.runlog.sweeps import Sweep, SweepJob, write_state

#: Numbers of a whole run, under the names they have in its summary.
_OF_RUN = ("metric", "metric_low", "metric_high", "metric_name", "metric_split")
_COSTS = ("terms_per_second", "train_seconds", "peak_memory")
_OF_LEARNER = ("updates", "skipped", "skip_rate", "scale_first", "scale_min", "scale_max", "scale_last")


#: First characters of cells that some spreadsheet takes for formulas; some take the full-width forms too.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def write_sweep(sweep: Sweep) -> None:
    """Replace ``sweep.json`` and ``sweep.csv``, each atomically.

    Raises:
        StorageError: One cannot be written; its old content is untouched.
    """
    write_state(sweep)
    write_rows(sweep)


def write_rows(sweep: Sweep) -> None:
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


def words_of(job: SweepJob) -> dict[str, str]:
    """Key to value of the command line of a job, without Hydra's marks of adding and removing; the last word counts."""
    parts = [word.partition("=") for word in job.overrides]
    return {key.lstrip("+~"): value for key, _, value in parts}


def varied_keys(jobs: Iterable[SweepJob]) -> list[str]:
    """The keys in which the command lines of jobs differ, in the order in which they appear."""
    tables = [words_of(job) for job in jobs]
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
    values = words_of(job)
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
