"""Shares of a tensor's values that FP16 loses at a given loss scale, computed from its exponent histogram.

An exponent histogram counts the values x of a tensor by floor(log2 |x|). Multiplying by a power of two shifts all
exponents and changes nothing else, so the counts of one step show the losses at every scale, provided the values have
not underflowed already: use counts of FP32 or bfloat16 values, or of FP16 values at a sufficiently high scale.

FP16 (IEEE 754 binary16): the smallest number above zero is 2^-24, and 2^-25 or less is rounded to zero; numbers below
2^-14 are subnormal and have fewer bits; the largest is 65504, and 65520 or more is rounded to infinity.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mptrain.numerics.formats import FLOAT16
from mptrain.system.records import ExponentCounts, HistogramRecord

#: Exponents of the smallest positive, the smallest normal and the largest FP16 number.
TINIEST, NORMAL, HIGHEST = -24, -14, 15

#: The smallest magnitude that FP16 rounds to infinity.
INFINITE_FROM = 65520.0


def nonzero(counts: ExponentCounts) -> int:
    """Return the number of counted values of a histogram that are not zero, infinite or NaN."""
    return sum(counts.counts)


def total(counts: ExponentCounts) -> int:
    """Return the number of all values of a histogram, including zeros, infinities and NaN."""
    return nonzero(counts) + counts.zeros + counts.inf + counts.nan


def merged(several: Iterable[ExponentCounts]) -> ExponentCounts:
    """Add up exponent histograms; ``dtype`` is ``mixed`` if they differ, and the sum of none is empty."""
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
    """Return the histogram of gradients divided by their loss scale, from the histogram of the scaled gradients.

    Exponents shift by the power of two nearest to the scale; ``largest`` is divided by the exact scale. Raises
    ValueError for a scale that is not positive and finite.
    """
    if not (loss_scale > 0 and math.isfinite(loss_scale)):
        raise ValueError(f"loss scale {loss_scale}: it must be positive and finite")
    shift = round(math.log2(loss_scale))
    return replace(counts, lowest=counts.lowest - shift, largest=counts.largest / loss_scale)


def ties_below(counts: ExponentCounts) -> ExponentCounts:
    """Move the expected exact powers of two among FP16 values, before `unscaled`, one exponent down.

    At a smaller scale a value of exactly 2^-25 is half-way between zero and the smallest FP16 number and is rounded to
    zero, but only values below 2^-25 count as lost here. Each exponent has one power of two: the only FP16 number with
    exponent -24, one of two with -23, and one of 1024 in the normal range. All its numbers are assumed equally likely.
    """
    if not counts.counts:
        return counts
    ties = [_powers(exponent, count) for exponent, count in enumerate(counts.counts, counts.lowest)]
    moved = [count - out + into for count, out, into in zip(counts.counts, ties, [*ties[1:], 0], strict=True)]
    bins = [ties[0], *moved]
    filled = [at for at, count in enumerate(bins) if count]
    return replace(counts, lowest=counts.lowest - 1 + filled[0], counts=tuple(bins[filled[0] : filled[-1] + 1]))


def _powers(exponent: int, count: int) -> int:
    return round(count / 2.0 ** min(max(exponent - TINIEST, 0), NORMAL - TINIEST))


def lost_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values that FP16 rounds to zero after multiplication by 2^exponent; 0 without any.

    ``exponent`` is log2 of the loss scale for unscaled gradients and 0 for values as they are; it is an integer in all
    of these functions. Only values below 2^-25 count. Those of exactly 2^-25 are rare in FP32, but at half the scale
    all of the smallest FP16 numbers are such ties (`ties_below`).
    """
    return _share(counts, None, TINIEST - 1 - exponent)


def zero_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of all values that are zero in FP16 after multiplication by 2^exponent, with existing zeros."""
    count = total(counts)
    return (counts.zeros + lost_share(counts, exponent) * nonzero(counts)) / count if count else 0.0


def below_tiniest_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values below 2^-24 after multiplication by 2^exponent; half of them round up."""
    return _share(counts, None, TINIEST - exponent)


def share_between(counts: ExponentCounts, first: int, end: int) -> float:
    """Return the share of nonzero values with a magnitude in [2^first, 2^end)."""
    return _share(counts, first, end)


def subnormal_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values in [2^-24, 2^-14), FP16's subnormals, after multiplication by 2^exponent."""
    return _share(counts, TINIEST - exponent, NORMAL - exponent)


def headroom(largest: float) -> float:
    """Return how many doublings a magnitude is below FP16's largest number: log2(65504 / largest), inf for 0."""
    return math.log2(FLOAT16.max / largest) if largest > 0 else math.inf


def _share(counts: ExponentCounts, first: float | None, end: float) -> float:
    count = nonzero(counts)
    start = 0 if first is None else max(round(first) - counts.lowest, 0)
    return sum(counts.counts[start : max(round(end) - counts.lowest, 0)]) / count if count else 0.0


def unseen_magnitude(counts: ExponentCounts) -> float:
    """Return the largest sum of |x| that the zeros among FP16 values may have had before FP16 rounded them to zero.

    Some zeros are exact, such as those behind a ReLU, and a histogram does not tell them apart. None was above 2^-25.
    Underflow is gradual: where no octave below 2^-24 holds more values than the fullest of the lowest four that FP16
    has, they sum to at most 1.5 * 2^-25 for each of those. Values of another size, all just too small to be seen,
    average a quarter of 2^-25 at most: normally distributed, those above it would be seen. Of a tensor without a
    nonzero value nothing is known but the first bound.
    """
    tiniest = 2.0 ** (TINIEST - 1)
    if not counts.counts:
        return counts.zeros * tiniest
    first = max(TINIEST - counts.lowest, 0)
    fullest = max(counts.counts[first : max(TINIEST + 4 - counts.lowest, 0)], default=0)
    return min(counts.zeros / 4 + 1.5 * fullest, counts.zeros) * tiniest


class ExponentTails:
    """Cumulative shares of a tensor's values below any power of two, from its exponent histogram, as look-ups.

    A histogram does not record mantissas: they are assumed uniform, so values of exponent e average 1.5 * 2^e.
    ``unseen`` is the magnitude of values that were rounded to zero before they were counted, below all others.
    """

    def __init__(self, counts: ExponentCounts, unseen: float = 0.0) -> None:
        magnitudes = [count * 1.5 * 2.0**exponent for exponent, count in enumerate(counts.counts, counts.lowest)]
        self._lowest = counts.lowest
        self._counts = list(accumulate(counts.counts, initial=0))
        self._magnitudes = list(accumulate(magnitudes, initial=unseen))
        self._zeros, self._total = counts.zeros, total(counts)

    def share_below(self, exponent: int) -> float:
        """Return the share of nonzero values with a magnitude below 2^exponent; 0 if there is no nonzero value."""
        return self._counts[self._place(exponent)] / self._counts[-1] if self._counts[-1] else 0.0

    def zeros_below(self, exponent: int) -> float:
        """Return the share of all values that are zero once those below 2^exponent round to zero; 0 without values."""
        return (self._zeros + self._counts[self._place(exponent)]) / self._total if self._total else 0.0

    def magnitude_below(self, exponent: int) -> float:
        """Return the share of the sum of all magnitudes that values below 2^exponent contribute; 0 without values.

        What is unseen is below every exponent.
        """
        return self._magnitudes[self._place(exponent)] / self._magnitudes[-1] if self._magnitudes[-1] else 0.0

    @property
    def unseen_share(self) -> float:
        """Share of the sum of all magnitudes that is unseen; 0 without values, 1 if only zeros were counted."""
        return self.magnitude_below(self._lowest)

    def _place(self, exponent: int) -> int:
        return min(max(exponent - self._lowest, 0), len(self._counts) - 1)


@dataclass(frozen=True, slots=True)
class Fp16Gradients:
    """Exponent histograms of a step's scaled gradients that were FP16 numbers at some point, or of all if none were.

    ``modules`` has gradients at module outputs, ``parameters`` those of parameters, by name. Unless ``half``, the step
    did not compute in FP16, and all statements about FP16 are predictions.
    """

    modules: dict[str, ExponentCounts]
    parameters: dict[str, ExponentCounts]
    half: bool

    @property
    def named(self) -> dict[str, ExponentCounts]:
        """Histograms of modules and parameters in one map, by name; on a name clash the parameter wins."""
        return {**self.modules, **self.parameters}


@dataclass(frozen=True, slots=True)
class LargestGradient:
    """The largest gradient element of a step that did not overflow, divided by the loss scale.

    ``value`` is its magnitude over all FP16 gradients (`Fp16Gradients`), 0 without gradients, in the module or
    parameter ``where``. ``certain`` is the largest among gradients stored in FP16: a larger ``value`` belongs to an
    FP32 tensor that appears to have passed through FP16.
    """

    value: float
    where: str
    certain: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """The largest gradient of a step with histograms, as a node for interpolating it at the steps without histograms.

    ``largest`` is log2 of the largest unscaled magnitude, and ``ratio`` is log2 of that magnitude divided by the L2
    norm of all gradients.
    """

    step: int
    largest: float
    ratio: float


def gradients_of(record: HistogramRecord) -> Fp16Gradients:
    """Return the exponent histograms of those gradients of a step that can overflow or underflow in FP16.

    These are the tensors stored in FP16, and FP32 tensors that were FP16 before: gradients of FP32 parameters under
    autocast, copies for master weights, and sums over micro-batches. A tensor with a value below FP16's smallest number
    counts as FP32 throughout and is left out. Without any FP16 gradient, all are returned.
    """
    kinds = [record.tensors.get(kind, {}) for kind in ("activation_gradients", "weight_gradients")]
    half = any(counts.dtype == "float16" for named in kinds for counts in named.values())
    modules, parameters = (
        {name: counts for name, counts in named.items() if not half or is_half(counts)} for named in kinds
    )
    return Fp16Gradients(modules, parameters, half)


def largest_of(gradients: Fp16Gradients, loss_scale: float) -> LargestGradient:
    """Return the largest unscaled magnitude among the gradients of a step without overflow, and where it is.

    With FP16 gradients, the scaled magnitude is limited to 65,504: a larger one can only be an FP32 sum over
    micro-batches, of which none exceeded 65,504, because the step did not overflow. ``loss_scale`` is above 0.
    """
    both = (*gradients.modules.items(), *gradients.parameters.items())
    maxima = [(counts.largest, name, counts.dtype) for name, counts in both]
    value, where, _ = max(maxima, key=lambda each: each[0], default=(0.0, "", ""))
    if gradients.half:
        value = min(value, FLOAT16.max)
    certain = max((largest for largest, _, dtype in maxima if dtype == "float16"), default=0.0)
    return LargestGradient(value / loss_scale, where, certain / loss_scale)


def sample_at(step: int, largest: float, norm: float) -> HistogramSample | None:
    """Return a step's largest magnitude and L2 norm as a sample, or None if one of them is zero or not finite."""
    if not (0 < largest < math.inf and 0 < norm < math.inf):
        return None
    return HistogramSample(step, math.log2(largest), math.log2(largest / norm))


def interpolate(before: HistogramSample, after: HistogramSample, step: int, norm: float) -> float:
    """Estimate the largest unscaled gradient of a step without histograms from a step with histograms on either side.

    The ratio of largest gradient to norm is interpolated linearly in log space, and multiplied by the step's own L2
    norm. If that norm is zero or not finite, as after an overflow, the largest gradient itself is interpolated.
    """
    span = after.step - before.step
    share = (step - before.step) / span if span else 0.0
    if 0 < norm < math.inf:
        return float(norm * 2.0 ** (before.ratio + share * (after.ratio - before.ratio)))
    return float(2.0 ** (before.largest + share * (after.largest - before.largest)))


def largest_at_step(samples: Sequence[HistogramSample], step: int, norm: float) -> float:
    """Estimate the largest gradient of any step from sorted samples; beyond their ends, from the nearest alone."""
    at = bisect_left(samples, step, key=lambda sample: sample.step)
    before, after = (samples[min(max(index, 0), len(samples) - 1)] for index in (at - 1, at))
    return interpolate(before, after, step, norm)


def is_half(counts: ExponentCounts) -> bool:
    """Return whether gradients of a step with FP16 gradients are FP16 numbers: by dtype, or FP32 copies of some."""
    return counts.dtype == "float16" or (counts.dtype == "float32" and (not counts.counts or counts.lowest >= TINIEST))
