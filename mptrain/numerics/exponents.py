"""Shares of a histogram of exponents that FP16 loses, at any loss scale. Nothing here imports torch.

Multiplying by a power of two moves every value to another exponent and changes nothing else. So the counts of one step
tell how much of a tensor FP16 would lose at every scale, as long as the values themselves were not lost already: take
counts of FP32 or bfloat16 values, or of FP16 values at a scale that is high enough.

FP16 (IEEE 754 binary16): the smallest number above zero is 2^-24, and 2^-25 or less is rounded to zero; numbers below
2^-14 are subnormal and have fewer bits; the largest is 65504, and 65520 or more is rounded to infinity.

The largest gradient of a step in FP16 follows from its histograms, and that of the steps between two such looks from both
(`HistogramSample`). Both who foretells static scales and who replays a scaling rule ask here, so that they cannot disagree on one run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from mptrain.numerics.formats import FLOAT16
from mptrain.records import ExponentCounts, HistogramRecord

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


class ExponentTails:
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


@dataclass(frozen=True, slots=True)
class Fp16Gradients:
    """The gradients of a look that went through FP16, as the device saw them; all of them where none did.

    Attributes:
        modules: At the outputs of modules, by name.
        parameters: By name.
        half: Whether the step computed in FP16 at all. Where it did not, all that is said of FP16 is foretold.
    """

    modules: dict[str, ExponentCounts]
    parameters: dict[str, ExponentCounts]
    half: bool

    @property
    def named(self) -> dict[str, ExponentCounts]:
        """Both; a name that a module and a parameter share is the parameter's."""
        return {**self.modules, **self.parameters}


@dataclass(frozen=True, slots=True)
class LargestGradient:
    """The largest gradient of a step that did not overflow, without the loss scale.

    Attributes:
        value: The magnitude; 0 where no gradient was.
        where: Which module's or parameter's it is.
        certain: The largest of those that were kept in FP16. A larger ``value`` is that of an FP32 tensor that seems to have
            come through FP16.
    """

    value: float
    where: str
    certain: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """A look from which the steps around it are told.

    Attributes:
        step: The attempt.
        largest: log2 of its largest gradient, without the loss scale.
        ratio: log2 of that over the norm of all gradients.
    """

    step: int
    largest: float
    ratio: float


def gradients_of(record: HistogramRecord) -> Fp16Gradients:
    """The gradients of a look that FP16 judges.

    In a step that computes in FP16 those are the tensors kept in FP16, and the FP32 ones that were FP16 numbers on their way:
    gradients of FP32 parameters under autocast, copies for master weights, and sums over micro-batches. Such a tensor has
    nothing below FP16's smallest number. One that has was FP32 all along, and no loss scale makes it overflow.
    """
    kinds = [record.tensors.get(kind, {}) for kind in ("activation_gradients", "weight_gradients")]
    half = any(counts.dtype == "float16" for named in kinds for counts in named.values())
    modules, parameters = (
        {name: counts for name, counts in named.items() if not half or _is_half(counts)} for named in kinds
    )
    return Fp16Gradients(modules, parameters, half)


def largest_of(gradients: Fp16Gradients, loss_scale: float) -> LargestGradient:
    """The largest of them.

    FP32 sums over micro-batches may exceed what each of them held. Where the step was clean at its scale none of those did
    overflow there, so nothing is taken for more than FP16's largest number.

    Args:
        gradients: Of a step that did not overflow.
        loss_scale: What they carry; above 0.
    """
    both = (*gradients.modules.items(), *gradients.parameters.items())
    found = [(counts.largest, name, counts.dtype) for name, counts in both]
    value, where, _ = max(found, key=lambda each: each[0], default=(0.0, "", ""))
    if gradients.half:
        value = min(value, FLOAT16.max)
    certain = max((largest for largest, _, dtype in found if dtype == "float16"), default=0.0)
    return LargestGradient(value / loss_scale, where, certain / loss_scale)


def sample_at(step: int, largest: float, norm: float) -> HistogramSample | None:
    """Return the evidence of a look for the steps around it; None where it or the norm of its gradients is zero or not finite."""
    if not (0 < largest < math.inf and 0 < norm < math.inf):
        return None
    return HistogramSample(step, math.log2(largest), math.log2(largest / norm))


def interpolate(before: HistogramSample, after: HistogramSample, step: int, norm: float) -> float:
    """The largest gradient of a step between two looks, both of which may be the same.

    Args:
        before: The look before the step, or the nearest.
        after: The look after it, or the nearest.
        step: The step.
        norm: Of its unscaled gradients, which is on record of every clean step. Where it is none, as after an overflow, the
            largest gradient itself is interpolated.

    Returns:
        The norm times the ratio of the two at the looks, interpolated in logarithms.
    """
    span = after.step - before.step
    share = (step - before.step) / span if span else 0.0
    if 0 < norm < math.inf:
        return float(norm * 2.0 ** (before.ratio + share * (after.ratio - before.ratio)))
    return float(2.0 ** (before.largest + share * (after.largest - before.largest)))


def largest_at_step(samples: Sequence[HistogramSample], step: int, norm: float) -> float:
    """Return the largest gradient of a step by the looks around it.

    Args:
        samples: At least one, in the order of their steps.
        step: The step.
        norm: See `interpolate`.
    """
    at = bisect_left(samples, step, key=lambda one: one.step)
    before, after = (samples[min(max(place, 0), len(samples) - 1)] for place in (at - 1, at))
    return interpolate(before, after, step, norm)


def _is_half(counts: ExponentCounts) -> bool:
    return counts.dtype == "float16" or (counts.dtype == "float32" and (not counts.counts or counts.lowest >= TINIEST))
