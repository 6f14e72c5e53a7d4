"""What a sweep varied: its points as values on axes, read from the words of its jobs and the records of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.comparison.ranking import SEED
from mptrain.comparison.settings import as_number, in_short
from mptrain.numerics.formats import is_power_of_two
from mptrain.report.run_parts import OpenedRun
from mptrain.runlog.sweeps import Sweep, SweepJob, varied_keys, words_of

#: Values of a key must span this factor to be spread over a logarithmic axis.
_WIDE: Final = 20


@dataclass(frozen=True)
class Point:
    """A job of a sweep.

    Attributes:
        job: What ``sweep.json`` says of it.
        opened: Its run; None where there is none that can be read.
        problem: Why not; empty where the job has not begun.
        words: Key to value of the words in which the points differ.
    """

    job: SweepJob
    opened: OpenedRun | None
    problem: str
    words: dict[str, str]

    @property
    def label(self) -> str:
        """The words in which points differ, in short."""
        return in_short(self.words) or self.job.name

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers of its run; empty where it has none."""
        return self.opened.run.summary if self.opened else {}

    @property
    def done(self) -> bool:
        """It ended as it should."""
        return self.job.status == "done"

    @property
    def metric(self) -> float | None:
        """The final metric; None where the job is not done, or its metric is not finite."""
        value = self.summary.get("metric")
        return value if self.done and value is not None and math.isfinite(value) else None

    @property
    def skip_rate(self) -> float | None:
        """The share of attempts that were skipped; None where none is on record."""
        if self.opened is None:
            return None
        learners = self.opened.history.learners.values()
        attempts = sum(learner.attempts for learner in learners)
        return sum(learner.refused for learner in learners) / attempts if attempts else None

    def setting(self, key: str) -> float | None:
        """The number that a key was given; None where it was given none."""
        return as_number(self.words.get(key, ""))


@dataclass(frozen=True)
class Axis:
    """A numeric key that was varied.

    Attributes:
        key: Dotted.
        values: Ascending.
        logarithm: 2 or 10 for a logarithmic axis; None for a linear one.
    """

    key: str
    values: tuple[float, ...]
    logarithm: int | None


def read_points(sweep: Sweep, read: Callable[[Path], OpenedRun | str]) -> list[Point]:
    """All points of a sweep, in order.

    Args:
        sweep: The sweep.
        read: Opens a run, or says why it cannot.
    """
    keys = varied_keys(sweep.jobs)
    points = []
    for job in sweep.jobs:
        folder = sweep.paths.run(job.name)
        found = read(folder) if folder.is_dir() else ""
        problem, opened = (found, None) if isinstance(found, str) else ("", found)
        table = words_of(job)
        words = {key: table[key] for key in keys if key in table}
        points.append(Point(job, opened, problem, words))
    return points


def numeric_axis(points: Sequence[Point]) -> Axis | None:
    """The numeric key with the most values, of at least two, while the other keys stay as they are; the seed is none."""
    best: Axis | None = None
    for key in dict.fromkeys(key for point in points for key in point.words if key != SEED):
        given = [point for point in points if key in point.words]
        numbers = [point.setting(key) for point in given]
        values = tuple(sorted({number for number in numbers if number is not None}))
        alone = any(len({point.setting(key) for point in some}) > 1 for some in kinds(given, (key,)).values())
        if None not in numbers and alone and len(values) > (len(best.values) if best else 1):
            best = Axis(key, values, _logarithm(values))
    return best


def kinds(points: Sequence[Point], without: Sequence[str] = ()) -> dict[str, list[Point]]:
    """The points by the values of all varied keys but some and the seed; the name is empty where there is no other key."""
    found: dict[str, list[Point]] = {}
    for point in points:
        left = {key: value for key, value in point.words.items() if key not in without and key != SEED}
        found.setdefault(in_short(left), []).append(point)
    return found


def _logarithm(values: Sequence[float]) -> int | None:
    if values[0] <= 0 or values[-1] < _WIDE * values[0]:
        return None
    return 2 if all(is_power_of_two(value) for value in values) else 10
