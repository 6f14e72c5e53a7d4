"""List of the runs below a folder, filtered and sorted, as a table and as a page with links to their reports."""

from __future__ import annotations

import functools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from mptrain.config.config_diff import as_number, flat
from mptrain.config.value_checks import show
from mptrain.report.page import Bullets, Cell, Page, Table, Tone, section, table
from mptrain.runlog.atomic_files import storage_errors
from mptrain.runlog.directory import runs_below
from mptrain.runlog.run_reader import Run, read_run
from mptrain.runlog.run_state import lower_is_better
from mptrain.system.errors import StorageError, UsageError, either, suggest
from mptrain.system.words import UNKNOWN, counted, moment, number

_TONES: Final[dict[str, Tone]] = {"done": "good", "failed": "bad", "killed": "bad", "preempted": "warn"}

#: Data of metrics, the last of which decides where a run has several.
_SPLITS: Final = ("train", "test", "val")

#: Number of runs whose keys are named if no run has the key of a filter.
_SOME: Final = 100

#: Comparisons by the sign of a filter.
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class FoundRun:
    """Run that was found below a folder.

    Attributes:
        run: Its small files, as read.
        held: Whether a process is writing it.
    """

    run: Run
    held: bool

    @property
    def path(self) -> str:
        """Path of the run directory."""
        return str(self.run.paths.root)

    @property
    def status(self) -> str:
        """Status of the run: ``done``, ``failed``, ``preempted``, ``running``, or ``killed`` while running."""
        status = self.run.state.status
        return "killed" if status == "running" and not self.held else status

    @property
    def started(self) -> str:
        """Start of its last attempt in UTC, ISO 8601; empty if unknown."""
        return self.run.state.started

    @property
    def overrides(self) -> tuple[str, ...]:
        """Its ``KEY=VALUE`` overrides."""
        return self.run.overrides

    @property
    def steps(self) -> int | None:
        """Number of attempted steps at the end of its last attempt; None if that has not ended."""
        return self.run.state.attempts[-1].to_step if self.run.state.attempts else None

    @property
    def metric_name(self) -> str | None:
        """Name of its final metric; None without one."""
        return self.run.summary.get("metric_name")

    @property
    def metric(self) -> float | None:
        """Value of its final metric; None without one."""
        return self.run.summary.get("metric")

    @property
    def reason(self) -> str:
        """Reason why it ended; empty if it is done."""
        return self.run.state.reason

    def numbers(self) -> dict[str, float]:
        """Return the numbers that runs are sorted by: steps, and those of the summary, with metrics as ``val_top1``."""
        summary = self.run.summary
        numbers = {"steps": self.steps, **summary}
        final, own = numbers.pop("metric", None), self.metric_name or "metric"
        of_split = {summary.get("metric_split") or "test": {own: final}}
        for split in _SPLITS:
            metrics = {**(summary.get(split) or {}), **of_split.get(split, {})}
            numbers |= {f"{split}_{name}": value for name, value in metrics.items()}
            numbers[f"{split}_metric"] = metrics.get(own)
        return {key: value for key, value in numbers.items() if type(value) in (int, float) and not math.isnan(value)}

    def settings(self, key: str = "") -> dict[str, Any]:
        """Return what else runs are filtered by: path and status, keys of the configuration, and options of groups.

        For a key, only the sections of the configuration that may hold it are read, which thousands of runs share.
        """
        own = {"run": self.path, "status": self.status, "reason": self.reason, "started": self.started}
        if key in own:
            return own
        name = re.escape(key.partition(".")[0])
        part = re.findall(rf"^(?:chosen|{name}):.*\n(?:[ -].*\n)*", self.run.config, re.MULTILINE) if key else ()
        written = flat("".join(part)) or flat(self.run.config)
        chosen = {key.removeprefix("chosen."): value for key, value in written.items() if key.startswith("chosen.")}
        return {**written, **chosen, **own}


def find_runs(folder: Path) -> tuple[list[FoundRun], list[str]]:
    """Return the runs below a folder, the newest first, and a sentence for each that cannot be read.

    Raise StorageError if the folder does not exist.
    """
    with storage_errors(folder, "read"):
        is_folder = folder.is_dir()
    if not is_folder:
        beside = [str(path) for path in folder.parent.glob("*") if path.is_dir()]
        hint = suggest(str(folder), beside, "give the folder that holds the runs, run.root")
        raise StorageError(f"there is no folder {folder}", hint)
    runs, notes = [], []
    for directory in runs_below(folder):
        try:
            runs.append(FoundRun(read_run(directory.root), directory.holder() is not None))
        except StorageError as error:
            notes.append(str(error))
    return sorted(runs, key=lambda run: run.started, reverse=True), notes


def _splits(runs: Sequence[FoundRun]) -> dict[str, str]:
    """Return the split that a metric's bare name stands for in all runs: validation data, if any run has it there."""
    known = {key for run in runs for key in run.numbers()}
    pairs = [(key.partition("_")[2], split) for split in _SPLITS for key in known if key.startswith(f"{split}_")]
    return {name: split for name, split in pairs if name not in known}


def _numbers(runs: Sequence[FoundRun]) -> list[dict[str, float]]:
    """Return the numbers of runs, with metrics by bare names too: all of one split, as a mixture has no order."""
    splits = _splits(runs)
    numbers = [run.numbers() for run in runs]
    return [{**own, **{n: own[f"{s}_{n}"] for n, s in splits.items() if f"{s}_{n}" in own}} for own in numbers]


def sort_notes(runs: Sequence[FoundRun], key: str | None) -> list[str]:
    """Return a note if runs are sorted by a metric on test data, by which the first one was chosen then."""
    if _splits(runs).get(key or "") != "test":
        return []
    return [f"sorted by {key} on test data, as no run has it on validation data: the first looks better than it is"]


def filtered(runs: Sequence[FoundRun], filters: Iterable[str]) -> list[FoundRun]:
    """Return the runs that fit all filters: ``KEY=PATTERN``, with ``*``, ``?`` and ``[...]``, or ``KEY>NUMBER``.

    A key is one of ``config.yaml``, such as ``train.epochs``, a group, such as ``precision``, ``run``, ``status``,
    ``reason`` or ``started``, or a number that runs are sorted by, such as ``top1`` or ``test_top1``. Numbers are
    compared as numbers, and ``started`` as text. A named network also fits by its name, ``model=resnet18``. Raise
    UsageError if no run has the key.
    """
    numbers = _numbers(runs)
    kept = list(range(len(runs)))
    for text in filters:
        match = re.fullmatch(r"([^<>=]*)([<>]=?|=)(.*)", text, re.DOTALL)
        if not match:
            raise UsageError(f"--filter {text} has no pattern", f"write --filter {text}=PATTERN, or '{text}>NUMBER'")
        key, sign, pattern = match[1].strip(), match[2], match[3]
        if pattern[:1] in ("=", "<", ">") and sign == "=":
            raise UsageError(f"--filter {text}: {sign}{pattern[0]} is no comparison", "write =, <, <=, > or >=")
        if sign != "=" and as_number(pattern) is None and key != "started":
            raise UsageError(f"--filter {text}: must end with a number", f"write --filter '{key}{sign}NUMBER'")
        names = key, f"{key}.name"
        values = [{**own, **run.settings(key)} for own, run in zip(numbers, runs, strict=True)]
        if runs and not any(key in own for own in values):
            known = {name for own, run in zip(numbers[:_SOME], runs, strict=False) for name in (*own, *run.settings())}
            hint = "keys are run, status, groups such as precision, those of config.yaml, and numbers such as top1"
            raise UsageError(f"--filter {text}: no run has the key {key!r}", suggest(key, known, hint))
        fits = functools.partial(_fits, sign=sign, pattern=pattern, as_text=key == "started")
        kept = [at for at in kept if any(name in values[at] and fits(values[at][name]) for name in names)]
    return [runs[at] for at in kept]


def _fits(value: Any, sign: str, pattern: str, *, as_text: bool) -> bool:
    text = value if isinstance(value, str) else show(value)
    if as_text and sign != "=":
        return _COMPARE[sign](text, pattern)
    own = float(value) if type(value) in (int, float) else as_number(text)  # infinite ones too
    asked = as_number(pattern)
    if own is not None and asked is not None and _COMPARE[sign](own, asked):
        return True
    return sign == "=" and fnmatchcase(text, pattern)


def ordered(runs: Sequence[FoundRun], key: str) -> list[FoundRun]:
    """Return the runs sorted by ``started``, the newest first, or by a number, the best first and those without last.

    Numbers are ``steps``, metrics (on validation data, if any run has them; ``test_top1`` is that on test data), and
    others of ``summary.json``. The lower one is better if the run says so of its metric, or the name, such as
    ``loss``. Otherwise the largest is first. Raise UsageError if no run has the number.
    """
    if key == "started":
        return sorted(runs, key=lambda run: run.started, reverse=True)
    values = _numbers(runs)
    known = {name for own in values for name in own}
    if runs and key not in known:
        hint = f"choose {either(['started', *sorted(known)])}"
        raise UsageError(f"--sort {key}: no run has such a number", suggest(key, {"started", *known}, hint))
    sign = 1 if _is_lower_better(key, runs) else -1
    order = sorted(range(len(runs)), key=lambda at: (key not in values[at], sign * values[at].get(key, 0)))
    return [runs[at] for at in order]


def _is_lower_better(key: str, runs: Sequence[FoundRun]) -> bool:
    name = re.sub("^(val|test|train)_", "", key)
    directions = {run.run.summary.get("higher_is_better") for run in runs if name in (run.metric_name, "metric")} - {
        None
    }
    if directions:
        return False in directions
    try:
        return lower_is_better(name)
    except UsageError:
        return False


def runs_table(runs: Sequence[FoundRun], key: str | None = None, beside: Path | None = None) -> Table:
    """Return the table of runs, with the number that they are sorted by.

    With ``beside``, the folder of the page, each run links to its report if it has one.
    """
    split = _splits(runs).get(key or "")
    shown = f"{split}_{key}" if split else None if key in (None, "started", "steps") else key
    rows = [
        (
            Cell(run.path, link=_report(run, beside)) if beside else run.path,
            Cell(run.status, _TONES.get(run.status, "")),
            moment(run.started),
            UNKNOWN if run.steps is None else f"{run.steps:,}",
            f"{run.metric_name} {number(run.metric)} ({run.run.summary.get('metric_split', 'test')})"
            if run.metric_name
            else "",
            number(run.numbers().get(shown)) if shown else "",
            " ".join(run.overrides),
        )
        for run in runs
    ]
    return table(("run", "status", "started", "steps", "metric", shown, "overrides"), rows, numeric=(3, 5))


def runs_page(folder: Path, runs: Sequence[FoundRun], notes: Sequence[str], key: str | None = None) -> Page:
    """Return the page of a folder that lists runs, with links to their reports."""
    without = [run for run in runs if not _report(run, folder)]
    missing = (f"{counted(len(without), 'run')} without a report: mptrain report RUN writes it",) if without else ()
    return Page(
        over="mptrain runs",
        title=folder.resolve().name,
        status=Cell(""),
        lead=f"{counted(len(runs), 'run')}, {'the newest first' if key in (None, 'started') else f'by {key}'}.",
        sections=(section("Runs", runs_table(runs, key, folder), Bullets((*missing, *notes))),),
    )


def _report(run: FoundRun, folder: Path) -> str:
    """Return the link from a page in a folder to the report of a run; empty if it has none."""
    report = run.run.paths.report_html
    return f"./{os.path.relpath(report, folder)}" if report.is_file() else ""
