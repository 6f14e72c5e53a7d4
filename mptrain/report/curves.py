"""Quantities of a run over its steps in bounded memory, as a few thousand points at most however long the run is.

Extremes are kept, so the curve of a long run still shows every spike. This module reads no files and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

#: Buckets of a curve at most. Each gives up to two points: its lowest and its highest value.
MOST_BUCKETS: Final = 1000

#: Maximum buckets of a curve in figures with many curves.
BUCKETS: Final = 300

#: Largest magnitude that a figure shows. Larger values count as not finite.
LARGEST: Final = 1e100

_INDEX, _COUNT, _TOTAL, _LOW, _LOW_STEP, _HIGH, _HIGH_STEP, _LOST = range(8)

Points = tuple[list[float], list[float]]


class Curve:
    """A quantity over the steps of a run, such as the loss, reduced to at most ``most`` buckets of steps.

    Add values in ascending order of steps. Each bucket keeps the mean, the lowest and the highest of its values.
    Steps fall into buckets of equal width. Once a step needs more than ``most`` buckets, neighbours are merged and
    the width doubles. One pass over a record of unknown length is therefore enough, and curves over the same steps
    have the same buckets.

    Attributes:
        width: Number of steps in a bucket.
        count: Number of values added, non-finite ones included.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.width = 1
        self.count = 0
        self._most = most
        self._buckets: list[list[float]] = []

    def __len__(self) -> int:
        """Return the number of buckets, which is the number of points of the curve's mean."""
        return len(self._buckets)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, from 1 (or 0) and not below that of the step before.

        A value that is not finite, or of a magnitude of `LARGEST` or more, is counted but not drawn.
        """
        index = max(step - 1, 0) // self.width
        buckets = self._buckets
        if not buckets or buckets[-1][_INDEX] != index:
            if len(buckets) >= self._most:
                self._coarsen(2 * self.width)
                return self.add(step, value)
            buckets.append([index, 0, 0.0, math.inf, 0, -math.inf, 0, 0])
        bucket = buckets[-1]
        self.count += 1
        if not -LARGEST < value < LARGEST:
            bucket[_LOST] += 1
            return None
        bucket[_COUNT] += 1
        bucket[_TOTAL] += value
        if value < bucket[_LOW]:
            bucket[_LOW], bucket[_LOW_STEP] = value, step
        if value > bucket[_HIGH]:
            bucket[_HIGH], bucket[_HIGH_STEP] = value, step
        return None

    def means(self) -> Points:
        """Return the points to draw as a line: the middle step of each bucket, and the mean of its finite values.

        The mean is NaN without a finite value, which breaks the line.
        """
        middles = [self._middle(bucket) for bucket in self._buckets]
        return middles, [b[_TOTAL] / b[_COUNT] if b[_COUNT] else math.nan for b in self._buckets]

    def extremes(self) -> Points:
        """Return the lowest and the highest value of each bucket with their steps, in ascending order of steps.

        A bucket without a finite value gives one point with the value NaN.
        """
        steps: list[float] = []
        values: list[float] = []
        for bucket in self._buckets:
            pair = {(bucket[_LOW_STEP], bucket[_LOW]), (bucket[_HIGH_STEP], bucket[_HIGH])} if bucket[_COUNT] else set()
            for step, value in sorted(pair) or [(self._middle(bucket), math.nan)]:
                steps.append(step)
                values.append(value)
        return steps, values

    def smooth(self, over: float = 0.02) -> Points:
        """Return a centred moving mean of the bucket means; its window is the fraction ``over`` of the whole range."""
        steps, values = self.means()
        reach = max(round(len(values) * over / 2), 1)
        return steps, [_mean(values[max(at - reach, 0) : at + reach + 1]) for at in range(len(values))]

    def lost(self) -> list[float]:
        """Return the middle steps of the buckets with non-finite values, such as losses of steps that overflowed."""
        return [self._middle(bucket) for bucket in self._buckets if bucket[_LOST]]

    def finite(self) -> list[float]:
        """Return the lowest and highest value of every bucket with a finite value, to find the range of the curve."""
        return [value for bucket in self._buckets if bucket[_COUNT] for value in (bucket[_LOW], bucket[_HIGH])]

    def last(self) -> tuple[float, float] | None:
        """Return the last point of the curve: middle step and mean of the last bucket with a finite value, or None."""
        steps, values = self.means()
        found = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
        return found[-1] if found else None

    def by_bucket(self, width: int) -> dict[int, float]:
        """Return the mean of each bucket by its index, after widening the buckets to a multiple of the current width.

        Curves of one width can be combined.
        """
        if width > self.width:
            self._coarsen(width)
        return {int(b[_INDEX]): b[_TOTAL] / b[_COUNT] for b in self._buckets if b[_COUNT]}

    def _middle(self, bucket: list[float]) -> float:
        return bucket[_INDEX] * self.width + (self.width + 1) / 2

    def _coarsen(self, width: int) -> None:
        factor = width // self.width
        merged: list[list[float]] = []
        for bucket in self._buckets:
            index = bucket[_INDEX] // factor
            if merged and merged[-1][_INDEX] == index:
                _merge(merged[-1], bucket)
            else:
                bucket[_INDEX] = index
                merged.append(bucket)
        self._buckets, self.width = merged, width


def mean_over_runs(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Combine the curves of several runs, such as the seeds of a configuration, to a mean curve with a band.

    Return the middle steps of the buckets, and the mean, lowest and highest of the runs' bucket means. Buckets that
    fewer than half of the curves reached are left out, so that the line does not end with a single run.
    """
    present = [curve for curve in curves if len(curve)]
    width = max((curve.width for curve in present), default=1)
    tables = [curve.by_bucket(width) for curve in present]
    steps, means, lows, highs = [], [], [], []
    for index in sorted({index for each in tables for index in each}):
        values = [each[index] for each in tables if index in each]
        if 2 * len(values) >= len(tables):
            steps.append(index * width + (width + 1) / 2)
            means.append(math.fsum(values) / len(values))
            lows.append(min(values))
            highs.append(max(values))
    return steps, means, lows, highs


#: Beginnings of sentences for `in_groups`.
EXTREMES: Final = "Lines join the lowest and the highest value of every"
MEAN: Final = "A point is the mean of"
MARK: Final = "A mark stands for all overflows of"


def in_groups(curves: Iterable[Curve], what: str) -> str:
    """Return a sentence for a caption, with a space before it, ``what`` and a number of steps; empty for one step.

    The number is that of the steps in a bucket, for which the curves have a point or two.
    """
    width = max((curve.width for curve in curves), default=1)
    return f" {what} {width:,} steps." if width > 1 else ""


def _merge(into: list[float], other: list[float]) -> None:
    for place in (_COUNT, _TOTAL, _LOST):
        into[place] += other[place]
    if other[_LOW] < into[_LOW]:
        into[_LOW], into[_LOW_STEP] = other[_LOW], other[_LOW_STEP]
    if other[_HIGH] > into[_HIGH]:
        into[_HIGH], into[_HIGH_STEP] = other[_HIGH], other[_HIGH_STEP]


def _mean(values: list[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
