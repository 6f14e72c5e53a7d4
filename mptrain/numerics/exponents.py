"""Shares of a histogram of exponents that FP16 loses, at any loss scale. Nothing here imports torch.

Multiplying by a power of two moves every value to another exponent and changes nothing else. So the counts of one step
tell how much of a tensor FP16 would lose at every scale, as long as the values themselves were not lost already: take
counts of FP32 or bfloat16 values, or of FP16 values at a scale that is high enough.

FP16 (IEEE 754 binary16): the smallest number above zero is 2^-24, and 2^-25 or less is rounded to zero; numbers below
2^-14 are subnormal and have fewer bits; the largest is 65504, and 65520 or more is rounded to infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from mptrain.numerics.formats import FLOAT16
from mptrain.records import ExponentCounts

#: Exponents of FP16's numbers: of the smallest above zero, of the smallest normal one, of the largest.
TINIEST, NORMAL, HIGHEST = -24, -14, 15

#: What FP16 cannot hold is from here on infinite.
INFINITE_FROM = 65520.0


def nonzero(counts: ExponentCounts) -> int:
    """Count the values that were neither zero nor infinite nor NaN."""
    return sum(counts.counts)


def total(counts: ExponentCounts) -> int:
    """Count all values."""
    return nonzero(counts) + counts.zeros + counts.inf + counts.nan


def merged(several: Iterable[ExponentCounts]) -> ExponentCounts:
    """The counts of several tensors, or of one at several steps, together; ``dtype`` is ``mixed`` where it differs."""
    parts = list(several)
    filled = [part for part in parts if part.counts]
    lowest = min((part.lowest for part in filled), default=0)
    highest = max((part.lowest + len(part.counts) for part in filled), default=0)
    sums = [0] * (highest - lowest)
    for part in filled:
        for at, count in enumerate(part.counts, part.lowest - lowest):
            sums[at] += count
    dtypes = {part.dtype for part in parts}
    return ExponentCounts(
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        zeros=sum(part.zeros for part in parts),
        inf=sum(part.inf for part in parts),
        nan=sum(part.nan for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        lowest=lowest,
        counts=tuple(sums),
    )


def unscaled(counts: ExponentCounts, loss_scale: float) -> ExponentCounts:
    """The counts without a loss scale; one that is no power of two is taken as the nearest, but for ``largest``."""
    if not (loss_scale > 0 and math.isfinite(loss_scale)):
        raise ValueError(f"a loss scale of {loss_scale} cannot be undone")
    shift = round(math.log2(loss_scale))
    return replace(counts, lowest=counts.lowest - shift, largest=counts.largest / loss_scale)


def ties_below(counts: ExponentCounts) -> ExponentCounts:
    """The counts of FP16 numbers with the powers of two among them counted below themselves, as if a little smaller.

    At a smaller scale a value of exactly 2^-25 is a tie, and rounded to zero. Of the numbers that FP16 has with one exponent
    one is a power of two: with exponent -24 there is no other, with -23 each second one is it, in the normal range one of
    1024; all are taken as equally likely.

    Args:
        counts: Of numbers that FP16 can hold, before `unscaled`.
    """
    if not counts.counts:
        return counts
    ties = [_powers(exponent, count) for exponent, count in enumerate(counts.counts, counts.lowest)]
    moved = [count - out + into for count, out, into in zip(counts.counts, ties, [*ties[1:], 0], strict=True)]
    places = [ties[0], *moved]
    filled = [at for at, count in enumerate(places) if count]
    return replace(counts, lowest=counts.lowest - 1 + filled[0], counts=tuple(places[filled[0] : filled[-1] + 1]))


def _powers(exponent: int, count: int) -> int:
    """Return how many of the FP16 numbers with an exponent are expected to be the power of two itself."""
    return round(count / 2.0 ** min(max(exponent - TINIEST, 0), NORMAL - TINIEST))


def lost_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """The share of the nonzero values that FP16 rounds to zero after a multiplication by 2^exponent.

    Those are the ones below 2^-25. One of exactly 2^-25 is rounded to zero too, and is not counted: next to none is in FP32,
    but FP16's smallest numbers all are at half their scale. `ties_below` puts them where they are counted.

    Args:
        counts: Of a tensor.
        exponent: Of the factor, a whole number in all of these functions.
    """
    return _share(counts, None, TINIEST - 1 - exponent)


def zero_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """The share of all values that are zero in FP16 after a multiplication by 2^exponent, those that were zero included."""
    count = total(counts)
    return (counts.zeros + lost_share(counts, exponent) * nonzero(counts)) / count if count else 0.0


def below_tiniest_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """The share of the nonzero values below 2^-24, FP16's smallest number, after that; half of them or so become it."""
    return _share(counts, None, TINIEST - exponent)


def subnormal_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """The share of the nonzero values from 2^-24 to below 2^-14 after that: FP16 holds them with fewer bits."""
    return _share(counts, TINIEST - exponent, NORMAL - exponent)


def headroom(largest: float) -> float:
    """Return how many times a magnitude can be doubled before it leaves FP16: log2(65504 / largest); inf for 0."""
    return math.log2(FLOAT16.max / largest) if largest > 0 else math.inf


def _share(counts: ExponentCounts, first: float | None, end: float) -> float:
    """The share of the nonzero values whose exponent lies in [first, end)."""
    count = nonzero(counts)
    start = 0 if first is None else max(round(first) - counts.lowest, 0)
    return sum(counts.counts[start : max(round(end) - counts.lowest, 0)]) / count if count else 0.0


class Tails:
    """Shares of one histogram below any exponent, at the price of one pass over it.

    Where within its power of two a value lies, no histogram knows: all places are taken as equally likely, so that the
    values with exponent e are 1.5 * 2^e on average.

    Args:
        counts: The histogram.
    """

    def __init__(self, counts: ExponentCounts) -> None:
        magnitudes = [count * 1.5 * 2.0**exponent for exponent, count in enumerate(counts.counts, counts.lowest)]
        self._lowest = counts.lowest
        self._counts = list(accumulate(counts.counts, initial=0))
        self._magnitudes = list(accumulate(magnitudes, initial=0.0))
        self._zeros, self._total = counts.zeros, total(counts)

    def share_below(self, exponent: int) -> float:
        """The share of the nonzero values below 2^exponent."""
        return self._counts[self._place(exponent)] / self._counts[-1] if self._counts[-1] else 0.0

    def zeros_below(self, exponent: int) -> float:
        """The share of all values that are zero once those below 2^exponent are."""
        return (self._zeros + self._counts[self._place(exponent)]) / self._total if self._total else 0.0

    def magnitude_below(self, exponent: int) -> float:
        """Return the share that the values below 2^exponent have of the sum of all magnitudes."""
        return self._magnitudes[self._place(exponent)] / self._magnitudes[-1] if self._magnitudes[-1] else 0.0

    def _place(self, exponent: int) -> int:
        return min(max(exponent - self._lowest, 0), len(self._counts) - 1)
