"""What would mend a step, from the least intrusion on: each candidate is tried on that very step.

backward    a lower loss scale; then modules kept in FP32; then bfloat16
forward     modules kept in FP32; then bfloat16; then FP32
loss        bfloat16; then FP32
input       the same step without the samples that are not finite
none        for values lost to underflow: modules kept in FP32; for gradients: a higher scale

A lower learning rate is advised only where FP32 itself is not finite because weights or operands are large.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mptrain.campaign.case import Case, of_learner
from mptrain.campaign.scale_remedies import higher_scale, lower_scale
from mptrain.diagnostics.findings import cause_of, first_break, named, place
from mptrain.diagnostics.remarkable import small_gradients, underflows
from mptrain.diagnostics.trail import LOSS
from mptrain.engine.revisit import look
from mptrain.errors import ConfigError, EnvironmentRefused
from mptrain.numerics.exponents import merged
from mptrain.numerics.formats import FLOAT16
from mptrain.runlog.diagnosis import Remedy

if TYPE_CHECKING:
    from mptrain.dataset.batch import Batch
    from mptrain.diagnostics.findings import Cause
    from mptrain.diagnostics.observation import Observation
    from mptrain.records import ExponentCounts

#: Modules that are kept in FP32 at most before another precision is the simpler remedy.
MOST_KEPT = 6

#: Weights, or operands of what breaks, are large from here on: FP16 could not hold them.
LARGE = FLOAT16.max


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a step, as far as a remedy is concerned: values that are not finite, and perhaps lost ones.

    Attributes:
        underflow: Values lost to underflow count too.
        exact: The step in FP32, for what is lost there as well.
    """

    underflow: bool = False
    exact: Observation | None = None

    def about(self, seen: Observation) -> str | None:
        """The module in which a step is wrong; None where it is in order."""
        if self.underflow and (lost := underflows(seen, self.exact)):
            return lost[0].module
        cause = cause_of(seen)
        if cause.kind != "none":
            return cause.module if cause.module is not None else ""
        hidden = first_break(seen, "forward")
        return hidden.module if hidden is not None else None


_BREAKS = Complaint()


def in_order(seen: Observation) -> bool:
    """Whether nothing in a step is infinite or no number, hidden sums included."""
    return _BREAKS.about(seen) is None


def remedies(case: Case) -> tuple[Remedy, ...]:
    """What was tried, in order, up to the first that helped; nothing where nothing is wrong."""
    match case.cause.kind:
        case "input":
            return tuple(_without_samples(case))
        case "backward":
            found = list(_for_gradients(case))
        case "forward" | "refused":
            found = list(_until_it_helps(_keeping(case, case.cause.module, _BREAKS), _other_precisions(case, _BREAKS)))
        case "loss":
            found = list(_until_it_helps(_other_precisions(case, _BREAKS)))
        case "weights":
            return (_EARLIER,)
        case _:
            found = list(_for_values(case))
    return tuple(found)


_EARLIER = Remedy(
    (),
    "resume from an earlier checkpoint, with scaler.on_overflow=skip",
    None,
    "no precision mends weights that are lost",
)


def _for_values(case: Case) -> Iterator[Remedy]:
    """For a step that is finite and loses values all the same: to an infinite sum that nothing shows, or to underflow."""
    hidden = first_break(case.seen, "forward")
    if hidden is not None:
        yield from _until_it_helps(_keeping(case, hidden.module, _BREAKS), _other_precisions(case, _BREAKS))
    elif case.lost:
        lost = Complaint(underflow=True, exact=case.exact)
        yield from _until_it_helps(_keeping(case, case.lost[0].module, lost), _other_precisions(case, lost))
    elif (small := small_gradients(case.seen)) is not None:
        yield higher_scale(case, *small)


def _for_gradients(case: Case) -> Iterator[Remedy]:
    """For a step of which only gradients overflow."""
    exact = case.exact
    if exact is not None and not exact.finite:
        yield from _blown_up(exact)
        return
    lower = lower_scale(case, merged(_half_gradients(case.seen, exact))) if exact is not None else None
    if lower is not None:
        yield lower
        if lower.helped:
            return
    yield from _until_it_helps(_keeping(case, case.cause.module, _BREAKS), _other_precisions(case, _BREAKS))


def _half_gradients(seen: Observation, exact: Observation) -> Iterator[ExponentCounts]:
    """What FP16 gradients are without its limits: the results in FP32 of those operators whose results were FP16."""
    half = {
        (operation.module, operation.operator, at)
        for operation in seen.of("backward")
        for at, counts in enumerate(operation.outputs)
        if counts.dtype == "float16"
    }
    for operation in exact.of("backward"):
        for at, counts in enumerate(operation.outputs):
            if (operation.module, operation.operator, at) in half:
                yield counts


def _keeping(case: Case, module: str | None, complaint: Complaint) -> Iterator[Remedy]:
    """Keep the offending module in FP32; then those that offend next, or what is around them, one by one."""
    if not case.config.precision.half:
        return
    kept: list[str] = []
    remedy: Remedy | None = None
    while module not in (None, LOSS, "") and len(kept) < MOST_KEPT:
        kept = _grown(kept, module, case.parts.kept)
        if not kept:
            break
        word = f"precision.keep_fp32=[{','.join([*case.config.precision.keep_fp32, *kept])}]"
        remedy, seen = _tried(case, (word,), f"keep {', '.join(kept)} in FP32", complaint)
        if remedy.helped or seen is None:
            break
        module = complaint.about(seen)
    if remedy is not None:
        yield remedy


def _grown(kept: list[str], module: str, before: Collection[str]) -> list[str]:
    """The list with one more module; one that is kept already gives way to what is around it.

    A kept module answers in the dtype it was given, so what it computes must fit there; within a kept module it need not.

    Args:
        kept: Modules so far.
        module: Where values are lost now.
        before: Modules that were kept to begin with.
    """
    while module in before or any(f"{module}.".startswith(f"{name}.") for name in kept):
        module = module.rpartition(".")[0]
        if not module:
            return []
        kept = [name for name in kept if not name.startswith(f"{module}.")]
    return [*kept, module]


def _other_precisions(case: Case, complaint: Complaint) -> Iterator[Remedy]:
    policy = case.config.precision
    if policy.half and policy.compute == "float16":
        name = "amp_bf16" if policy.autocast else "bf16"
        yield _tried(case, (f"precision={name}",), "bfloat16, with the range of FP32", complaint)[0]
    if policy.half:
        remedy, seen = _tried(case, ("precision=fp32",), "FP32", complaint)
        yield remedy
        if seen is not None and not remedy.helped:
            yield from _blown_up(seen)
    else:
        yield from _blown_up(case.seen)


def _blown_up(seen: Observation) -> Iterator[Remedy]:
    """What is left where FP32 itself is not finite."""
    cause = cause_of(seen)
    if cause.kind in ("none", "refused"):
        return
    if cause.kind == "loss":
        outcome = "FP32 gives the same: neither a precision nor a scale mends a loss that is not finite by its formula"
        yield Remedy((), "another formula for the loss", None, outcome)
        return
    yield _large(seen, cause) or _same_in_fp32(seen, cause)


def _large(seen: Observation, cause: Cause) -> Remedy | None:
    """A lower learning rate, where large weights or operands speak for it."""
    size, name = seen.largest_weight
    broken = first_break(seen, cause.phase)
    if size >= LARGE:
        evidence = f"weights reach {size:.3g} in {name}"
    elif broken is not None and broken.largest_input >= LARGE and any(counts.inf for counts in broken.outputs):
        evidence = f"what goes into {named(broken)} reaches {broken.largest_input:.3g}"
    else:
        return None
    text = "a lower optimizer.lr or train.clip_norm, from an earlier checkpoint"
    return Remedy((), text, None, f"even FP32 is not finite, where {evidence}: {cause.sentence}")


def _same_in_fp32(seen: Observation, cause: Cause) -> Remedy:
    """Where nothing is large, it is the arithmetic itself."""
    broken = first_break(seen, cause.phase)
    where = place(seen, cause.module or "")
    text = f"look at {named(broken)} in {where}" if broken is not None else f"look at {where}"
    size, name = seen.largest_weight
    outcome = f"FP32 gives the same, and no weight is large (up to {size:.3g} in {name}): {cause.sentence}"
    return Remedy((), text, None, outcome)


def _without_samples(case: Case) -> Iterator[Remedy]:
    bad = {place for one in case.seen.inputs for place in one.samples}
    good = [place for place in range(case.seen.samples) if place not in bad]
    text = "clean data, or dataset.on_error=skip where the data set can tell"
    if any(one.widely_finite for one in case.seen.inputs):
        yield from _until_it_helps(_other_precisions(case, _BREAKS))
        return
    if not good:
        yield Remedy((), text, None, "no sample of the batch is finite")
        return
    moment = replace(case.moment, batch=_chosen(case.moment.batch, good))
    seen = of_learner(look(case.parts, moment), case.seen.learner)
    without = f"without the {len(bad)} samples" if len(bad) > 1 else "without the one sample"
    outcome = f"{without} the step is {'finite' if seen.finite else 'not finite either: ' + cause_of(seen).sentence}"
    yield Remedy((), text, seen.finite, outcome)


def _tried(case: Case, words: tuple[str, ...], text: str, complaint: Complaint) -> tuple[Remedy, Observation | None]:
    try:
        seen = case.again(*words)
    except (EnvironmentRefused, ConfigError) as error:
        return Remedy(words, text, None, f"not tried: {error}"), None
    if complaint.about(seen) is None:
        return Remedy(
            words, text, True, "not lost on this batch" if complaint.underflow else "finite on this batch"
        ), seen
    what = cause_of(seen).sentence
    if complaint.underflow:
        what = f"values of {complaint.about(seen)} are lost"
    elif what == case.cause.sentence:
        what = "the same happens"
    return Remedy(words, text, False, what), seen


def _until_it_helps(*several: Iterator[Remedy]) -> Iterator[Remedy]:
    for remedies_of_a_kind in several:
        for remedy in remedies_of_a_kind:
            yield remedy
            if remedy.helped:
                return


def _chosen(batch: Batch, places: list[int]) -> Batch:
    index = torch.tensor(places, device=batch.inputs.device)
    counts = None if batch.counts is None else tuple(batch.counts[place] for place in places)
    more = {name: tensor[index] for name, tensor in batch.more.items()}
    return replace(batch, inputs=batch.inputs[index], targets=batch.targets[index], counts=counts, more=more)
