"""From the histograms of one run: which static loss scales are right for it, and what every other one would cost.

Nothing here imports torch, and nothing is tuned to a workload. The rule, from what FP16 does (Micikevicius et al. 2018,
section 3.2: scales from 8 to 32 K worked, and any is right as long as nothing overflows and nothing that matters is lost):

- *The upper edge.* A scale overflows a step where the largest gradient times the scale is 65520 or more. That is known of
  the steps that were looked at. For each step between them the largest gradient follows from the norm of all gradients,
  which is on record of every step, and from the looks before and after (`mptrain.numerics.looked_at`).
  The upper edge is the largest power of two at which no step overflows.
- *What is sure.* An edge that one look shows says nothing of the next step. So a scale counts as usable only where less
  than 1 % of the steps overflow with 95 % confidence, by one of two kinds of evidence (`mptrain.numerics.confidence`). The
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
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final, NamedTuple

from mptrain.numerics.confidence import FEWEST, MOST, largest_share, limit_factor, tolerance_factor
from mptrain.numerics.exponents import (
    INFINITE_FROM,
    NORMAL,
    TINIEST,
    Tails,
    merged,
    nonzero,
    ties_below,
    total,
    unscaled,
)
from mptrain.numerics.looked_at import Anchor, anchor, between, gradients_of, largest_of
from mptrain.records import ExponentCounts, HistogramRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Exponents of the scales that are foretold: 1 to 2^24, apex's highest.
EXPONENTS: Final = range(25)

#: The share of a module's gradient, by magnitude, that rounding to zero may take: what rounding to two bits after the
#: leading one takes on average (a quarter of their distance, 2^-4, of 1.5). Networks train with gradients of so few bits as
#: with FP16 ones (E5M2 in Micikevicius et al., *FP8 Formats for Deep Learning*, 2022).
MOST_TAKEN: Final = 1 / 24

#: Doublings between the recommended scale and the largest that overflows at no step.
MARGIN: Final = 2


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst of several tensors: its share and its name, and the step where it was so (0: over all steps)."""

    share: float = 0.0
    name: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class AtScale:
    """What one scale would do.

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
    worst_lost: Worst
    zeros: float
    subnormal: float
    taken: Worst
    starved: int
    weights_lost: float
    worst_weights_lost: Worst
    overflowing: int
    overflow_share: float


@dataclass(frozen=True, slots=True)
class Look:
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
    taken: tuple[Worst, ...]

    def overflows(self, exponent: int) -> bool:
        """Whether something of this step overflows at 2^exponent; one that did at its own scale does from there on."""
        if math.isinf(self.largest):
            return 2.0**exponent >= self.loss_scale
        return self.largest * 2.0**exponent >= INFINITE_FROM


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that a scale overflows at less than 1 % of the steps, with 95 % confidence.

    Attributes:
        by_looks: Exponent of the largest scale for which the looks make it sure; None where they do for none from 1 on.
        by_record: The same of steps that FP16 computed without overflow.
        with_more: What ``by_looks`` would become for ever more looks that vary as these do, also below 0; None where it
            is not known.
        spread: Standard deviation of log2 of the largest gradient over the looks: doublings; 0 for one look.
        recorded: Steps on record.
        held: How many of them are known not to overflow at the scale of ``by_record``.
    """

    by_looks: int | None = None
    by_record: int | None = None
    with_more: int | None = None
    spread: float = 0.0
    recorded: int = 0
    held: int = 0

    @property
    def sure(self) -> int | None:
        """The larger of the two."""
        return max((each for each in (self.by_looks, self.by_record) if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the histograms of one learner say.

    Attributes:
        looks: The steps that were looked at.
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

    looks: tuple[Look, ...]
    steps: int
    epochs: int
    smallest_seen: float
    at_smallest: float
    unusable: int
    largest: Look | None = None
    scales: tuple[AtScale, ...] = ()
    lowest: int | None = None
    highest: int | None = None
    evidence: Evidence = Evidence()
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
        looks: Those taken in.
        activations: By module: its gradients without the scale, over all looks that did not overflow, ties as in `ties_below`.
        weights: The same by parameter.
        together: The gradients of all modules without the scale, as they were.
    """

    looks: list[Look] = field(default_factory=list)
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
        if record.overflow or any(counts.inf or counts.nan for counts in gradients.named.values()):
            self.looks.append(Look(record.step, loss_scale, math.inf, _first_lost(gradients.named), ()))
            return
        self._half = self._half or gradients.half
        self._look_for_an_edge(gradients.modules, loss_scale)
        modules, parameters = (
            {name: _plain(counts, loss_scale, gradients.half) for name, counts in named.items()}
            for named in (gradients.modules, gradients.parameters)
        )
        seen = merged(unscaled(counts, loss_scale) for counts in gradients.modules.values())
        self.together = merged([self.together, seen]) if self.activations else seen
        _merge_into(self.activations, modules)
        _merge_into(self.weights, parameters)
        largest = largest_of(gradients, loss_scale)
        self.looks.append(Look(record.step, loss_scale, largest.value, largest.where, _taken(modules, record.step)))

    def forecast(self, steps: Iterable[StepRecord] = ()) -> Forecast:
        """What follows.

        Args:
            steps: All steps of this learner on record; without them only those that were looked at count.
        """
        looks = tuple(self.looks)
        sound = [look for look in looks if math.isfinite(look.largest)]
        record = _Record(self._half)
        limits = _limits(looks, record.passing(steps), self._half)
        found = Forecast(
            looks=looks,
            steps=limits.total(),
            epochs=record.epochs,
            smallest_seen=self._smallest_seen,
            at_smallest=self._at_smallest,
            unusable=self._unusable,
            largest=max(sound, key=lambda look: look.largest, default=None),
            evidence=_evidence(looks, record),
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

    def _scales(self, limits: Counter[int]) -> tuple[AtScale, ...]:
        modules = {name: Tails(counts) for name, counts in self.activations.items()}
        parameters = {name: Tails(counts) for name, counts in self.weights.items()}
        together, all_weights = Tails(merged(self.activations.values())), Tails(merged(self.weights.values()))
        sound, steps = [look for look in self.looks if look.taken], limits.total()
        found = []
        for exponent in EXPONENTS:
            below, subnormal, normal = (place - exponent for place in (TINIEST - 1, TINIEST, NORMAL))
            taken = max((look.taken[exponent] for look in sound), key=_share, default=Worst())
            found.append(
                AtScale(
                    exponent=exponent,
                    lost=together.share_below(below),
                    worst_lost=_worst_lost(modules, below),
                    zeros=together.zeros_below(below),
                    subnormal=together.share_below(normal) - together.share_below(subnormal),
                    taken=taken,
                    starved=sum(look.taken[exponent].share > MOST_TAKEN for look in sound),
                    weights_lost=all_weights.share_below(below),
                    worst_weights_lost=_worst_lost(parameters, below),
                    overflowing=sum(look.overflows(exponent) for look in self.looks),
                    overflow_share=sum(n for limit, n in limits.items() if limit <= exponent) / max(steps, 1),
                )
            )
        return tuple(found)

    def _look_for_an_edge(self, modules: Mapping[str, ExponentCounts], loss_scale: float) -> None:
        """Notes where FP16 has cut gradients off: many of them are its smallest number."""
        halves = [counts for counts in modules.values() if counts.dtype == "float16"]
        if halves:
            self._smallest_seen = max(self._smallest_seen, 2.0**TINIEST / loss_scale)
            shares = [Tails(counts).share_below(TINIEST + 1) for counts in halves]
            self._at_smallest = max(self._at_smallest, *shares)


def _is_settled(found: Forecast) -> bool:
    """True where more looks that vary as these do would move what is sure by one doubling at most."""
    sure, most = found.evidence.sure, found.evidence.with_more
    if most is None or found.highest is None:
        return False
    return most < 0 or (sure is not None and sure >= min(most, found.highest) - 1)


def _plain(counts: ExponentCounts, loss_scale: float, half: bool) -> ExponentCounts:
    """Without the scale; FP16 numbers so that those which become 2^-25 count as lost."""
    return unscaled(ties_below(counts) if half else counts, loss_scale)


def _first_lost(gradients: Mapping[str, ExponentCounts]) -> str:
    return next((name for name, counts in gradients.items() if counts.inf or counts.nan), "")


def _merge_into(known: dict[str, ExponentCounts], found: Mapping[str, ExponentCounts]) -> None:
    for name, counts in found.items():
        known[name] = merged([known[name], counts]) if name in known else counts


def _taken(modules: Mapping[str, ExponentCounts], step: int) -> tuple[Worst, ...]:
    """By exponent: the module that loses the largest share of the magnitude of its gradient."""
    tails = {name: Tails(counts) for name, counts in modules.items() if nonzero(counts)}
    return tuple(
        max(
            (Worst(tail.magnitude_below(TINIEST - 1 - exponent), name, step) for name, tail in tails.items()),
            key=_share,
            default=Worst(),
        )
        for exponent in EXPONENTS
    )


def _worst_lost(named: Mapping[str, Tails], below: int) -> Worst:
    return max((Worst(tails.share_below(below), name) for name, tails in named.items()), key=_share, default=Worst())


def _share(worst: Worst) -> float:
    return worst.share


def _first_overflowing(largest: float) -> int:
    """The smallest exponent of a scale at which a gradient overflows."""
    exponent = math.ceil(math.log2(INFINITE_FROM) - math.log2(largest))
    return exponent - 1 if largest * 2.0 ** (exponent - 1) >= INFINITE_FROM else exponent


#: log2 of the first magnitude that FP16 cannot hold.
_END: Final = math.log2(INFINITE_FROM)

#: Of a step without any gradient.
_NEVER: Final = 1 << 16


def _limit_of(look: Look) -> int:
    """The smallest exponent at which a step that was looked at overflows."""
    if math.isinf(look.largest):
        return math.ceil(math.log2(look.loss_scale))
    return _first_overflowing(look.largest) if look.largest else _NEVER


class _Record:
    """Counts steps as they pass: those that FP16 computed without overflow, by the exponent of their scale.

    Args:
        half: Whether they were computed in FP16.
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


def _evidence(looks: Sequence[Look], record: _Record) -> Evidence:
    """Return what looks and record make sure of overflows."""
    proven = record.proves()
    found = Evidence(by_record=proven, recorded=record.steps, held=record.held_at(proven or 0))
    edges = _edges(looks)
    if len(edges) < 2:
        return found
    middle, spread = fmean(edges), stdev(edges)
    by_looks, with_more = (_below(middle - k * spread) for k in (tolerance_factor(len(edges)), limit_factor()))
    return replace(found, by_looks=by_looks if by_looks >= 0 else None, with_more=with_more, spread=spread)


def _below(edge: float) -> int:
    """The exponent of the largest scale below an edge, at most the last of `EXPONENTS`; it may be negative."""
    return min(math.ceil(edge) - 1, EXPONENTS[-1])


def _edges(looks: Sequence[Look]) -> list[float]:
    """log2 of the scale at which each look overflows.

    Of a look that overflowed it is interpolated between its neighbours, and at most that of its own scale. Where more than
    half of them did, the others are too few and the smallest: then there is none.
    """
    sound = [Anchor(look.step, math.log2(look.largest), 0.0) for look in looks if 0 < look.largest < math.inf]
    overflowed = [look for look in looks if math.isinf(look.largest)]
    if len(sound) < len(overflowed):
        return []
    edges = [_END - one.largest for one in sound]
    for look in overflowed:
        at = bisect_left(sound, look.step, key=lambda one: one.step)
        before, after = (sound[min(max(place, 0), len(sound) - 1)] for place in (at - 1, at))
        largest = between(before, after, look.step, math.inf)
        edges.append(min(_END - math.log2(largest), math.log2(look.loss_scale)))
    return edges


def _limits(looks: Sequence[Look], steps: Iterable[StepRecord], half: bool) -> Counter[int]:
    """How many steps begin to overflow at which exponent; steps whose loss is not finite are no matter of the scale.

    Args:
        looks: Those of a learner.
        steps: Its steps, in order.
        half: Whether they were computed in FP16: then one that was clean at its scale is so below it.
    """
    left = {look.step: look for look in looks}
    found: Counter[int] = Counter()
    waiting: list[_Between] = []
    before: Anchor | None = None
    for step in steps:
        look = left.pop(step.step, None)
        after = anchor(step.step, look.largest, step.grad_norm) if look and not step.overflow else None
        if look and after:
            found.update(_between(before or after, after, waiting))
            found[_limit_of(look)] += 1
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
    found.update(_limit_of(look) for look in left.values())
    return found


class _Between(NamedTuple):
    """A step that was not looked at: its norm, the least exponent at which it may overflow, the one at which it did."""

    step: int
    norm: float
    least: int
    overflowed: int


def _between(before: Anchor, after: Anchor, steps: Iterable[_Between]) -> Iterator[int]:
    """The smallest exponents at which steps between two looks overflow, by the norms of their gradients."""
    for one in steps:
        found = _first_overflowing(between(before, after, one.step, one.norm))
        yield min(max(found, one.least), one.overflowed)
