"""From the histograms of one run: which static loss scales are right for it, and what every other one would cost.

Nothing here imports torch, and nothing is tuned to a workload. The rule, from what FP16 does (Micikevicius et al. 2018,
section 3.2: scales from 8 to 32 K worked, and any is right as long as nothing overflows and nothing that matters is lost):

- *The upper edge.* A scale overflows a step where the largest gradient times the scale is 65520 or more. That is known of
  the steps that were looked at. For each step between them the largest gradient follows from the norm of all gradients,
  which is on record of every step, and from the looks before and after (`mptrain.numerics.exponents`).
  The upper edge is the largest power of two at which no step overflows.
- *What is sure.* An edge that one look shows says nothing of the next step. So a scale counts as usable only where less
  than 1 % of the steps overflow with 95 % confidence, by one of two kinds of evidence (`mptrain.numerics.overflow_limits`). The
  looks: log2 of the largest gradient is taken for normal, as LogMax does (`mptrain.scaler.logmax`), and the one-sided tolerance
  limit of the looks must lie below the end of FP16; few looks, or such as differ much, leave wide headroom or nothing.
  The record: a step that FP16 computed without overflow holds at every lower scale; where at most so many steps are not
  known to hold that the bound of Clopper and Pearson stays below 1 % (299 steps if all hold), the scale is proven.
- *The lower edge.* How many values are lost says little: half of a tensor can be lost and hold nothing. Nor does the size
  of the rounding error: a word LSTM that fell behind at scale 1 had one of 1 % (root of squares). What is rounded to zero
  is a bias: every lost value moves towards zero, so that the loss does not average out over a batch, as other rounding
  does. So what counts is the magnitude, the sum of |x|, that a module's gradient loses. The lower edge is the smallest
  power of two at which no module, at no step that was looked at, loses more than `MOST_TAKEN`. What survives below FP16's
  normal range has fewer bits, and averages out.
- *The recommendation* is sure, and `MARGIN` doublings below the upper edge: one because the largest element is no fixed share of
  the norm, one because another seed or another order of samples has another largest gradient. Too small a
  scale loses the smallest values first, too large a one whole updates; so it lies high in the range, and never below it.
  One look never names a scale: it does not show how much gradients vary. Nor do several where nothing is both sure and above the
  lower edge, as long as more looks would move what is sure by more than one doubling. Nor do fewer than 299 steps on record,
  however calm they are: the gradients of `plain16` become 16 times larger between the steps 40 and 80. A scale that is named holds
  for runs like the recorded one: of the same length.

What is assumed: that FP16 would compute what was looked at, but for tensors that the run itself keeps in a wider format
beside others in FP16 and that never were FP16 numbers; that nothing between the modules is larger than at their outputs; and that training goes as it went.
Where many updates are skipped it does not, and a run can stay where gradients are large: far above the upper edge more
steps overflow than foretold. Gradients of FP16 lack what they lost already (`Forecast.smallest_seen`).
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
)
from mptrain.numerics.overflow_limits import (
    EXPONENTS,
    FEWEST,
    OverflowEvidence,
    RecordedSteps,
    SampledStep,
    WorstTensor,
    find_evidence,
    overflow_limits,
)
from mptrain.records import ExponentCounts, HistogramRecord, StepRecord

#: The share of a module's gradient, by magnitude, that rounding to zero may take: what rounding to two bits after the
#: leading one takes on average (a quarter of their distance, 2^-4, of 1.5). Networks train with gradients of so few bits as
#: with FP16 ones (E5M2 in Micikevicius et al., *FP8 Formats for Deep Learning*, 2022).
MOST_TAKEN: Final = 1 / 24

#: Doublings between the recommended scale and the largest that overflows at no step.
MARGIN: Final = 2

_share = operator.attrgetter("share")


@dataclass(frozen=True, slots=True)
class ScaleForecast:
    """Consequences of one scale.

    Attributes:
        exponent: The scale is 2 to this power.
        lost: The share of the nonzero activation gradients, all modules and looks together, that is rounded to zero.
        worst_lost: The module with the largest such share over all looks.
        zeros: The share of all activation gradients that is zero then, those that were zero before included.
        subnormal: The share of the nonzero ones that FP16 holds with fewer bits.
        taken: The largest share of its magnitude that a module loses at a look.
        starved: Looks at which that is more than `MOST_TAKEN`.
        weights_lost: The share of the nonzero weight gradients that is rounded to zero.
        worst_weights_lost: The parameter with the largest such share.
        overflowing: Looks at which something overflows.
        overflow_share: The share of all steps at which something is expected to.
    """

    exponent: int
    lost: float
    worst_lost: WorstTensor
    zeros: float
    subnormal: float
    taken: WorstTensor
    starved: int
    weights_lost: float
    worst_weights_lost: WorstTensor
    overflowing: int
    overflow_share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast from the histograms of one learner.

    Attributes:
        sampled_steps: The steps that were looked at.
        steps: How many steps the share of overflowing ones is a share of.
        epochs: Epochs that the steps on record reach into; 0 without steps.
        scales: One for each of `EXPONENTS`; empty where no look has a gradient.
        largest: The look with the largest gradient of those that did not overflow.
        lowest: Exponent of the smallest right scale; None where every one of them loses too much somewhere.
        highest: Exponent of the largest scale at which no step is expected to overflow, at most 24; None where there is
            none from 1 on.
        evidence: What is sure of overflows.
        too_few: More looks, or more steps, are needed before a scale can be named.
        recommended: Exponent of the recommended scale; None where there is none.
        smallest_seen: FP16's smallest number divided by the lowest scale at which gradients were FP16: below it nothing
            could be seen. 0 where none were.
        at_smallest: The largest share of a module's nonzero gradients that were that number: where it is not next to
            nothing, more lie below.
        unusable: How many looks say nothing: their loss scale was 0 or not finite, or there was no gradient.
    """

    sampled_steps: tuple[SampledStep, ...]
    steps: int
    epochs: int
    smallest_seen: float
    at_smallest: float
    unusable: int
    largest: SampledStep | None = None
    scales: tuple[ScaleForecast, ...] = ()
    lowest: int | None = None
    highest: int | None = None
    evidence: OverflowEvidence = field(default_factory=OverflowEvidence)
    too_few: bool = False
    recommended: int | None = None

    @property
    def top(self) -> int | None:
        """Exponent of the largest usable scale: no step is expected to overflow, and less than 1 % is sure."""
        sure = self.evidence.sure
        return None if sure is None or self.highest is None else min(sure, self.highest)

    @property
    def has_range(self) -> bool:
        """True where some scale is usable."""
        return not self.too_few and self.lowest is not None and self.top is not None and self.lowest <= self.top


@dataclass
class GradientHistory:
    """Collects the histograms of one learner, in bounded memory for each look.

    Attributes:
        sampled_steps: Those taken in.
        activations: By module: its gradients without the scale, over all looks that did not overflow, ties as in `ties_below`.
        weights: The same by parameter.
        together: The gradients of all modules without the scale, as they were.
    """

    sampled_steps: list[SampledStep] = field(default_factory=list)
    activations: dict[str, ExponentCounts] = field(default_factory=dict)
    weights: dict[str, ExponentCounts] = field(default_factory=dict)
    together: ExponentCounts = field(default_factory=lambda: merged([]))
    _smallest_seen: float = 0.0
    _at_smallest: float = 0.0
    _unusable: int = 0
    _half: bool = False

    def add(self, record: HistogramRecord) -> None:
        """Take in one look; one without a usable scale says nothing."""
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
        if halves := [counts for counts in gradients.modules.values() if counts.dtype == "float16"]:
            # FP16 has cut gradients off where many of them are its smallest number.
            self._smallest_seen = max(self._smallest_seen, 2.0**TINIEST / loss_scale)
            self._at_smallest = max(self._at_smallest, *(ExponentTails(one).share_below(TINIEST + 1) for one in halves))
        modules, parameters = (
            {name: _plain(counts, loss_scale, gradients.half) for name, counts in named.items()}
            for named in (gradients.modules, gradients.parameters)
        )
        seen = merged(unscaled(counts, loss_scale) for counts in gradients.modules.values())
        self.together = merged([self.together, seen]) if self.activations else seen
        _merge_into(self.activations, modules)
        _merge_into(self.weights, parameters)
        largest = largest_of(gradients, loss_scale)
        self.sampled_steps.append(
            SampledStep(record.step, loss_scale, largest.value, largest.where, _taken(modules, record.step))
        )

    def forecast(self, steps: Iterable[StepRecord] = ()) -> Forecast:
        """Return the forecast.

        Args:
            steps: All steps of this learner on record; without them only those that were looked at count.
        """
        sampled_steps = tuple(self.sampled_steps)
        sound = [sample for sample in sampled_steps if math.isfinite(sample.largest)]
        record = RecordedSteps(self._half)
        limits = overflow_limits(sampled_steps, record.passing(steps), self._half)
        found = Forecast(
            sampled_steps=sampled_steps,
            steps=limits.total(),
            epochs=record.epochs,
            smallest_seen=self._smallest_seen,
            at_smallest=self._at_smallest,
            unusable=self._unusable,
            largest=max(sound, key=lambda sample: sample.largest, default=None),
            evidence=find_evidence(sampled_steps, record),
        )
        if found.largest is None or found.largest.largest == 0:
            return found
        scales = self._scales(limits)
        lowest = next((each.exponent for each in scales if not each.starved), None)
        highest = min(min(limits) - 1, EXPONENTS[-1])
        if highest < 0:
            return replace(found, scales=scales, lowest=lowest)
        found = replace(found, scales=scales, lowest=lowest, highest=highest)
        if len(sound) < 2 or 0 < record.steps < FEWEST:
            return replace(found, too_few=True)
        if found.has_range and found.top is not None and lowest is not None:
            return replace(found, recommended=max(min(found.top, min(limits) - 1 - MARGIN), lowest))
        return replace(found, recommended=found.top) if _is_settled(found) else replace(found, too_few=True)

    def _scales(self, limits: Counter[int]) -> tuple[ScaleForecast, ...]:
        modules = {name: ExponentTails(counts) for name, counts in self.activations.items()}
        parameters = {name: ExponentTails(counts) for name, counts in self.weights.items()}
        together, all_weights = (
            ExponentTails(merged(self.activations.values())),
            ExponentTails(merged(self.weights.values())),
        )
        sound, steps = [sample for sample in self.sampled_steps if sample.taken], limits.total()
        found = []
        for exponent in EXPONENTS:
            below, subnormal, normal = (place - exponent for place in (TINIEST - 1, TINIEST, NORMAL))
            taken = max((sample.taken[exponent] for sample in sound), key=_share, default=WorstTensor())
            found.append(
                ScaleForecast(
                    exponent=exponent,
                    lost=together.share_below(below),
                    worst_lost=_worst_lost(modules, below),
                    zeros=together.zeros_below(below),
                    subnormal=together.share_below(normal) - together.share_below(subnormal),
                    taken=taken,
                    starved=sum(sample.taken[exponent].share > MOST_TAKEN for sample in sound),
                    weights_lost=all_weights.share_below(below),
                    worst_weights_lost=_worst_lost(parameters, below),
                    overflowing=sum(sample.overflows(exponent) for sample in self.sampled_steps),
                    overflow_share=sum(n for limit, n in limits.items() if limit <= exponent) / max(steps, 1),
                )
            )
        return tuple(found)


def _is_settled(found: Forecast) -> bool:
    """True where more looks that vary as these do would move what is sure by one doubling at most."""
    sure, most = found.evidence.sure, found.evidence.with_more
    if most is None or found.highest is None:
        return False
    return most < 0 or (sure is not None and sure >= min(most, found.highest) - 1)


def _plain(counts: ExponentCounts, loss_scale: float, half: bool) -> ExponentCounts:
    """Without the scale; FP16 numbers so that those which become 2^-25 count as lost."""
    return unscaled(ties_below(counts) if half else counts, loss_scale)


def _merge_into(known: dict[str, ExponentCounts], found: Mapping[str, ExponentCounts]) -> None:
    for name, counts in found.items():
        known[name] = merged([known[name], counts]) if name in known else counts


def _taken(modules: Mapping[str, ExponentCounts], step: int) -> tuple[WorstTensor, ...]:
    """By exponent: the module that loses the largest share of the magnitude of its gradient."""
    tails = {name: ExponentTails(counts) for name, counts in modules.items() if nonzero(counts)}
    return tuple(
        max(
            (WorstTensor(tail.magnitude_below(TINIEST - 1 - exponent), name, step) for name, tail in tails.items()),
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
