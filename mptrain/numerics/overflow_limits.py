"""Loss scales at which the steps of one learner overflow, and statistical bounds on the share of overflowing steps.

Nothing here imports torch, and scipy is imported only when a bound is computed, so training never imports it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Final, NamedTuple

from mptrain.numerics.exponents import INFINITE_FROM, HistogramSample, interpolate, largest_at_step, sample_at
from mptrain.system.records import StepRecord

#: Exponents of the forecast scales: 1 to 2^24, apex's maximum.
EXPONENTS: Final = range(25)

#: Largest share of steps that may overflow.
MOST: Final = 0.01

#: Confidence level of the bounds.
CONFIDENCE: Final = 0.95

#: Fewest steps, all without overflow, that prove with `CONFIDENCE` that a share below `MOST` overflows: 299.
FEWEST: Final = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - MOST))

#: log2 of the smallest magnitude that overflows FP16.
_END: Final = math.log2(INFINITE_FROM)

#: The overflow limit of a step whose gradients are all zero.
_NEVER: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class WorstTensor:
    """The tensor that loses the largest share (0 to 1, of its values or magnitude) to FP16 underflow among several.

    ``name`` is empty if there is no tensor; ``step`` is 0 for a share over all steps.
    """

    share: float = 0.0
    name: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Summary of a step with exponent histograms: its largest gradient, and its underflow at every loss scale.

    ``largest`` is the largest unscaled magnitude, in the module or parameter ``where``; inf on overflow. ``taken`` has,
    for each of `EXPONENTS`, the module whose gradient loses the largest share of its magnitude; empty on overflow.
    """

    step: int
    loss_scale: float
    largest: float
    where: str
    taken: tuple[WorstTensor, ...]

    def overflows(self, exponent: int) -> bool:
        """Return whether the step's gradients overflow FP16 at the loss scale 2^exponent.

        One that overflowed in the run overflows at its own and all larger scales; lower ones are assumed safe.
        """
        if math.isinf(self.largest):
            return 2.0**exponent >= self.loss_scale
        return self.largest * 2.0**exponent >= INFINITE_FROM


@dataclass(frozen=True, slots=True)
class OverflowEvidence:
    """Evidence that less than 1 % of a run's steps overflow at a loss scale: two kinds, each with 95 % confidence.

    Sampled steps: log2 of the largest gradient is assumed normal, as in LogMax (`mptrain.scaler.logmax`), and its
    one-sided tolerance limit must lie below the end of FP16, which requires more headroom the fewer or wider spread the
    samples are. Recorded steps: an FP16 step without overflow has none at lower scales, and the Clopper-Pearson bound
    on the share of the others must be below 1 %. Either kind suffices, so together they err in up to one of ten runs
    (9.4 % of normal draws at a share of 1.01 %).

    Attributes:
        by_samples: Exponent of the largest scale that the sampled steps prove; None if they prove no scale from 1 on.
        by_record: Exponent of the largest scale that the recorded steps prove; None if there is none.
        with_more: Limit of ``by_samples`` for many samples of the same spread, possibly negative; None if unknown.
        spread: Standard deviation of log2 of the largest gradient over the samples, in doublings; 0 for one sample.
        recorded: Number of recorded steps.
        held: Number of recorded steps known not to overflow at the scale of ``by_record``.
    """

    by_samples: int | None = None
    by_record: int | None = None
    with_more: int | None = None
    spread: float = 0.0
    recorded: int = 0
    held: int = 0

    @property
    def sure(self) -> int | None:
        """Exponent of the largest scale that either kind of evidence proves; None if neither proves any."""
        return max((each for each in (self.by_samples, self.by_record) if each is not None), default=None)


class RecordedSteps:
    """Counter of a run's steps without overflow, by the exponent of their loss scale, and of steps and epochs.

    Steps that are not FP16 (``half``) are no evidence: none counts as without overflow.
    """

    def __init__(self, half: bool) -> None:
        self.steps = 0
        self.epochs = 0
        self._half = half
        self._held: Counter[int] = Counter()

    def passing(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield step records and count those with a finite loss, as no scale could avoid other overflows."""
        for step in steps:
            self.epochs = max(self.epochs, step.epoch + 1)
            if math.isfinite(step.loss):
                self.steps += 1
                if self._half and not step.overflow and 0 < step.loss_scale < math.inf:
                    self._held[math.floor(math.log2(step.loss_scale))] += 1
            yield step

    def held_at(self, exponent: int) -> int:
        """Return the number of counted steps known not to overflow at the loss scale 2^exponent."""
        return sum(count for scale, count in self._held.items() if scale >= exponent)

    def proves(self) -> int | None:
        """Return the exponent of the largest scale proven to overflow at less than 1 % of the steps, or None."""
        proven = (
            exponent
            for exponent in reversed(EXPONENTS)
            if self.steps and largest_share(self.steps - self.held_at(exponent), self.steps) < MOST
        )
        return next(proven, None)


def find_evidence(sampled_steps: Sequence[SampledStep], record: RecordedSteps) -> OverflowEvidence:
    """Return the evidence that less than 1 % of a run's steps overflow, from sampled and from recorded steps."""
    proven = record.proves()
    evidence = OverflowEvidence(by_record=proven, recorded=record.steps, held=record.held_at(proven or 0))
    edges = _edges(sampled_steps)
    if len(edges) < 2:
        return evidence
    middle, spread = fmean(edges), stdev(edges)
    # Exponents of the largest scales below these edges, at most the last of `EXPONENTS`; they may be negative.
    limits = (middle - factor * spread for factor in (tolerance_factor(len(edges)), limit_factor()))
    by_samples, with_more = (min(math.ceil(edge) - 1, EXPONENTS[-1]) for edge in limits)
    return replace(evidence, by_samples=by_samples if by_samples >= 0 else None, with_more=with_more, spread=spread)


def overflow_limits(sampled_steps: Sequence[SampledStep], steps: Iterable[StepRecord], half: bool) -> Counter[int]:
    """Return the number of steps that begin to overflow at each exponent of the loss scale.

    The limit of a step is the smallest exponent at which its gradients overflow FP16: from the histograms of a sampled
    step, interpolated from the gradient norm for any other, 2^16 for a sampled step whose gradients are all zero.
    Overflows with a non-finite loss are ignored, because no scale avoids them. ``steps`` are in order. With ``half``,
    they were computed in FP16: then a step without overflow has none at lower scales either.
    """
    left = {sample.step: sample for sample in sampled_steps}
    limits: Counter[int] = Counter()
    waiting: list[_Between] = []
    before: HistogramSample | None = None
    for step in steps:
        sample = left.pop(step.step, None)
        after = sample_at(step.step, sample.largest, step.grad_norm) if sample and not step.overflow else None
        if sample and after:
            limits.update(_between(before or after, after, waiting))
            limits[_limit_of(sample)] += 1
            waiting, before = [], after
        elif step.overflow:
            if math.isfinite(step.loss) and 0 < step.loss_scale < math.inf:
                waiting.append(_Between(step.step, math.inf, -_NEVER, math.ceil(math.log2(step.loss_scale))))
        elif 0 < step.grad_norm < math.inf:
            clean = math.floor(math.log2(step.loss_scale)) if half and 0 < step.loss_scale < math.inf else -_NEVER
            waiting.append(_Between(step.step, step.grad_norm, clean + 1, _NEVER))
        if before and not left:  # no further samples
            limits.update(_between(before, before, waiting))
            waiting = []
    if before:
        limits.update(_between(before, before, waiting))
    else:
        limits.update(step.overflowed for step in waiting if step.overflowed < _NEVER)
    limits.update(_limit_of(sample) for sample in left.values())
    return limits


def _edges(sampled_steps: Sequence[SampledStep]) -> list[float]:
    """Return log2 of the scale at which each sampled step overflows; empty if more than half did in the run.

    The rest would be biased towards small gradients. For one that did, it is interpolated, at most log2 of its scale.
    """
    sound = [
        HistogramSample(sample.step, math.log2(sample.largest), 0.0)
        for sample in sampled_steps
        if 0 < sample.largest < math.inf
    ]
    overflowed = [sample for sample in sampled_steps if math.isinf(sample.largest)]
    if len(sound) < len(overflowed):
        return []
    edges = [_END - sample.largest for sample in sound]
    for sample in overflowed:
        largest = largest_at_step(sound, sample.step, math.inf)
        edges.append(min(_END - math.log2(largest), math.log2(sample.loss_scale)))
    return edges


def _first_overflowing(largest: float) -> int:
    exponent = math.ceil(math.log2(INFINITE_FROM) - math.log2(largest))
    return exponent - 1 if largest * 2.0 ** (exponent - 1) >= INFINITE_FROM else exponent


def _limit_of(sample: SampledStep) -> int:
    if math.isinf(sample.largest):
        return math.ceil(math.log2(sample.loss_scale))
    return _first_overflowing(sample.largest) if sample.largest else _NEVER


class _Between(NamedTuple):
    """A step without histograms: gradient norm, least exponent at which it may overflow, exponent at which it did."""

    step: int
    norm: float
    least: int
    overflowed: int


def _between(before: HistogramSample, after: HistogramSample, steps: Iterable[_Between]) -> Iterator[int]:
    for step in steps:
        exponent = _first_overflowing(interpolate(before, after, step.step, step.norm))
        yield min(max(exponent, step.least), step.overflowed)


def tolerance_factor(samples: int) -> float:
    """Return the factor k of a one-sided normal tolerance limit: ``mean - k * deviation`` is below 99 % of all values.

    Holds for normal values with 95 % confidence (NIST/SEMATECH e-Handbook, 7.2.6.3; ISO 16269-6): 10.6 for 3 samples,
    3.98 for 10, 3.06 for 30, and 2.33 in the limit. At least 2 samples are needed.
    """
    from scipy import special

    root = math.sqrt(samples)
    return float(special.nctdtrit(samples - 1, root * special.ndtri(1 - MOST), CONFIDENCE)) / root


def limit_factor() -> float:
    """Return the limit of `tolerance_factor` for many samples, 2.33: the 99 % quantile of the normal distribution."""
    from scipy import special

    return float(special.ndtri(1 - MOST))


def largest_share(cases: int, samples: int) -> float:
    """Return the 95 % upper confidence bound (Clopper and Pearson, 1934) on a share, from cases found among samples.

    Without a case it is 1 - 0.05^(1/samples), nearly 3/samples: the rule of three. A bound below 1 % requires 299
    samples without a case, or 473 with one.
    """
    from scipy import special

    return 1.0 if cases >= samples else float(special.betaincinv(cases + 1, samples - cases, CONFIDENCE))
