"""Forecast of static loss scales from the histograms of one run: the usable range and the cost of every other scale.

Nothing here imports torch, and nothing is tuned to a workload. The rule follows from FP16 arithmetic (Micikevicius et
al. 2018, section 3.2: scales from 8 to 32 K worked, and any does if no value overflows and no relevant one is lost):

- *Upper edge.* The largest power of two at which no step overflows: the largest gradient times the scale is below
  65520. The largest gradient is known at sampled steps, and interpolated at others from the samples and the gradient
  norm, which every step records.
- *Confidence.* One sampled step says nothing about the next. So a scale is usable only if less than 1 % of the steps
  overflow with 95 % confidence (`OverflowEvidence`).
- *Lower edge.* The smallest power of two at which no module loses more of its gradient's magnitude, the sum of |x|,
  than `MOST_TAKEN` at any sampled step. Underflow is a bias: every lost value moves towards zero, so the error does not
  average out over a batch as other rounding errors do. The number of lost values is a poor criterion: half of a tensor
  can be lost and contribute nothing. So is the size of the error: a word LSTM fell behind at scale 1 with 1 % (root of
  squares).
- *Unseen.* What an FP16 run has rounded to zero is not in its histograms. What the zeros of a module may have been
  (`unseen_magnitude`) counts as lost at every scale. If that alone is more than `MOST_TAKEN` of a module's gradient at
  any sampled step, or a gradient is all zero, the run bounds nothing. But gradients may be exactly zero at some steps,
  as of a detector's head that no box of the batch falls to. They are taken for that at less than half of the steps, if
  at all others the largest element is so large that it would be a normal FP16 number at these: it would have to fall
  2^11 times to vanish. How far the lower edge lies below is unknown, and so is the upper edge: a network that does
  not learn keeps its small gradients, and would have larger ones with all of them (`plain16` at scale 1: 0.15, in
  FP32 1.8). Zeros of FP32 and bfloat16 are zeros.
- *Recommendation.* A usable scale, `MARGIN` doublings below the upper edge: one because the ratio of largest element to
  norm varies, one because another seed or sample order has another largest gradient. Too small a scale loses the
  smallest values first, too large a scale loses whole updates; so the recommendation is high in the range, and never
  below it. One sample is not enough, because it does not show how much gradients vary. Several are not enough if no
  proven scale is above the lower edge while more samples could still move the proven limit by more than one doubling.
  Nor are fewer than 299 recorded steps: the gradients of `plain16` grow 16 times between steps 40 and 80.

Assumptions: FP16 would compute the sampled tensors, except those that the run keeps in a wider dtype beside FP16
tensors and that never were FP16 numbers; no value inside a module is larger than at its output; training proceeds as
recorded, for as long. The last one fails if many updates are skipped: a run can stay where gradients are large, so far
above the upper edge more steps overflow than forecast.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from mptrain.numerics.exponents import (
    NORMAL,
    TINIEST,
    ExponentTails,
    gradients_of,
    largest_of,
    merged,
    nonzero,
    ties_below,
    total,
    unscaled,
    unseen_magnitude,
)
from mptrain.numerics.overflow_limits import (
    EXPONENTS,
    FEWEST,
    MOST,
    OverflowEvidence,
    RecordedSteps,
    SampledStep,
    WorstTensor,
    find_evidence,
    overflow_limits,
)
from mptrain.system.records import ExponentCounts, HistogramRecord, StepRecord

#: Largest share of a module's gradient, by magnitude, that may underflow: the mean error of rounding to two mantissa
#: bits (a quarter of their spacing, 2^-4, of 1.5). Networks train as well with gradients of two mantissa bits as with
#: FP16 gradients (E5M2 in Micikevicius et al., *FP8 Formats for Deep Learning*, 2022).
MOST_TAKEN: Final = 1 / 24

#: Doublings between the recommended scale and the largest scale at which no step overflows.
MARGIN: Final = 2

_share = operator.attrgetter("share")


@dataclass(frozen=True, slots=True)
class ScaleForecast:
    """Forecast of the underflow and overflow that a run would have with the static FP16 loss scale 2^exponent.

    Shares are 0 to 1. A sampled step has exponent histograms. Activation gradients are those at module outputs.

    Attributes:
        lost: Share of nonzero activation gradients that underflow, over all modules and sampled steps.
        worst_lost: The module with the largest such share over all sampled steps.
        zeros: Share of all activation gradients that are zero at this scale, with those that are zero already.
        subnormal: Share of nonzero activation gradients that are subnormal in FP16.
        taken: The module, at one sampled step, whose gradient loses the largest share of its magnitude (sum of |x|).
        starved: Number of sampled steps at which a module loses a larger share of its magnitude than `MOST_TAKEN`.
        weights_lost: Share of nonzero weight gradients that underflow, over all parameters and sampled steps.
        overflowing: Number of sampled steps that overflow.
        overflow_share: Expected share of all steps that overflow.
    """

    exponent: int
    lost: float
    worst_lost: WorstTensor
    zeros: float
    subnormal: float
    taken: WorstTensor
    starved: int
    weights_lost: float
    overflowing: int
    overflow_share: float


@dataclass(frozen=True, slots=True)
class UnseenTensor:
    """A module or parameter whose FP16 gradient may have lost more of its magnitude to zero than `MOST_TAKEN`.

    ``steps`` is the number of sampled steps at which it may, and ``all_zero`` that of those with zeros alone.
    """

    name: str
    steps: int
    all_zero: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of every static FP16 loss scale from 1 to 2^24 for one learner of a run, with a recommended scale.

    Attributes:
        sampled_steps: The sampled steps that have a gradient and a usable loss scale.
        steps: Number of steps that the ``overflow_share`` of each scale refers to.
        epochs: Number of epochs that the recorded steps reach, the last one possibly in part; 0 without steps.
        scales: One forecast for each of `EXPONENTS`; empty if no sampled step has a gradient.
        largest: The sampled step with the largest gradient, among those without overflow.
        lowest: Exponent of the smallest scale without excessive underflow; None if there is none.
        highest: Exponent of the largest scale at which no step is expected to overflow, at most 24; or None.
        too_few: True if more sampled or recorded steps are needed before a scale can be recommended.
        recommended: Exponent of the recommended scale; None if there is none.
        smallest_seen: FP16's smallest number divided by the lowest scale with FP16 gradients. Histograms do not show
            smaller gradients. 0 without FP16 gradients.
        unseen: What FP16 may have rounded to zero unseen, all-zero tensors first. With any, the run bounds no scale.
        unusable: Number of sampled steps without information: loss scale 0 or not finite, or no gradient.
    """

    sampled_steps: tuple[SampledStep, ...]
    steps: int
    epochs: int
    smallest_seen: float
    unusable: int
    unseen: tuple[UnseenTensor, ...] = ()
    largest: SampledStep | None = None
    scales: tuple[ScaleForecast, ...] = ()
    lowest: int | None = None
    highest: int | None = None
    evidence: OverflowEvidence = field(default_factory=OverflowEvidence)
    too_few: bool = False
    recommended: int | None = None

    @property
    def top(self) -> int | None:
        """Exponent of the largest scale at which no step is expected to overflow and the evidence suffices, or None."""
        sure = self.evidence.sure
        return None if sure is None or self.highest is None else min(sure, self.highest)

    @property
    def is_answered(self) -> bool:
        """True if the records suffice for a recommended scale, or to say that no static scale is usable."""
        return self.largest is not None and not self.too_few and not self.unseen

    @property
    def has_range(self) -> bool:
        """True if at least one scale is usable: neither excessive underflow nor overflow, on sufficient evidence."""
        return not self.too_few and self.lowest is not None and self.top is not None and self.lowest <= self.top


@dataclass
class GradientHistory:
    """Accumulator of one learner's gradient histograms over a run; memory per sampled step is bounded.

    Attributes:
        sampled_steps: The steps added so far that have a usable gradient.
        activations: Unscaled activation gradients by module, over all sampled steps without overflow; in FP16 steps
            with ties moved as in `ties_below`.
        weights: Unscaled weight gradients by parameter, likewise.
        together: Unscaled gradients of all modules, without the adjustment of ties.
    """

    sampled_steps: list[SampledStep] = field(default_factory=list)
    activations: dict[str, ExponentCounts] = field(default_factory=dict)
    weights: dict[str, ExponentCounts] = field(default_factory=dict)
    together: ExponentCounts = field(default_factory=lambda: merged([]))
    _smallest_seen: float = 0.0
    _seen: Counter[str] = field(default_factory=Counter)
    _unseen: Counter[str] = field(default_factory=Counter)
    _all_zero: Counter[str] = field(default_factory=Counter)
    _least: dict[str, float] = field(default_factory=dict)  # the smallest of the largest elements
    _lowest_scale: dict[str, float] = field(default_factory=dict)  # at which the gradient was all zero
    _unusable: int = 0
    _half: bool = False

    def add(self, record: HistogramRecord) -> None:
        """Add the histograms of one step; without a gradient or a positive finite loss scale it counts as unusable."""
        gradients, loss_scale = gradients_of(record), record.loss_scale
        usable = loss_scale > 0 and math.isfinite(loss_scale)
        if not usable or not any(total(counts) for counts in gradients.named.values()):
            self._unusable += 1
            return
        lost = [name for name, counts in gradients.named.items() if counts.inf or counts.nan]
        if record.overflow or lost:
            self.sampled_steps.append(SampledStep(record.step, loss_scale, math.inf, lost[0] if lost else "", ()))
            return
        self._half = self._half or gradients.half
        if gradients.half:
            self._smallest_seen = max(self._smallest_seen, 2.0**TINIEST / loss_scale)
        modules, parameters = (
            {name: _plain(counts, loss_scale, gradients.half) for name, counts in named.items()}
            for named in (gradients.modules, gradients.parameters)
        )
        seen = merged(unscaled(counts, loss_scale) for counts in gradients.modules.values())
        self.together = merged([self.together, seen]) if self.activations else seen
        _merge_into(self.activations, modules)
        _merge_into(self.weights, parameters)
        largest = largest_of(gradients, loss_scale)
        shown = gradients.modules or gradients.parameters  # outputs of a compiled model are not seen
        kept = {name: counts for name, counts in shown.items() if nonzero(counts)}
        tails = {name: _tails(counts, loss_scale, gradients.half) for name, counts in kept.items()}
        if gradients.half:
            self._seen.update(kept.keys())
            self._unseen.update(name for name, tail in tails.items() if tail.unseen_share > MOST_TAKEN)
            for name, counts in kept.items():
                self._least[name] = min(self._least.get(name, math.inf), counts.largest / loss_scale)
            for name in (name for name, counts in gradients.named.items() if counts.zeros and not nonzero(counts)):
                self._all_zero[name] += 1
                self._lowest_scale[name] = min(self._lowest_scale.get(name, math.inf), loss_scale)
        self.sampled_steps.append(
            SampledStep(record.step, loss_scale, largest.value, largest.where, _taken(tails, record.step))
        )

    def forecast(self, steps: Iterable[StepRecord] = ()) -> Forecast:
        """Return the forecast of all static loss scales; without recorded steps only the sampled steps count."""
        sampled_steps = tuple(self.sampled_steps)
        sound = [sample for sample in sampled_steps if math.isfinite(sample.largest)]
        record = RecordedSteps(self._half)
        limits = overflow_limits(sampled_steps, record.passing(steps), self._half)
        forecast = Forecast(
            sampled_steps=sampled_steps,
            steps=limits.total(),
            epochs=record.epochs,
            smallest_seen=self._smallest_seen,
            unusable=self._unusable,
            unseen=self._unseen_tensors(len(sound)),
            largest=max(sound, key=lambda sample: sample.largest, default=None),
            evidence=_agreeing(find_evidence(sampled_steps, record), limits),
        )
        if forecast.unseen:  # no evidence either: it would be of a run without those gradients
            return replace(forecast, evidence=OverflowEvidence(recorded=record.steps))
        if forecast.largest is None or forecast.largest.largest == 0:
            return forecast
        scales = self._scales(limits)
        lowest = next((each.exponent for each in scales if not each.starved), None)
        highest = min(min(limits) - 1, EXPONENTS[-1])
        if highest < 0:
            return replace(forecast, scales=scales, lowest=lowest)
        forecast = replace(forecast, scales=scales, lowest=lowest, highest=highest)
        if len(sound) < 2 or 0 < record.steps < FEWEST:
            return replace(forecast, too_few=True)
        if forecast.has_range and forecast.top is not None and lowest is not None:
            return replace(forecast, recommended=max(min(forecast.top, min(limits) - 1 - MARGIN), lowest))
        return replace(forecast, recommended=forecast.top) if _is_settled(forecast) else replace(forecast, too_few=True)

    def _unseen_tensors(self, sound: int) -> tuple[UnseenTensor, ...]:
        steps, never = Counter(self._unseen), {}
        for name, zeros in self._all_zero.items():
            if name not in self.weights or name in self._seen:
                steps[name] += 0 if self._is_exactly_zero(name) else zeros
            elif zeros == sound:  # of a row or an expert single steps may have no gradient
                never[name] = zeros
        # Hooks count gradients in the order of the backward pass; those of parameters follow from those of modules.
        named = {name: count for name, count in reversed(steps.items()) if count} or never
        unseen = (UnseenTensor(name, count, min(count, self._all_zero[name])) for name, count in named.items())
        return tuple(sorted(unseen, key=lambda each: (-each.all_zero, -each.steps)))

    def _is_exactly_zero(self, name: str) -> bool:
        """Return whether the steps at which a module has zeros alone are unlike all others, as those of underflow."""
        normal = self._least.get(name, 0.0) * self._lowest_scale[name] >= 2.0**NORMAL
        return normal and self._all_zero[name] < self._seen[name]

    def _scales(self, limits: Counter[int]) -> tuple[ScaleForecast, ...]:
        modules = {name: ExponentTails(counts) for name, counts in self.activations.items()}
        together, all_weights = (
            ExponentTails(merged(self.activations.values())),
            ExponentTails(merged(self.weights.values())),
        )
        sound, steps = [sample for sample in self.sampled_steps if sample.taken], limits.total()
        scales = []
        for exponent in EXPONENTS:
            below, subnormal, normal = (edge - exponent for edge in (TINIEST - 1, TINIEST, NORMAL))
            taken = max((sample.taken[exponent] for sample in sound), key=_share, default=WorstTensor())
            scales.append(
                ScaleForecast(
                    exponent=exponent,
                    lost=together.share_below(below),
                    worst_lost=_worst_lost(modules, below),
                    zeros=together.zeros_below(below),
                    subnormal=together.share_below(normal) - together.share_below(subnormal),
                    taken=taken,
                    starved=sum(sample.taken[exponent].share > MOST_TAKEN for sample in sound),
                    weights_lost=all_weights.share_below(below),
                    overflowing=sum(sample.overflows(exponent) for sample in self.sampled_steps),
                    overflow_share=sum(n for limit, n in limits.items() if limit <= exponent) / max(steps, 1),
                )
            )
        return tuple(scales)


def _agreeing(evidence: OverflowEvidence, limits: Counter[int]) -> OverflowEvidence:
    """Return evidence whose samples prove no scale at which the norms of all steps let more of them overflow."""
    most = MOST * limits.total()
    allowed = [exponent for exponent in EXPONENTS if sum(n for at, n in limits.items() if at <= exponent) < most]
    if evidence.by_samples is None or evidence.by_samples in allowed:
        return evidence
    return replace(evidence, by_samples=max(allowed, default=None))


def _is_settled(forecast: Forecast) -> bool:
    """Return whether more samples with the same spread would move the proven limit by at most one doubling."""
    sure, most = forecast.evidence.sure, forecast.evidence.with_more
    if most is None or forecast.highest is None:
        return False
    return most < 0 or (sure is not None and sure >= min(most, forecast.highest) - 1)


def _plain(counts: ExponentCounts, loss_scale: float, half: bool) -> ExponentCounts:
    return unscaled(ties_below(counts) if half else counts, loss_scale)


def _tails(counts: ExponentCounts, loss_scale: float, half: bool) -> ExponentTails:
    """Return the unscaled magnitudes of a gradient, with those that the zeros of FP16 may have had."""
    plain = _plain(counts, loss_scale, half)
    # By the rounded scale, as `unscaled` moves the others.
    return ExponentTails(plain, unseen_magnitude(counts) / 2.0 ** round(math.log2(loss_scale)) if half else 0.0)


def _merge_into(known: dict[str, ExponentCounts], histograms: Mapping[str, ExponentCounts]) -> None:
    for name, counts in histograms.items():
        known[name] = merged([known[name], counts]) if name in known else counts


def _taken(modules: Mapping[str, ExponentTails], step: int) -> tuple[WorstTensor, ...]:
    return tuple(
        max(
            (WorstTensor(tail.magnitude_below(TINIEST - 1 - exponent), name, step) for name, tail in modules.items()),
            key=_share,
            default=WorstTensor(),
        )
        for exponent in EXPONENTS
    )


def _worst_lost(named: Mapping[str, ExponentTails], below: int) -> WorstTensor:
    return max(
        (WorstTensor(tails.share_below(below), name) for name, tails in named.items()),
        key=_share,
        default=WorstTensor(),
    )
