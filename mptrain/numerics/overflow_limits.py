"""Loss scales at which the steps of one learner overflow, by its looks and its record, and evidence that only few steps do.

`mptrain.numerics.forecast` says how both enter a recommendation. Nothing here imports torch. The distributions behind the bounds that a
sample puts on the whole it was drawn from are scipy's, imported when a bound is asked for: a run that only trains never is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final, NamedTuple

from mptrain.numerics.exponents import INFINITE_FROM, HistogramSample, interpolate, largest_at_step, sample_at
from mptrain.records import StepRecord

#: Exponents of the scales that are foretold: 1 to 2^24, apex's highest.
EXPONENTS: Final = range(25)

#: The share of steps that may lie beyond a bound.
MOST: Final = 0.01

#: The confidence of a bound.
CONFIDENCE: Final = 0.95

#: The least number of steps, none of them beyond a bound, that shows with `CONFIDENCE` that fewer than `MOST` are: 299.
FEWEST: Final = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - MOST))

#: log2 of the first magnitude that FP16 cannot hold.
_END: Final = math.log2(INFINITE_FROM)

#: The limit of a step without any gradient.
_NEVER: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class WorstTensor:
    """The worst of several tensors: its share and its name, and the step where it was so (0: over all steps)."""

    share: float = 0.0
    name: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class SampledStep:
    """One step that was looked at.

    Attributes:
        step: The attempt.
        loss_scale: The scale in force.
        largest: The largest gradient, without the scale; inf where the step overflowed.
        where: Which module's or parameter's it is.
        taken: By `EXPONENTS`: the module that loses the largest share of its magnitude.
    """

    step: int
    loss_scale: float
    largest: float
    where: str
    taken: tuple[WorstTensor, ...]

    def overflows(self, exponent: int) -> bool:
        """Return whether something of this step overflows at 2^exponent; one that did at its own scale does from there on."""
        if math.isinf(self.largest):
            return 2.0**exponent >= self.loss_scale
        return self.largest * 2.0**exponent >= INFINITE_FROM


@dataclass(frozen=True, slots=True)
class OverflowEvidence:
    """Evidence that a scale overflows at less than 1 % of the steps, of two kinds with 95 % confidence each.

    One of them is enough, so together they err in up to one of ten runs (9.4 % of normal draws at a share of 1.01 %).

    Attributes:
        by_samples: Exponent of the largest scale for which the sampled steps make it sure; None where they do for none from 1 on.
        by_record: The same of steps that FP16 computed without overflow.
        with_more: What ``by_samples`` would become for ever more looks that vary as these do, also below 0; None where it
            is not known.
        spread: Standard deviation of log2 of the largest gradient over the looks: doublings; 0 for one look.
        recorded: Steps on record.
        held: How many of them are known not to overflow at the scale of ``by_record``.
    """

    by_samples: int | None = None
    by_record: int | None = None
    with_more: int | None = None
    spread: float = 0.0
    recorded: int = 0
    held: int = 0

    @property
    def sure(self) -> int | None:
        """The larger of the two."""
        return max((each for each in (self.by_samples, self.by_record) if each is not None), default=None)


class RecordedSteps:
    """Counts steps as they pass: those that FP16 computed without overflow, by the exponent of their scale.

    Args:
        half: They were computed in FP16.
    """

    def __init__(self, half: bool) -> None:
        self.steps = 0
        self.epochs = 0
        self._half = half
        self._held: Counter[int] = Counter()

    def passing(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The steps as they are; one whose loss is not finite is no matter of the scale, and not counted."""
        for step in steps:
            self.epochs = max(self.epochs, step.epoch + 1)
            if math.isfinite(step.loss):
                self.steps += 1
                if self._half and not step.overflow and 0 < step.loss_scale < math.inf:
                    self._held[math.floor(math.log2(step.loss_scale))] += 1
            yield step

    def held_at(self, exponent: int) -> int:
        """Count the steps that are known not to overflow at 2^exponent."""
        return sum(count for scale, count in self._held.items() if scale >= exponent)

    def proves(self) -> int | None:
        """Exponent of the largest scale that the counted steps prove to overflow at less than 1 % of them."""
        proven = (
            exponent
            for exponent in reversed(EXPONENTS)
            if self.steps and largest_share(self.steps - self.held_at(exponent), self.steps) < MOST
        )
        return next(proven, None)


def find_evidence(sampled_steps: Sequence[SampledStep], record: RecordedSteps) -> OverflowEvidence:
    """Return what looks and record make sure of overflows."""
    proven = record.proves()
    found = OverflowEvidence(by_record=proven, recorded=record.steps, held=record.held_at(proven or 0))
    edges = _edges(sampled_steps)
    if len(edges) < 2:
        return found
    middle, spread = fmean(edges), stdev(edges)
    # Exponents of the largest scales below these edges, at most the last of `EXPONENTS`; they may be negative.
    limits = (middle - factor * spread for factor in (tolerance_factor(len(edges)), limit_factor()))
    by_samples, with_more = (min(math.ceil(edge) - 1, EXPONENTS[-1]) for edge in limits)
    return replace(found, by_samples=by_samples if by_samples >= 0 else None, with_more=with_more, spread=spread)


def overflow_limits(sampled_steps: Sequence[SampledStep], steps: Iterable[StepRecord], half: bool) -> Counter[int]:
    """Return how many steps begin to overflow at each exponent; steps whose loss is not finite are no matter of the scale.

    Args:
        sampled_steps: Those of a learner.
        steps: Its steps, in order.
        half: Whether they were computed in FP16: then one that was clean at its scale is so below it.
    """
    left = {sample.step: sample for sample in sampled_steps}
    found: Counter[int] = Counter()
    waiting: list[_Between] = []
    before: HistogramSample | None = None
    for step in steps:
        sample = left.pop(step.step, None)
        after = sample_at(step.step, sample.largest, step.grad_norm) if sample and not step.overflow else None
        if sample and after:
            found.update(_between(before or after, after, waiting))
            found[_limit_of(sample)] += 1
            waiting, before = [], after
        elif step.overflow:
            if math.isfinite(step.loss) and 0 < step.loss_scale < math.inf:
                waiting.append(_Between(step.step, math.inf, -_NEVER, math.ceil(math.log2(step.loss_scale))))
        elif 0 < step.grad_norm < math.inf:
            clean = math.floor(math.log2(step.loss_scale)) if half and 0 < step.loss_scale < math.inf else -_NEVER
            waiting.append(_Between(step.step, step.grad_norm, clean + 1, _NEVER))
        if before and not left:  # no look is to come
            found.update(_between(before, before, waiting))
            waiting = []
    if before:
        found.update(_between(before, before, waiting))
    else:
        found.update(one.overflowed for one in waiting if one.overflowed < _NEVER)
    found.update(_limit_of(sample) for sample in left.values())
    return found


def _edges(sampled_steps: Sequence[SampledStep]) -> list[float]:
    """log2 of the scale at which each look overflows.

    Of a look that overflowed it is interpolated between its neighbours, and at most that of its own scale. Where more than
    half of them did, the others are too few and the smallest: then there is none.
    """
    sound = [
        HistogramSample(sample.step, math.log2(sample.largest), 0.0)
        for sample in sampled_steps
        if 0 < sample.largest < math.inf
    ]
    overflowed = [sample for sample in sampled_steps if math.isinf(sample.largest)]
    if len(sound) < len(overflowed):
        return []
    edges = [_END - one.largest for one in sound]
    for sample in overflowed:
        largest = largest_at_step(sound, sample.step, math.inf)
        edges.append(min(_END - math.log2(largest), math.log2(sample.loss_scale)))
    return edges


def _first_overflowing(largest: float) -> int:
    """Return the smallest exponent of a scale at which a gradient overflows."""
    exponent = math.ceil(math.log2(INFINITE_FROM) - math.log2(largest))
    return exponent - 1 if largest * 2.0 ** (exponent - 1) >= INFINITE_FROM else exponent


def _limit_of(sample: SampledStep) -> int:
    """Return the smallest exponent at which a step that was looked at overflows."""
    if math.isinf(sample.largest):
        return math.ceil(math.log2(sample.loss_scale))
    return _first_overflowing(sample.largest) if sample.largest else _NEVER


class _Between(NamedTuple):
    """A step that was not looked at: its norm, the least exponent at which it may overflow, the one at which it did."""

    step: int
    norm: float
    least: int
    overflowed: int


def _between(before: HistogramSample, after: HistogramSample, steps: Iterable[_Between]) -> Iterator[int]:
    """Yield the smallest exponents at which steps between two looks overflow, by the norms of their gradients."""
    for one in steps:
        found = _first_overflowing(interpolate(before, after, one.step, one.norm))
        yield min(max(found, one.least), one.overflowed)


def tolerance_factor(samples: int) -> float:
    """Return k of the one-sided normal tolerance limit: ``mean - k * deviation`` lies below 99 % of all values.

    Of normal values, with 95 % confidence (NIST/SEMATECH e-Handbook, 7.2.6.3; ISO 16269-6): 10.6 for 3 samples, 3.98 for
    10, 3.06 for 30, and 2.33 for all there are.

    Args:
        samples: How many values mean and standard deviation are of; at least 2.
    """
    from scipy import special

    root = math.sqrt(samples)
    return float(special.nctdtrit(samples - 1, root * special.ndtri(1 - MOST), CONFIDENCE)) / root


def limit_factor() -> float:
    """Return what `tolerance_factor` becomes for ever more samples."""
    from scipy import special

    return float(special.ndtri(1 - MOST))


def largest_share(found: int, samples: int) -> float:
    """Return the largest share that so many cases among so many samples are compatible with (Clopper and Pearson, 1934).

    Without a case it is 1 - 0.05^(1/samples), nearly 3/samples: the rule of three. So less than 1 % takes 299 samples
    without a case, 473 with one.
    """
    from scipy import special

    return 1.0 if found >= samples else float(special.betaincinv(found + 1, samples - found, CONFIDENCE))
