"""Shares of an exponent histogram that FP16 loses at any loss scale. Nothing here imports torch.

Multiplying by a power of two shifts the exponent of every value and changes nothing else. So the counts of one step
show how much of a tensor FP16 would lose at every scale, provided the values have not underflowed already. Use counts
of FP32 or bfloat16 values, or of FP16 values at a sufficiently high scale.

FP16 (IEEE 754 binary16): the smallest number above zero is 2^-24, and 2^-25 or less is rounded to zero; numbers below
2^-14 are subnormal and have fewer bits; the largest is 65504, and 65520 or more is rounded to infinity.

The largest FP16 gradient of a step is read from its histograms. For a step between two sampled steps it is interpolated
from both (`HistogramSample`). The forecast of static scales and the replay of scaling rules share these functions, so
they agree on the same run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mptrain.numerics.formats import FLOAT16
from mptrain.records import ExponentCounts, HistogramRecord

#: Exponents of the smallest positive, the smallest normal and the largest FP16 number.
TINIEST, NORMAL, HIGHEST = -24, -14, 15

#: The smallest magnitude that FP16 rounds to infinity.
INFINITE_FROM = 65520.0


def nonzero(counts: ExponentCounts) -> int:
    """Return the number of values that are not zero, infinite or NaN."""
    return sum(counts.counts)


def total(counts: ExponentCounts) -> int:
    """Return the number of all values."""
    return nonzero(counts) + counts.zeros + counts.inf + counts.nan


def merged(several: Iterable[ExponentCounts]) -> ExponentCounts:
    """Merge the counts of several tensors or steps; ``dtype`` is ``mixed`` if the dtypes differ."""
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
    """Return unscaled counts; the shift uses the nearest power of two, ``largest`` is divided by the exact scale."""
    if not (loss_scale > 0 and math.isfinite(loss_scale)):
        raise ValueError(f"loss scale {loss_scale}: it must be positive and finite")
    shift = round(math.log2(loss_scale))
    return replace(counts, lowest=counts.lowest - shift, largest=counts.largest / loss_scale)


def ties_below(counts: ExponentCounts) -> ExponentCounts:
    """Move the expected exact powers of two among FP16 counts one exponent down, because FP16 rounds that tie to zero.

    At a smaller scale a value of exactly 2^-25 is a tie, which is rounded to zero. Each exponent has one power of two:
    the only FP16 number with exponent -24, one of two with -23, and one of 1024 in the normal range. All FP16 numbers
    with the same exponent are assumed equally likely.

    Args:
        counts: Counts of FP16 numbers, before `unscaled`.
    """
    if not counts.counts:
        return counts
    ties = [_powers(exponent, count) for exponent, count in enumerate(counts.counts, counts.lowest)]
    moved = [count - out + into for count, out, into in zip(counts.counts, ties, [*ties[1:], 0], strict=True)]
    places = [ties[0], *moved]
    filled = [at for at, count in enumerate(places) if count]
    return replace(counts, lowest=counts.lowest - 1 + filled[0], counts=tuple(places[filled[0] : filled[-1] + 1]))


def _powers(exponent: int, count: int) -> int:
    """Return the expected number of exact powers of two among ``count`` FP16 numbers with an exponent."""
    return round(count / 2.0 ** min(max(exponent - TINIEST, 0), NORMAL - TINIEST))


def lost_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values that FP16 rounds to zero after multiplication by 2^exponent.

    These are the values below 2^-25. A value of exactly 2^-25 is rounded to zero too but not counted here. Such values
    are rare in FP32, but at half the scale all of the smallest FP16 numbers are ties. `ties_below` accounts for them.

    Args:
        counts: Counts of a tensor.
        exponent: Exponent of the factor, an integer in all of these functions.
    """
    return _share(counts, None, TINIEST - 1 - exponent)


def zero_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of all values that are zero in FP16 after multiplication by 2^exponent, with existing zeros."""
    count = total(counts)
    return (counts.zeros + lost_share(counts, exponent) * nonzero(counts)) / count if count else 0.0


def below_tiniest_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values below 2^-24 after scaling; about half of them round up to 2^-24."""
    return _share(counts, None, TINIEST - exponent)


def subnormal_share(counts: ExponentCounts, exponent: float = 0) -> float:
    """Return the share of nonzero values in [2^-24, 2^-14) after scaling; FP16 stores them with fewer bits."""
    return _share(counts, TINIEST - exponent, NORMAL - exponent)


def headroom(largest: float) -> float:
    """Return the number of doublings before a magnitude overflows FP16: log2(65504 / largest); inf for 0."""
    return math.log2(FLOAT16.max / largest) if largest > 0 else math.inf


def _share(counts: ExponentCounts, first: float | None, end: float) -> float:
    """Return the share of nonzero values whose exponent is in [first, end)."""
    count = nonzero(counts)
    start = 0 if first is None else max(round(first) - counts.lowest, 0)
    return sum(counts.counts[start : max(round(end) - counts.lowest, 0)]) / count if count else 0.0


class ExponentTails:
    """Cumulative shares of one histogram below any exponent, computed in one pass.

    A histogram does not record the mantissa. Mantissas are assumed uniform, so values with exponent e average
    1.5 * 2^e.

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
        """Return the share of nonzero values below 2^exponent."""
        return self._counts[self._place(exponent)] / self._counts[-1] if self._counts[-1] else 0.0

    def zeros_below(self, exponent: int) -> float:
        """Return the share of all values that are zero once values below 2^exponent are rounded to zero."""
        return (self._zeros + self._counts[self._place(exponent)]) / self._total if self._total else 0.0

    def magnitude_below(self, exponent: int) -> float:
        """Return the share of the sum of all magnitudes that values below 2^exponent contribute."""
        return self._magnitudes[self._place(exponent)] / self._magnitudes[-1] if self._magnitudes[-1] else 0.0

    def _place(self, exponent: int) -> int:
        return min(max(exponent - self._lowest, 0), len(self._counts) - 1)


@dataclass(frozen=True, slots=True)
class Fp16Gradients:
    """Histograms of the gradients of a sampled step that passed through FP16; of all gradients if none did.

    Attributes:
        modules: Histograms of gradients at module outputs, by module name.
        parameters: Histograms of parameter gradients, by parameter name.
        half: Whether the step computed in FP16. If not, all statements about FP16 are predictions.
    """

    modules: dict[str, ExponentCounts]
    parameters: dict[str, ExponentCounts]
    half: bool

    @property
    def named(self) -> dict[str, ExponentCounts]:
        """Histograms of modules and parameters; on a name clash the parameter wins."""
        return {**self.modules, **self.parameters}


@dataclass(frozen=True, slots=True)
class LargestGradient:
    """The largest gradient of a step that did not overflow, without the loss scale.

    Attributes:
        value: The magnitude; 0 if there is no gradient.
        where: Name of the module or parameter.
        certain: The largest gradient stored in FP16. A larger ``value`` belongs to an FP32 tensor that appears to have
            passed through FP16.
    """

    value: float
    where: str
    certain: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """Sampled step used to interpolate the steps around it.

    Attributes:
        step: The step number.
        largest: log2 of the largest unscaled gradient.
        ratio: log2 of the largest gradient divided by the norm of all gradients.
    """

    step: int
    largest: float
    ratio: float


def gradients_of(record: HistogramRecord) -> Fp16Gradients:
    """Return the gradients of a sampled step that FP16 limits.

    In an FP16 step these are the tensors stored in FP16 and the FP32 tensors that passed through FP16: gradients of
    FP32 parameters under autocast, copies for master weights, and sums over micro-batches. Such a tensor has no value
    below FP16's smallest number. A tensor with smaller values was always FP32, and no loss scale makes it overflow.
    """
    kinds = [record.tensors.get(kind, {}) for kind in ("activation_gradients", "weight_gradients")]
    half = any(counts.dtype == "float16" for named in kinds for counts in named.values())
    modules, parameters = (
        {name: counts for name, counts in named.items() if not half or _is_half(counts)} for named in kinds
    )
    return Fp16Gradients(modules, parameters, half)


def largest_of(gradients: Fp16Gradients, loss_scale: float) -> LargestGradient:
    """Return the largest gradient of a step.

    FP32 sums over micro-batches may exceed the gradient of each micro-batch. In a step without overflow no micro-batch
    overflowed, so values are capped at FP16's largest number.

    Args:
        gradients: Gradients of a step that did not overflow.
        loss_scale: The loss scale of the gradients, above 0.
    """
    both = (*gradients.modules.items(), *gradients.parameters.items())
    found = [(counts.largest, name, counts.dtype) for name, counts in both]
    value, where, _ = max(found, key=lambda each: each[0], default=(0.0, "", ""))
    if gradients.half:
        value = min(value, FLOAT16.max)
    certain = max((largest for largest, _, dtype in found if dtype == "float16"), default=0.0)
    return LargestGradient(value / loss_scale, where, certain / loss_scale)


def sample_at(step: int, largest: float, norm: float) -> HistogramSample | None:
    """Return a sample for interpolation; None if the largest gradient or the norm is zero or not finite."""
    if not (0 < largest < math.inf and 0 < norm < math.inf):
        return None
    return HistogramSample(step, math.log2(largest), math.log2(largest / norm))


def interpolate(before: HistogramSample, after: HistogramSample, step: int, norm: float) -> float:
    """Interpolate the largest gradient of a step between two samples, which may be identical.

    Args:
        before: The sample before the step, or the nearest.
        after: The sample after the step, or the nearest.
        step: The step.
        norm: Norm of the unscaled gradients, recorded for every step without overflow. If it is zero or not finite, as
            after an overflow, the largest gradient itself is interpolated.

    Returns:
        The norm times the ratio of largest gradient to norm, interpolated in log space.
    """
    span = after.step - before.step
    share = (step - before.step) / span if span else 0.0
    if 0 < norm < math.inf:
        return float(norm * 2.0 ** (before.ratio + share * (after.ratio - before.ratio)))
    return float(2.0 ** (before.largest + share * (after.largest - before.largest)))


def largest_at_step(samples: Sequence[HistogramSample], step: int, norm: float) -> float:
    """Estimate the largest gradient of a step from the samples around it.

    Args:
        samples: At least one sample, sorted by step.
        step: The step.
        norm: See `interpolate`.
    """
    at = bisect_left(samples, step, key=lambda one: one.step)
    before, after = (samples[min(max(place, 0), len(samples) - 1)] for place in (at - 1, at))
    return interpolate(before, after, step, norm)


def _is_half(counts: ExponentCounts) -> bool:
    return counts.dtype == "float16" or (counts.dtype == "float32" and (not counts.counts or counts.lowest >= TINIEST))
