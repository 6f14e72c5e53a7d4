"""Runs of an arm as their logs tell them: one value each, all at the same point, once each, with their pairs."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mptrain.study.comparison.logs.curves import Curve, read_curve
from mptrain.study.comparison.results import Form
from mptrain.study.comparison.statistics import rounding_step
from mptrain.system.errors import DataError, UsageError
from mptrain.system.words import counted, listed


@dataclass(frozen=True)
class Question:
    """Claim that a comparison of logs is asked about.

    Attributes:
        metric: Name of the metric in the logs.
        form: ``equivalent`` (to the reference, within the margin), ``not inferior`` (not worse by the margin or more),
            or ``beats target``.
        margin: Equivalence or non-inferiority margin, in the metric's unit, chosen before the runs; 0 for a target.
        target: Number to beat; NaN without.
        at: ``last``, ``step=N``, or ``last=N`` for the mean of the N last values.
        paired: Runs with the same ``{seed}`` in their paths belong together.
        looks: Number of times that the question is asked while runs come in, this one included.
        lower_is_better: Direction of the metric.
        where: Column to value, of the rows of logs that count; empty for all.
        pattern: Regular expression with named groups that reads lines of text; empty for logs of a known format.
    """

    metric: str
    form: Form
    margin: float
    target: float
    at: str
    paired: bool
    looks: int
    lower_is_better: bool
    where: dict[str, str] = field(default_factory=dict)
    pattern: str = ""


#: Letter of no path, in place of ``{seed}``.
_SEED = "\ue000"

#: Fewer values may be equal in two runs by chance.
_FEW = 10

#: Larger values count as infinite, because differences of them may be.
_LARGEST = 1e300

#: Number of values at the end of a log by which its rounding is told.
_LOOKED_AT = 200


@dataclass(frozen=True)
class LoggedRun:
    """Run of an arm: its log, and the value at which it is compared; NaN or infinite if it failed there.

    ``rounded_to`` is the step, a power of ten, to which its log rounds values; 0 if it does not. ``start`` is its first
    value, if that is of the first quarter of the steps before; else NaN.
    """

    path: str
    form: str
    digest: str
    step: int
    value: float
    seed: str = ""
    rounded_to: float = 0.0
    start: float = math.nan


def read_arms(
    arms: Mapping[str, Sequence[str]], question: Question, reference: str
) -> tuple[dict[str, tuple[LoggedRun, ...]], list[str]]:
    """Return the runs of each arm at the point that a question names, and notes on their logs.

    ``arms`` are paths by name, as `read_curves` takes them, ``reference`` the name of the arm that has the pairs.

    Raises:
        UsageError: Pairs or point are not named so that they can be found.
        DataError: A log is damaged or there twice, or the runs are not all logged at that point.
    """
    curves = {name: read_curves(paths, question) for name, paths in arms.items()}
    _refuse_copies(curves)
    if question.paired:
        _require_pairs(curves, reference)
    every = [curve for some in curves.values() for _, curve in some]
    at = _point(question, every)
    runs = {name: tuple(_run(curve, seed, at) for seed, curve in some) for name, some in curves.items()}
    return runs, _notes(every, question, at)


def read_curves(paths: Sequence[str], question: Question) -> list[tuple[str, Curve]]:
    """Return the curves of an arm's runs with the names of their pairs.

    In paths ``*`` and ``?`` stand for any letters, and ``{seed}`` for those that name the pair of a run.
    """
    curves: list[tuple[str, Curve]] = []
    for pattern in paths:
        before, placeholder, after = pattern.partition("{seed}")
        if question.paired and not placeholder:
            raise UsageError(
                f"{pattern} does not say which runs belong together", "write {seed} where their names differ"
            )
        searched = f"{before}*{after}" if placeholder else pattern
        found_there = [pattern] if Path(pattern).exists() else glob.glob(searched)  # noqa: PTH207 - absolute ones too
        if "*{seed}" in pattern or "{seed}*" in pattern:
            raise UsageError(f"{pattern}: where does a seed end?", "{seed} cannot stand beside *")
        # MLflow describes an experiment beside its runs
        logs = sorted(path for path in found_there if Path(path).name != "meta.yaml") or [pattern]
        if logs == [pattern] and not Path(pattern).exists() and not Path(pattern).parent.is_file():
            hint = "check the path; in a pattern [ is written [[]"
            raise DataError(f"there is no log {pattern}", hint)
        as_regex = fnmatch.translate(f"{before}{_SEED}{after}")
        seed = re.compile(as_regex.replace(_SEED, "(?P<seed>.+?)")) if placeholder else None
        for log in logs:
            named = seed.fullmatch(log) if seed else None
            curves.append(
                (
                    named["seed"] if named else "",
                    read_curve(Path(log), question.metric, question.where, question.pattern),
                )
            )
    _refuse_ranks([curve.path for _, curve in curves])
    if question.paired and (twice := [name for name, n in Counter(name for name, _ in curves).items() if n > 1]):
        raise UsageError(f"two runs of an arm have the seed {twice[0]}", "an arm has one run for each")
    return curves


def _refuse_ranks(paths: Sequence[str]) -> None:
    """Raise DataError for logs of several ranks of a run, which are no runs of their own."""
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.setdefault(re.sub(r"(?i)(rank|process|gpu|worker)[-_=.]?\d+", r"\1", path), path)
        if other != path:
            raise DataError(f"{other} and {path} are ranks of one run by their names", "give the log of one rank each")


def _content(curve: Curve) -> str:
    return hashlib.sha256(curve.steps.tobytes() + curve.values.tobytes()).hexdigest()


def _refuse_copies(curves: Mapping[str, Sequence[tuple[str, Curve]]]) -> None:
    """Raise DataError for a log that is there twice, in another format too; a few values may be equal by chance."""
    seen: dict[str, str] = {}
    for some in curves.values():
        for _, curve in some:
            many = len({*curve.values.tolist()}) >= _FEW  # an accuracy may stay at one value in every run
            for same in (str(Path(curve.path).resolve()), *([_content(curve)] if many else [])):
                if other := seen.get(same):
                    raise DataError(f"{other} and {curve.path} are the same log", "give each run once")
                seen[same] = curve.path


def _require_pairs(curves: Mapping[str, Sequence[tuple[str, Curve]]], reference: str) -> None:
    """Raise UsageError if a run has no partner."""
    seeds = {name: {seed for seed, _ in some} for name, some in curves.items()}
    for name, own in seeds.items():
        if alone := sorted(own ^ seeds[reference]):
            there, other = (name, reference) if alone[0] in own else (reference, name)
            why = f"{there} has a run with seed {alone[0]}, and {other} has none"
            raise UsageError(
                why, "give that log too (of a run that failed, one whose last value is nan), or compare without --pair"
            )


@dataclass(frozen=True)
class _Point:
    """Place at which runs are compared: a step, how many values up to it are averaged, and if it is the end."""

    step: int
    values: int = 1
    last: bool = False


def _point(question: Question, curves: Sequence[Curve]) -> _Point:
    """Return the point that all runs have reached; raise DataError if they end at several and none is chosen."""
    kind, _, number = question.at.partition("=")
    if not re.fullmatch(r"last(=[1-9]\d{0,17})?|step=\d{1,18}", question.at, re.ASCII):
        raise UsageError(f"--at {question.at}: not a point of a curve", "write last, last=N or step=N")
    living = [curve for curve in curves if not _failed(curve)] or curves
    ends = {curve.path: int(curve.steps[-1]) for curve in living}
    if kind == "last":
        if len({*ends.values()}) > 1:
            first, last = min(ends, key=lambda path: ends[path]), max(ends, key=lambda path: ends[path])
            raise DataError(
                f"the runs end at different steps: {first} at {ends[first]:,}, {last} at {ends[last]:,}",
                f"compare them where all are, with --at step={_common(living)}; if the shorter ones failed, a last "
                "row of nan in their logs says so",
            )
        count = int(number or 1)
        begins = {int(curve.steps[-count]) for curve in living if len(curve.steps) >= count}
        if len(begins) > 1:
            raise DataError(
                f"the last {count:,} values begin at steps from {min(begins):,} to {max(begins):,}",
                "the runs are logged at different steps: compare them at one, --at step=N",
            )
        return _Point(max(ends.values()), count, last=True)
    wanted = int(number)
    for curve in curves:
        if wanted not in curve.steps and not _has_failed_by(curve, wanted):
            near = curve.steps[np.argmin(np.abs(curve.steps - wanted))]
            raise DataError(
                f"{curve.path} has no value at step {wanted:,}; the nearest is at {near:,}",
                f"choose a step that all have, such as --at step={_common(living)}",
            )
    return _Point(wanted)


def _failed(curve: Curve) -> bool:
    """Return whether a run has failed: its last value is not finite."""
    return not math.isfinite(curve.values[-1])


def _has_failed_by(curve: Curve, step: int) -> bool:
    """Return whether a run has failed by a step: all of its values from there on, or its last, are not finite."""
    return _failed(curve) and not np.any(np.isfinite(curve.values[curve.steps >= step]))


def _common(curves: Sequence[Curve]) -> int | str:
    """Return the last step at which all runs have a value; ``N`` if there is none."""
    shared = set(curves[0].steps.tolist()).intersection(*(curve.steps.tolist() for curve in curves[1:]))
    return max(shared) if shared else "N"


def _run(curve: Curve, seed: str, at: _Point) -> LoggedRun:
    until = int(np.searchsorted(curve.steps, at.step, side="right"))
    failed = _failed(curve) if at.last else _has_failed_by(curve, at.step)
    if until < at.values and not failed:
        raise DataError(
            f"{curve.path} has {counted(until, 'value')}, not {at.values:,}", "choose a smaller --at last=N"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(curve.values[-1] if failed else np.mean(curve.values[until - at.values : until]))
    if abs(value) > _LARGEST:
        value = math.copysign(math.inf, value)
    step = rounding_step(curve.values[-_LOOKED_AT:].tolist())
    early = until > at.values and 4 * curve.steps[0] <= at.step
    start = float(curve.values[0]) if early else math.nan
    return LoggedRun(curve.path, curve.form, curve.digest, at.step, value, seed, step, start)


def _notes(curves: Sequence[Curve], question: Question, at: _Point) -> list[str]:
    mean = f", by the mean of the last {at.values:,} values" if at.values > 1 else ""
    better = "lower" if question.lower_is_better else "higher"
    notes = [f"compared at step {at.step:,}{mean}; {better} is better"]
    if died := [curve.path for curve in curves if _failed(curve) and curve.steps[-1] < at.step]:
        notes.append(f"{listed(died, 3)}: not finite at the end, so failed at every later step")
    if resumed := [curve for curve in curves if curve.given_up]:
        left_out = counted(sum(curve.given_up for curve in resumed), "value")
        again = f"steps go back, as after a resume: {left_out} before it are left out"
        notes.append(f"{listed([curve.path for curve in resumed], 3)}: {again}")
    first = {_content(curve): curve for curve in reversed(curves)}
    if alike := [curve.path for curve in curves if len(curve.values) > 1 and first[_content(curve)] is not curve]:
        notes.append(f"{listed(alike, 3)}: the same few values as another log; a copy is no evidence, so leave it out")
    if uncounted := [curve.path for curve in curves if curve.counted]:
        notes.append(f"{listed(uncounted, 3)}: without steps, so that values are counted")
    if len(forms := {curve.form for curve in curves}) > 1:
        notes.append(f"formats: {', '.join(sorted(forms))}")
    return notes
