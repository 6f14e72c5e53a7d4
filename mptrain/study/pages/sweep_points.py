"""Points (runs) of a sweep as values on axes, read from the overrides of its jobs and the records of their runs.

This module also reads the measurements of a sweep over static loss scales, which are shown beside a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.config.config_diff import (
    MACHINE,
    NOT_COMPARED,
    as_number,
    config_differences,
    flat,
    is_below,
    short_label,
)
from mptrain.config.value_checks import show
from mptrain.report.forecast_blocks import MeasuredRun, MeasuredScales
from mptrain.report.run_blocks import OpenedRun, open_or_reason
from mptrain.report.run_history import BUCKETS
from mptrain.runlog.sweeps import Sweep, SweepJob, overrides_of, read_sweep, varied_keys
from mptrain.study.comparison.fairness import is_claimed
from mptrain.study.comparison.ranking import SEED, metric_in_words, selected
from mptrain.system.errors import StorageError
from mptrain.system.words import is_power_of_two

#: Factor that the values of a key must span for a logarithmic axis.
_WIDE: Final = 20


@dataclass(frozen=True)
class OpenedPoint:
    """A job of a sweep with its run: the overrides that distinguish it from the others, and its results.

    Attributes:
        opened: Its run with all records; None if there is none or it cannot be read.
        problem: The error message if the run cannot be read; empty if the job has not started.
        words: Key to value of the overrides in which the points differ.
        summary: Summary of the run, with the metric by which points are chosen
            (`mptrain.study.comparison.ranking.selected`); empty if it has none.
    """

    job: SweepJob
    opened: OpenedRun | None
    problem: str
    words: dict[str, str]
    summary: dict[str, Any]

    @property
    def label(self) -> str:
        """Short label of the overrides in which the points differ, or the job's name if there are none."""
        return short_label(self.words) or self.job.name

    @property
    def done(self) -> bool:
        """True if the job's run has finished successfully."""
        return self.job.status == "done"

    @property
    def metric(self) -> float | None:
        """Metric by which the point is chosen; None if the job is not done or the metric is not finite."""
        value = self.summary.get("metric")
        return value if self.done and value is not None and math.isfinite(value) else None

    @property
    def skip_rate(self) -> float | None:
        """Share of skipped steps of the run over all learners, 0 to 1; None if no step is recorded."""
        return self.opened.skip_rate if self.opened else None

    def setting(self, key: str) -> float | None:
        """Return the number that a varied key is set to by the job's overrides; None if it is not set to a number."""
        return as_number(self.words.get(key, ""))


@dataclass(frozen=True)
class Axis:
    """Axis of a figure for a numeric key that a sweep varies, such as ``scaler.scale``.

    The values are in ascending order. ``logarithm`` is 2 or 10; None for a linear axis.
    """

    key: str
    values: tuple[float, ...]
    logarithm: int | None

    def position(self, point: OpenedPoint) -> float:
        """Return the position of a point (run) on the axis: its value, or the logarithm of its value."""
        value = point.setting(self.key) or 0.0
        return math.log(value, self.logarithm) if self.logarithm else value


def metric_name(points: Sequence[OpenedPoint]) -> str:
    """Return the name of a sweep's metric with the evaluated split, ``top1 (test)``; ``metric`` if unknown."""
    return next((metric_in_words(point.summary) for point in points if point.summary.get("metric_name")), "metric")


def read_points(sweep: Sweep, read: Callable[[Path], OpenedRun | str]) -> list[OpenedPoint]:
    """Read the runs of all jobs of a sweep, in the order of the jobs.

    ``read`` opens a run directory, or returns an error message.
    """
    keys = varied_keys(sweep.jobs)
    points = []
    for job in sweep.jobs:
        folder = sweep.paths.run(job.name)
        run_or_problem = read(folder) if folder.is_dir() else ""
        problem, opened = (run_or_problem, None) if isinstance(run_or_problem, str) else ("", run_or_problem)
        table = overrides_of(job)
        words = {key: table[key] for key in keys if key in table}
        points.append(OpenedPoint(job, opened, problem, words, selected(sweep, opened.run.summary if opened else {})))
    return points


def numeric_axis(points: Sequence[OpenedPoint]) -> Axis | None:
    """Return the horizontal axis for a sweep's figure: the numeric key with the most values, other than the seed.

    Only keys count that vary while the other keys stay fixed. None if no numeric key has two values or more.
    """
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
    """Group a sweep's points by label of the values of all varied keys except the seed and the keys ``without``.

    The label is empty if there is no other key.
    """
    groups: dict[str, list[OpenedPoint]] = {}
    for point in points:
        left = {key: value for key, value in point.words.items() if key not in without and key != SEED}
        groups.setdefault(short_label(left), []).append(point)
    return groups


def _logarithm(values: Sequence[float]) -> int | None:
    if values[0] <= 0 or values[-1] < _WIDE * values[0]:
        return None
    return 2 if all(is_power_of_two(value) for value in values) else 10


#: The key of a static loss scale.
SCALE: Final = "scaler.scale"


def read_measured(folder: Path) -> MeasuredScales:
    """Read the results of the runs with a static loss scale from a sweep, comparison or recipe.

    Raise StorageError if the folder is none of these, or has no run with a static loss scale.
    """
    points = read_points(read_sweep(folder), lambda path: open_or_reason(path, BUCKETS))
    used = [point for point in points if _has_static_scale(point)]
    if not used:
        raise StorageError(
            f"{folder} has no run with a static loss scale",
            f"give a sweep over {SCALE}, such as mptrain -m precision=fp16_static {SCALE}=1,128,16384",
        )
    measured = {name: tuple(map(_measured, some)) for name, some in kinds(used, (SCALE,)).items()}
    configs = dict.fromkeys(point.opened.run.config for point in used if point.opened and point.opened.settings)
    return MeasuredScales(metric_name(used), measured, tuple(configs))


def _has_static_scale(point: OpenedPoint) -> bool:
    """Return whether the overrides of a point set a static loss scale, and its run does not compute wider than FP16."""
    wide = point.opened is not None and point.opened.settings.get("precision.compute", "float16") != "float16"
    return (point.setting(SCALE) or 0.0) > 0 and not wide


def _measured(point: OpenedPoint) -> MeasuredRun:
    failed = point.metric is None and (point.job.status == "failed" or point.done)
    return MeasuredRun(math.log2(point.setting(SCALE) or 1.0), point.metric, point.skip_rate, failed)


def differences(measured: MeasuredScales, config: str) -> dict[str, tuple[str, str]]:
    """Return the configuration keys in which the sweep's runs differ from another run, which a forecast is from.

    The result maps the dotted key to (value in the other run, values in the sweep). As in a comparison, precision,
    loss scale, seed, machine and keys without effect on results are ignored. The keys below an object that differs
    as a whole, such as another model, are ignored too.
    """
    differing: dict[str, tuple[str, list[str]]] = {}
    exchanged: set[str] = set()
    for run_config in measured.configs if flat(config) else ():
        for key, (own, other) in config_differences(config, run_config, (*NOT_COMPARED, *MACHINE)).items():
            if key.endswith("._target_"):
                exchanged.add(key.removesuffix("._target_"))
            theirs = differing.setdefault(key, (show(own), []))[1]
            if not is_claimed(key, ()) and show(other) not in theirs:
                theirs.append(show(other))
    return {
        key: (own, " and ".join(theirs))
        for key, (own, theirs) in differing.items()
        if theirs and (key.endswith("._target_") or not is_below(key, tuple(exchanged)))
    }
