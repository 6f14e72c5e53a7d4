"""The points of a sweep as values on axes, read from the words of its jobs and the records of their runs.

Also what a sweep over static loss scales measured, to be shown beside a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.comparison.configurations import (
    MACHINE,
    NOT_COMPARED,
    as_number,
    config_differences,
    flat,
    is_below,
    short_label,
)
from mptrain.comparison.fairness import is_claimed
from mptrain.comparison.ranking import SEED, metric_in_words
from mptrain.config.value_checks import show
from mptrain.errors import StorageError
from mptrain.numerics.formats import is_power_of_two
from mptrain.report.run_blocks import OpenedRun, open_or_reason
from mptrain.runlog.sweeps import Sweep, SweepJob, overrides_of, read_sweep, varied_keys

#: Buckets of a curve where many share a figure.
BUCKETS: Final = 300

#: Values of a key must span this factor to be spread over a logarithmic axis.
_WIDE: Final = 20


@dataclass(frozen=True)
class OpenedPoint:
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
        return short_label(self.words) or self.job.name

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

    def place(self, point: OpenedPoint) -> float:
        """Return where a point stands on the axis: its setting, or the logarithm of that."""
        value = point.setting(self.key) or 0.0
        return math.log(value, self.logarithm) if self.logarithm else value


def metric_name(points: Sequence[OpenedPoint]) -> str:
    """The metric of the runs, and the split that it is of."""
    found = next((point.opened for point in points if point.opened and point.opened.metric), None)
    return metric_in_words(found.run.summary) if found else "metric"


def read_points(sweep: Sweep, read: Callable[[Path], OpenedRun | str]) -> list[OpenedPoint]:
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
        table = overrides_of(job)
        words = {key: table[key] for key in keys if key in table}
        points.append(OpenedPoint(job, opened, problem, words))
    return points


def numeric_axis(points: Sequence[OpenedPoint]) -> Axis | None:
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


def kinds(points: Sequence[OpenedPoint], without: Sequence[str] = ()) -> dict[str, list[OpenedPoint]]:
    """The points by the values of all varied keys but some and the seed; the name is empty where there is no other key."""
    found: dict[str, list[OpenedPoint]] = {}
    for point in points:
        left = {key: value for key, value in point.words.items() if key not in without and key != SEED}
        found.setdefault(short_label(left), []).append(point)
    return found


def _logarithm(values: Sequence[float]) -> int | None:
    if values[0] <= 0 or values[-1] < _WIDE * values[0]:
        return None
    return 2 if all(is_power_of_two(value) for value in values) else 10


#: The key that holds a static scale.
SCALE: Final = "scaler.scale"


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run of a sweep.

    Attributes:
        exponent: log2 of its scale.
        metric: Its final metric; None where it has none.
        skipped: The share of its updates that were skipped; None where none is on record.
        failed: It ended without a metric.
    """

    exponent: float
    metric: float | None
    skipped: float | None
    failed: bool


@dataclass(frozen=True)
class MeasuredScales:
    """The runs of a sweep that had a static scale, in FP16 or under autocast.

    Attributes:
        metric: Its name.
        kinds: Runs by what else was varied, the seed excepted; the name is empty where nothing was.
        configs: The resolved configurations of its runs, as YAML.
    """

    metric: str
    kinds: dict[str, tuple[MeasuredRun, ...]]
    configs: tuple[str, ...] = ()

    def at(self, kind: str, exponent: int) -> list[MeasuredRun]:
        """The runs of one kind at one scale."""
        return [run for run in self.kinds[kind] if run.exponent == exponent]

    def unlike(self, config: str) -> dict[str, tuple[str, str]]:
        """The keys in which its runs are not like another run: what that has, and what they have.

        Precision, scale, seed, the machine, and what changes no number do not count, as in a comparison; nor do the keys of
        what was exchanged as a whole, such as another model.

        Args:
            config: The resolved configuration of the other run, as YAML.
        """
        found: dict[str, tuple[str, list[str]]] = {}
        exchanged: set[str] = set()
        for one in self.configs if flat(config) else ():
            for key, (own, other) in config_differences(config, one, (*NOT_COMPARED, *MACHINE)).items():
                if key.endswith("._target_"):
                    exchanged.add(key.removesuffix("._target_"))
                theirs = found.setdefault(key, (show(own), []))[1]
                if not is_claimed(key, ()) and show(other) not in theirs:
                    theirs.append(show(other))
        return {
            key: (own, " and ".join(theirs))
            for key, (own, theirs) in found.items()
            if theirs and (key.endswith("._target_") or not is_below(key, tuple(exchanged)))
        }


def read_measured(folder: Path) -> MeasuredScales:
    """The static scales of a sweep, a comparison or a recipe.

    Raises:
        StorageError: It is none of them, or has no run with a static scale.
    """
    points = read_points(read_sweep(folder), lambda path: open_or_reason(path, BUCKETS))
    kinds: dict[str, list[MeasuredRun]] = {}
    used = []
    for point in points:
        scale = _scale_of(point)
        if scale is not None:
            rest = {key: value for key, value in point.words.items() if key not in (SCALE, SEED)}
            kinds.setdefault(short_label(rest), []).append(_run(point, scale))
            used.append(point)
    if not used:
        raise StorageError(
            f"{folder} has no run with a static loss scale",
            f"name a sweep over {SCALE}, such as mptrain -m precision=fp16_static {SCALE}=1,128,16384",
        )
    configs = dict.fromkeys(point.opened.run.config for point in used if point.opened and point.opened.settings)
    return MeasuredScales(metric_name(used), {kind: tuple(runs) for kind, runs in kinds.items()}, tuple(configs))


def _scale_of(point: OpenedPoint) -> float | None:
    """The static scale that a point was given in so many words, in a precision that needs one."""
    scale = point.setting(SCALE)
    if scale is None or not 0 < scale < math.inf:
        return None
    wide = point.opened is not None and point.opened.settings.get("precision.compute", "float16") != "float16"
    return None if wide else scale


def _run(point: OpenedPoint, scale: float) -> MeasuredRun:
    failed = point.metric is None and (point.job.status == "failed" or point.done)
    return MeasuredRun(math.log2(scale), point.metric, point.skip_rate, failed)
