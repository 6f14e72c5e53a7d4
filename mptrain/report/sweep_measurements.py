"""What a sweep over static loss scales measured, to be shown beside a forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mptrain.comparison.fairness import is_claimed
from mptrain.comparison.ranking import SEED
from mptrain.comparison.settings import MACHINE, NOT_COMPARED, differing, in_short, is_below
from mptrain.config.ranges import show
from mptrain.errors import StorageError
from mptrain.report.run_parts import tried
from mptrain.report.settings import flat
from mptrain.report.sweep_axes import Point, read_points
from mptrain.report.sweep_page import BUCKETS, metric_name
from mptrain.runlog.sweeps import read_sweep

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
class Measured:
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
            for key, (own, other) in differing(config, one, (*NOT_COMPARED, *MACHINE)).items():
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


def read_measured(folder: Path) -> Measured:
    """The static scales of a sweep, a comparison or a recipe.

    Raises:
        StorageError: It is none of them, or has no run with a static scale.
    """
    points = read_points(read_sweep(folder), lambda path: tried(path, BUCKETS))
    kinds: dict[str, list[MeasuredRun]] = {}
    used = []
    for point in points:
        scale = _scale_of(point)
        if scale is not None:
            rest = {key: value for key, value in point.words.items() if key not in (SCALE, SEED)}
            kinds.setdefault(in_short(rest), []).append(_run(point, scale))
            used.append(point)
    if not used:
        raise StorageError(
            f"{folder} has no run with a static loss scale",
            f"name a sweep over {SCALE}, such as mptrain -m precision=fp16_static {SCALE}=1,128,16384",
        )
    configs = dict.fromkeys(point.opened.run.config for point in used if point.opened and point.opened.settings)
    return Measured(metric_name(used), {kind: tuple(runs) for kind, runs in kinds.items()}, tuple(configs))


def _scale_of(point: Point) -> float | None:
    """The static scale that a point was given in so many words, in a precision that needs one."""
    scale = point.setting(SCALE)
    if scale is None or not 0 < scale < math.inf:
        return None
    wide = point.opened is not None and point.opened.settings.get("precision.compute", "float16") != "float16"
    return None if wide else scale


def _run(point: Point, scale: float) -> MeasuredRun:
    failed = point.metric is None and (point.job.status == "failed" or point.done)
    return MeasuredRun(math.log2(scale), point.metric, point.skip_rate, failed)
