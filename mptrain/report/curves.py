"""Quantities over steps in bounded memory: a run of any length becomes at most some thousand points.

Extremes survive: what is drawn of a long run shows every spike. Reads nothing and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

#: Buckets of a curve at most; each gives up to two points, its lowest and its highest.
MOST_BUCKETS: Final = 1000

#: No figure shows numbers beyond this one; they count as not finite.
LARGEST: Final = 1e100

_INDEX, _COUNT, _TOTAL, _LOW, _LOW_STEP, _HIGH, _HIGH_STEP, _LOST = range(8)

Points = tuple[list[float], list[float]]


class Curve:
    """Follows one quantity over steps that come in ascending order.

    Steps fall into buckets of equal width. Whenever there would be more than ``most`` of them, neighbours are merged and
    the width doubles; so one pass over a record of unknown length is enough, and curves over the same steps have the
    same buckets.

    Args:
        most: Buckets at most.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.width = 1
        self.count = 0
        self._most = most
        self._buckets: list[list[float]] = []

    def __len__(self) -> int:
        """Return how many buckets there are."""
        return len(self._buckets)

    def add(self, step: int, value: float) -> None:
        """Take in the value of a step, counted from 1 (or 0); one that is not finite is counted and not drawn."""
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
        """The middle of each bucket and the mean of its finite values; NaN, which breaks a line, where it has none."""
        middles = [self._middle(bucket) for bucket in self._buckets]
        return middles, [b[_TOTAL] / b[_COUNT] if b[_COUNT] else math.nan for b in self._buckets]

    def extremes(self) -> Points:
        """The lowest and the highest value of each bucket at their steps, in the order of steps."""
        steps: list[float] = []
        values: list[float] = []
        for bucket in self._buckets:
            pair = {(bucket[_LOW_STEP], bucket[_LOW]), (bucket[_HIGH_STEP], bucket[_HIGH])} if bucket[_COUNT] else set()
            for step, value in sorted(pair) or [(self._middle(bucket), math.nan)]:
                steps.append(step)
                values.append(value)
        return steps, values

    def smooth(self, over: float = 0.02) -> Points:
        """A centred moving mean of the bucket means over a share of the whole range."""
        steps, values = self.means()
        reach = max(round(len(values) * over / 2), 1)
        return steps, [_mean(values[max(at - reach, 0) : at + reach + 1]) for at in range(len(values))]

    def lost(self) -> list[float]:
        """Return where values were not finite: the middles of those buckets."""
        return [self._middle(bucket) for bucket in self._buckets if bucket[_LOST]]

    def finite(self) -> list[float]:
        """The lowest and highest value of every bucket that has one."""
        return [value for bucket in self._buckets if bucket[_COUNT] for value in (bucket[_LOW], bucket[_HIGH])]

    def last(self) -> tuple[float, float] | None:
        """The last bucket with a finite value: its middle and its mean."""
        steps, values = self.means()
        found = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
        return found[-1] if found else None

    def by_bucket(self, width: int) -> dict[int, float]:
        """Bucket number to mean, after widening the buckets to ``width``, a multiple of the own width."""
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
    """Several runs as one: steps, mean, lowest and highest of their bucket means.

    Buckets that fewer than half of the curves reached are left out, so that the end of the line is no single run.
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
