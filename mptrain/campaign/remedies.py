"""What would mend a step, from the least intrusion on: each candidate is tried on that very step.

backward    a lower loss scale; then modules kept in FP32; then bfloat16
forward     modules kept in FP32; then bfloat16; then FP32
loss        bfloat16; then FP32
input       the same step without the samples that are not finite
none        for values lost to underflow: modules kept in FP32; for gradients: a higher scale

A lower learning rate is advised only where FP32 itself is not finite with these weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mptrain.config.build import build
from mptrain.config.compose import reload
from mptrain.diagnostics.findings import Cause, cause_of, first_break
from mptrain.diagnostics.remarkable import small_gradients, underflows
from mptrain.diagnostics.trail import LOSS
from mptrain.engine.revisit import look, stand_at
from mptrain.errors import ConfigError, EnvironmentRefused
from mptrain.numerics.exponents import lost_share, merged
from mptrain.numerics.formats import FLOAT16, FLOAT32, scale_in_words
from mptrain.precision.apply import set_products
from mptrain.runlog.diagnosis import Remedy

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.dataset.batch import Batch
    from mptrain.diagnostics.observation import Observation
    from mptrain.engine.job import Parts
    from mptrain.engine.revisit import Moment
    from mptrain.records import ExponentCounts
    from mptrain.scaler.base import Scaler

#: A scale at which more of the gradients than this are rounded to zero is no remedy.
LOSES = 0.1

#: Modules that are kept in FP32 at most before another precision is the simpler remedy.
MOST_KEPT = 6

#: What is still wrong with a step, as far as a remedy is concerned: a module, or None where nothing is.
Complaint = Callable[["Observation"], str | None]


@dataclass(frozen=True)
class Case:
    """A step that something is wrong with.

    Attributes:
        config: It was done under.
        parts: Built from that, and brought to the moment.
        moment: The step.
        seen: What was seen of it.
        cause: What is wrong.
    """

    config: Config
    parts: Parts
    moment: Moment
    seen: Observation
    cause: Cause

    def again(self, *words: str) -> Observation:
        """The same step under other words.

        Raises:
            EnvironmentRefused: This device cannot do that.
            ConfigError: The words do not fit the configuration.
        """
        parts, _ = build(reload(self.config.yaml, words), weights=False)
        stand_at(parts, self.moment)
        scales = None
        if any(word.startswith("precision=") for word in words):  # which brings its own scaler
            scales = {learner.name: float(learner.scale) for learner in parts.learners}
        return _of(look(parts, self.moment, scales), self.seen.learner)

    def at_scale(self, scale: float) -> Observation:
        """The same step at another loss scale."""
        set_products(
            self.config.precision
        )  # what was built in between may have chosen otherwise, for the whole process
        scales = {**self.moment.scales, self.seen.learner: scale}
        return _of(look(self.parts, self.moment, scales), self.seen.learner)

    @property
    def scaler(self) -> Scaler:
        """That of the learner whose step it is."""
        return next(learner.scaler for learner in self.parts.learners if learner.name == self.seen.learner)


def remedies(case: Case) -> tuple[Remedy, ...]:
    """What was tried, in order, up to the first that helped; nothing where nothing is wrong."""
    match case.cause.kind:
        case "input":
            return tuple(_without_samples(case))
        case "backward":
            found = list(_for_gradients(case))
        case "forward" | "refused":
            found = list(_until_it_helps(_keeping(case, case.cause.module, _breaks), _other_precisions(case, _breaks)))
        case "loss":
            found = list(_until_it_helps(_other_precisions(case, _breaks)))
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
        yield from _until_it_helps(_keeping(case, hidden.module, _breaks), _other_precisions(case, _breaks))
    elif found := underflows(case.seen):
        yield from _until_it_helps(_keeping(case, found[0].module, _underflows), _other_precisions(case, _underflows))
    elif (small := small_gradients(case.seen)) is not None:
        yield _higher_scale(case, *small)


def _for_gradients(case: Case) -> Iterator[Remedy]:
    """For a step of which only gradients overflow."""
    words = _in_fp32(case)
    exact = case.again(*words) if words else case.at_scale(1.0)
    if not exact.finite:
        yield from _blown_up(exact)
        return
    gradients = merged(_half_gradients(case.seen, exact))
    exponent = math.floor(math.log2(FLOAT16.max / gradients.largest)) if gradients.largest else 0
    scale = 2.0**exponent
    if scale < case.seen.loss_scale and scale >= FLOAT32.smallest_normal:
        remedy = _lower_scale(case, scale, lost_share(gradients, exponent))
        yield remedy
        if remedy.helped:
            return
    yield from _until_it_helps(_keeping(case, case.cause.module, _breaks), _other_precisions(case, _breaks))


def _half_gradients(seen: Observation, exact: Observation) -> Iterator[ExponentCounts]:
    """What FP16 gradients are without its limits: the results in FP32 of those operators whose results were FP16."""
    half = {
        (operation.module, operation.operator, place)
        for operation in seen.of("backward")
        for place, counts in enumerate(operation.outputs)
        if counts.dtype == "float16"
    }
    for operation in exact.of("backward"):
        for place, counts in enumerate(operation.outputs):
            if (operation.module, operation.operator, place) in half:
                yield counts


def _lower_scale(case: Case, scale: float, lost: float) -> Remedy:
    seen, shown = case.at_scale(scale), scale_in_words(scale)
    words, text = _scale_words(case, scale), f"a loss scale of {shown}"
    if not seen.finite:
        return Remedy(words, text, False, f"at loss scale {shown} the step still overflows")
    cost = f"{100 * lost:.2g} % of the nonzero gradients are rounded to zero"
    if scale < 1:
        return Remedy(
            words, text, False, "finite on this batch, but gradients that need a scale below 1 are too large for FP16"
        )
    if lost > LOSES:
        return Remedy(words, text, False, f"finite on this batch, but {cost} there")
    if not words:
        text = f"nothing is needed: the scaler comes down to {shown} by itself"
    return Remedy(words, text, True, f"finite on this batch at {shown}; {cost}")


def _higher_scale(case: Case, share: float, room: float) -> Remedy:
    """For gradients that are small for FP16.

    Args:
        case: The step.
        share: Which part of them is below 2^-14.
        room: What the scale can be multiplied by.
    """
    scale = case.seen.loss_scale * room
    seen, shown = case.at_scale(scale), scale_in_words(scale)
    key = "scale" if hasattr(case.scaler, "scale") else "init_scale" if hasattr(case.scaler, "init_scale") else ""
    words = (f"scaler.{key}={int(scale)}",) if key else ("scaler=static", f"scaler.scale={int(scale)}")
    small = small_gradients(seen)
    helped = seen.finite and (small is None or small[0] < share / 2)
    outcome = "finite on this batch, and few gradients are below 2^-14" if helped else cause_of(seen).sentence
    return Remedy(words, f"a loss scale of {shown}", helped, outcome)


def _scale_words(case: Case, scale: float) -> tuple[str, ...]:
    """How to write a lower scale for the scaler in force; nothing where it gets there by itself."""
    own = case.seen.learner in case.config.learners
    prefix = f"learners.{case.seen.learner}.scaler" if own else "scaler"
    value = int(scale) if scale == int(scale) else scale
    if hasattr(case.scaler, "scale"):
        return (f"{prefix}.scale={value}",)
    if case.scaler.floor <= scale and case.scaler.floor < case.seen.loss_scale:
        return ()
    if hasattr(case.scaler, "min_scale"):
        return (f"{prefix}.min_scale={value}",)
    return ("scaler=static", f"scaler.scale={value}")


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
        module = complaint(seen)
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
    size, name = seen.largest_weight
    yield Remedy(
        (),
        "a lower optimizer.lr or train.clip_norm, from an earlier checkpoint",
        None,
        f"even FP32 is not finite with these weights, the largest of which is {size:.3g} in {name}: {cause.sentence}",
    )


def _without_samples(case: Case) -> Iterator[Remedy]:
    bad = {place for one in case.seen.inputs for place in one.samples}
    good = [place for place in range(case.seen.samples) if place not in bad]
    text = "clean data, or dataset.on_error=skip where the data set can tell"
    if any(one.widely_finite for one in case.seen.inputs):
        yield from _until_it_helps(_other_precisions(case, _breaks))
        return
    if not good:
        yield Remedy((), text, None, "no sample of the batch is finite")
        return
    moment = replace(case.moment, batch=_chosen(case.moment.batch, good))
    seen = _of(look(case.parts, moment), case.seen.learner)
    without = f"without the {len(bad)} samples" if len(bad) > 1 else "without the one sample"
    outcome = f"{without} the step is {'finite' if seen.finite else 'not finite either: ' + cause_of(seen).sentence}"
    yield Remedy((), text, seen.finite, outcome)


def _tried(case: Case, words: tuple[str, ...], text: str, complaint: Complaint) -> tuple[Remedy, Observation | None]:
    try:
        seen = case.again(*words)
    except (EnvironmentRefused, ConfigError) as error:
        return Remedy(words, text, None, f"not tried: {error}"), None
    if complaint(seen) is None:
        return Remedy(
            words, text, True, "finite on this batch" if complaint is _breaks else "not lost on this batch"
        ), seen
    what = cause_of(seen).sentence
    if complaint is _underflows:
        what = f"values of {complaint(seen)} are lost"
    elif what == case.cause.sentence:
        what = "the same happens"
    return Remedy(words, text, False, what), seen


def _breaks(seen: Observation) -> str | None:
    """Where values stop being finite."""
    cause = cause_of(seen)
    if cause.kind != "none":
        return cause.module if cause.module is not None else ""
    hidden = first_break(seen, "forward")
    return hidden.module if hidden is not None else None


def _underflows(seen: Observation) -> str | None:
    """Where values are lost to underflow."""
    found = underflows(seen)
    return found[0].module if found else _breaks(seen)


def _until_it_helps(*several: Iterator[Remedy]) -> Iterator[Remedy]:
    for remedies_of_a_kind in several:
        for remedy in remedies_of_a_kind:
            yield remedy
            if remedy.helped:
                return


def _in_fp32(case: Case) -> tuple[str, ...]:
    return ("precision=fp32",) if case.config.precision.half else ()


def _of(seen: tuple[Observation, ...], learner: str) -> Observation:
    return next(one for one in seen if one.learner == learner)


def _chosen(batch: Batch, places: list[int]) -> Batch:
    index = torch.tensor(places, device=batch.inputs.device)
    counts = None if batch.counts is None else tuple(batch.counts[place] for place in places)
    more = {name: tensor[index] for name, tensor in batch.more.items()}
    return replace(batch, inputs=batch.inputs[index], targets=batch.targets[index], counts=counts, more=more)
