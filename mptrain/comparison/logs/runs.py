"""Runs of an arm as their logs tell them: one value each, all at the same point, once each, with their pairs."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptrain.comparison.logs.curves import Curve, read_curve
from mptrain.comparison.logs.means import rounding_step
from mptrain.comparison.logs.question import Question
from mptrain.numerics.words import counted, listed
from mptrain.system.errors import DataError, UsageError

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

    ``rounded_to`` is the step, a power of ten, to which its log rounds values; 0 if it does not.
    """

    path: str
    form: str
    digest: str
    step: int
    value: float
    seed: str = ""
    rounded_to: float = 0.0


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
    found: list[tuple[str, Curve]] = []
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
        places = sorted(found_there) or [pattern]
        if places == [pattern] and not Path(pattern).exists() and not Path(pattern).parent.is_file():
            hint = "check the path; in a pattern [ is written [[]"
            raise DataError(f"there is no log {pattern}", hint)
        as_regex = fnmatch.translate(f"{before}{_SEED}{after}")
        seed = re.compile(as_regex.replace(_SEED, "(?P<seed>.+?)")) if placeholder else None
        for place in places:
            named = seed.fullmatch(place) if seed else None
            found.append((named["seed"] if named else "", read_curve(Path(place), question.metric)))
    if question.paired and (twice := [name for name, n in Counter(name for name, _ in found).items() if n > 1]):
        raise UsageError(f"two runs of an arm have the seed {twice[0]}", "an arm has one run for each")
    return found


def _content(curve: Curve) -> str:
    return hashlib.sha256(curve.steps.tobytes() + curve.values.tobytes()).hexdigest()


def _refuse_copies(curves: Mapping[str, Sequence[tuple[str, Curve]]]) -> None:
    """Raise DataError for a log that is there twice, in another format too; a few values may be equal by chance."""
    seen: dict[str, str] = {}
    for some in curves.values():
        for _, curve in some:
            for same in (str(Path(curve.path).resolve()), *([_content(curve)] if len(curve.values) >= _FEW else [])):
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
            raise UsageError(why, "leave it out, or compare without --pair")


@dataclass(frozen=True)
class _Point:
    """Place at which runs are compared: a step, and the number of values up to it whose mean counts."""

    step: int
    values: int = 1


def _point(question: Question, curves: Sequence[Curve]) -> _Point:
    """Return the point that all runs have reached; raise DataError if they end at several and none is chosen."""
    kind, _, number = question.at.partition("=")
    if not re.fullmatch(r"last(=[1-9]\d{0,17})?|step=\d{1,18}", question.at, re.ASCII):
        raise UsageError(f"--at {question.at}: not a point of a curve", "write last, last=N or step=N")
    ends = {curve.path: int(curve.steps[-1]) for curve in curves}
    if kind == "last":
        if len({*ends.values()}) > 1:
            first, last = min(ends, key=lambda one: ends[one]), max(ends, key=lambda one: ends[one])
            raise DataError(
                f"the runs end at different steps: {first} at {ends[first]:,}, {last} at {ends[last]:,}",
                f"compare them where all are, with --at step={_common(curves)}, or leave the shorter ones out",
            )
        count = int(number or 1)
        begins = {int(curve.steps[-count]) for curve in curves if len(curve.steps) >= count}
        if len(begins) > 1:
            raise DataError(
                f"the last {count:,} values begin at steps from {min(begins):,} to {max(begins):,}",
                "the runs are logged at different steps: compare them at one, --at step=N",
            )
        return _Point(min(ends.values()), count)
    wanted = int(number)
    for curve in curves:
        if wanted not in curve.steps:
            near = curve.steps[np.argmin(np.abs(curve.steps - wanted))]
            raise DataError(
                f"{curve.path} has no value at step {wanted:,}; the nearest is at {near:,}",
                f"choose a step that all have, such as --at step={_common(curves)}",
            )
    return _Point(wanted)


def _common(curves: Sequence[Curve]) -> int | str:
    """Return the last step at which all runs have a value; ``N`` if there is none."""
    shared = set(curves[0].steps.tolist()).intersection(*(curve.steps.tolist() for curve in curves[1:]))
    return max(shared) if shared else "N"


def _run(curve: Curve, seed: str, at: _Point) -> LoggedRun:
    until = int(np.searchsorted(curve.steps, at.step, side="right"))
    if until < at.values:
        raise DataError(
            f"{curve.path} has {counted(until, 'value')}, not {at.values:,}", "choose a smaller --at last=N"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(np.mean(curve.values[until - at.values : until]))
    if abs(value) > _LARGEST:
        value = math.copysign(math.inf, value)
    step = rounding_step(curve.values[-_LOOKED_AT:].tolist())
    return LoggedRun(curve.path, curve.form, curve.digest, at.step, value, seed, step)


def _notes(curves: Sequence[Curve], question: Question, at: _Point) -> list[str]:
    mean = f", by the mean of the last {at.values:,} values" if at.values > 1 else ""
    better = "lower" if question.lower_is_better else "higher"
    notes = [f"compared at step {at.step:,}{mean}; {better} is better"]
    if resumed := [curve for curve in curves if curve.given_up]:
        left_out = counted(sum(curve.given_up for curve in resumed), "value")
        again = f"steps go back, as after a resume: {left_out} before it are left out"
        notes.append(f"{listed([one.path for one in resumed], 3)}: {again}")
    first = {_content(curve): curve for curve in reversed(curves)}
    if alike := [curve.path for curve in curves if len(curve.values) > 1 and first[_content(curve)] is not curve]:
        notes.append(f"{listed(alike, 3)}: the same few values as another log; a copy is no evidence, so leave it out")
    if uncounted := [curve.path for curve in curves if curve.counted]:
        notes.append(f"{listed(uncounted, 3)}: without steps, so that values are counted")
    if len(forms := {curve.form for curve in curves}) > 1:
        notes.append(f"formats: {', '.join(sorted(forms))}")
    return notes
