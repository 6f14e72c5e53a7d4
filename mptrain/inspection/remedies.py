"""Find what fixes a step, from the least intrusion on: each candidate is tried on that very step.

backward    a lower or a higher loss scale; then modules kept in FP32; then bfloat16
forward     modules kept in FP32; then bfloat16; then FP32
loss        bfloat16; then FP32
input       the same step without the samples that are not finite
none        for values lost to underflow: modules kept in FP32; for gradients: a higher scale

A candidate helps only where nothing at all is wrong with the step under it (`DiagnosisCase.is_sound`): it is finite, and what its modules say and
its gradients agree with the same step in FP32. Modules kept in FP32 may need another loss scale as well, which is tried with them.

A lower learning rate is advised only where FP32 itself is not finite because weights or operands are large.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from mptrain.errors import ConfigError, EnvironmentRefused
from mptrain.inspection.diagnosis_case import DiagnosisCase, observation_of
from mptrain.inspection.findings import describe_module, first_break, first_cause, operator_name
from mptrain.inspection.observations import small_gradients
from mptrain.inspection.scale_remedies import higher_scale, lower_scale, raised_scale
from mptrain.inspection.step_replay import observe_step
from mptrain.numerics.exponents import merged
from mptrain.numerics.formats import FLOAT16
from mptrain.precision.keep_fp32 import kept_modules
from mptrain.probe.module_trail import LOSS, is_inside
from mptrain.probe.observer import Observation
from mptrain.records import ExponentCounts
from mptrain.runlog.diagnosis_file import Remedy
from mptrain.scaler import NoScaler, StaticScaler
from mptrain.workloads.base.batch import Batch

#: Entries of ``precision.keep_fp32`` that are added at most before another precision is the simpler remedy.
MOST_KEPT = 6

#: Steps that are tried at most on the way to those.
MOST_TRIED = 24

#: Weights, or operands of what breaks, are large from here on: FP16 could not hold them.
LARGE = FLOAT16.max


def _offender(case: DiagnosisCase, underflow: bool) -> str | None:
    """Return the module in which a step is wrong; None where it is right.

    Args:
        case: The step.
        underflow: Values lost to underflow count too.
    """
    if not case.is_sound:
        return case.cause.module or ""
    return case.lost[0].module if underflow and case.lost else None


def remedies(case: DiagnosisCase) -> tuple[Remedy, ...]:
    """Return the remedies tried, in order, up to the first that helped; nothing where nothing is wrong."""
    return tuple(_until_it_helps(*_candidates(case)))


def _candidates(case: DiagnosisCase) -> tuple[Iterable[Remedy], ...]:
    """Return what to try on a step, each kind of remedy when its turn comes.

    For a step that is right and has values close to FP16's lower end all the same a scaler that moves its scale needs no other one
    while gradients are exact.
    """
    module, accuracy = case.cause.module, case.accuracy
    match case.cause.kind:
        case "input":
            return (_without_samples(case),)
        case "weights":
            text = "resume from an earlier checkpoint, with scaler.on_overflow=skip"
            return ((Remedy((), text, None, "no precision mends weights that are lost"),),)
        case "backward" | "forward" if case.fp32_fails:
            return (_blown_up(case.exact or case.seen),)
        case "backward" if accuracy is None or not accuracy.disproportionate:
            another = _another_scale(case)
            return (() if another is None else (another,), _keeping(case, module), _other_precisions(case))
        case "backward" | "loss":  # what does without a loss scale
            return (_other_precisions(case),)
        case "forward" | "refused":
            lost = any((one.module, one.operator) == (module, case.cause.operator) for one in case.lost)
            return _keeping(case, module, lost), _other_precisions(case, lost)
    if case.underflow_matters:
        return _keeping(case, case.lost[0].module, True), _other_precisions(case, True)
    exact = accuracy is not None and not accuracy.inexact_gradients
    constant = isinstance(case.learner.scaler, (StaticScaler, NoScaler))
    if (small := small_gradients(case.seen)) is not None and (constant or not exact):
        return ((higher_scale(case, *small),),)
    return ()


def _another_scale(case: DiagnosisCase) -> Remedy | None:
    """Another loss scale, for a step of which only gradients are wrong: a lower one where they overflow, else a higher one."""
    if case.exact is None or case.fp32_fails:
        return None
    gradients = _half_gradients(case.seen, case.exact)
    return raised_scale(case, gradients) if case.seen.finite else lower_scale(case, gradients)


def _half_gradients(seen: Observation, exact: Observation) -> ExponentCounts:
    """Count the exponents of FP16 gradients without its limits: the results in FP32 of those operators whose results were FP16."""
    half = {
        (operation.module, operation.operator, at)
        for operation in seen.of("backward")
        for at, counts in enumerate(operation.outputs)
        if counts.dtype == "float16"
    }
    return merged(
        counts
        for operation in exact.of("backward")
        for at, counts in enumerate(operation.outputs)
        if (operation.module, operation.operator, at) in half
    )


def _keeping(case: DiagnosisCase, module: str | None, underflow: bool = False) -> Iterator[Remedy]:
    """Keep the offending module in FP32; then those that offend next, or what is around them, those of one class together."""
    if not case.config.precision.half:
        return
    kept = KeptModules(case.parts.model, case.parts.kept)
    remedy: Remedy | None = None
    for _ in range(MOST_TRIED):
        larger = kept.with_module(module) if module not in (None, LOSS, "") else None
        if larger is None:
            break
        if len(larger.entries) > MOST_KEPT:
            assert remedy is not None
            remedy = replace(remedy, outcome=f"{remedy.outcome}; more than {MOST_KEPT} entries were not tried")
            break
        kept = larger
        word = f"precision.keep_fp32=[{','.join([*case.config.precision.keep_fp32, *kept.entries])}]"
        remedy, tried = _try_remedy(case, (word,), f"keep {', '.join(kept.entries)} in FP32", underflow)
        if remedy.helped or tried is None:
            break
        module = _offender(tried, underflow)
    if remedy is not None:
        yield remedy


def _other_precisions(case: DiagnosisCase, underflow: bool = False) -> Iterator[Remedy]:
    policy = case.config.precision
    if policy.half and policy.compute == "float16":
        name = "amp_bf16" if policy.autocast else "bf16"
        yield _try_remedy(case, (f"precision={name}",), "bfloat16, with the range of FP32", underflow)[0]
    if policy.half:
        remedy, tried = _try_remedy(case, ("precision=fp32",), "FP32", underflow)
        yield remedy
        if tried is not None and not remedy.helped:
            yield from _blown_up(tried.seen)
    else:
        yield from _blown_up(case.seen)


def _blown_up(seen: Observation) -> Iterator[Remedy]:
    """The advice that is left where FP32 itself is not finite."""
    cause = first_cause(seen)
    if seen.finite or cause.kind == "refused":
        return
    if cause.kind == "loss":
        outcome = "FP32 gives the same: neither a precision nor a scale mends a loss that is not finite by its formula"
        yield Remedy((), "another formula for the loss", None, outcome)
        return
    (size, name), broken = seen.largest_weight, first_break(seen, cause.phase)
    evidence, operator = "", operator_name(broken) if broken is not None else ""
    if size >= LARGE:
        evidence = f"weights reach {size:.3g} in {name}"
    elif broken is not None and broken.largest_input >= LARGE and broken.kind == "inf":
        evidence = f"what goes into {operator} reaches {broken.largest_input:.3g}"
    if evidence:
        text = "a lower optimizer.lr or train.clip_norm, from an earlier checkpoint"
        outcome = f"even FP32 is not finite, where {evidence}: {cause.what}"
    else:  # where nothing is large, it is the arithmetic itself
        where = describe_module(seen, cause.module or "")
        text = f"look at {operator} in {where}" if operator else f"look at {where}"
        outcome = f"FP32 gives the same, and no weight is large (up to {size:.3g} in {name}): {cause.what}"
    yield Remedy((), text, None, outcome)


def _without_samples(case: DiagnosisCase) -> Iterator[Remedy]:
    bad = {place for one in case.seen.inputs for place in one.samples}
    good = [place for place in range(case.seen.samples) if place not in bad]
    text = "clean data, or dataset.on_error=skip where the data set can tell"
    if any(one.widely_finite for one in case.seen.inputs):
        yield from _until_it_helps(_other_precisions(case))
        return
    if not good:
        yield Remedy((), text, None, "no sample of the batch is finite")
        return
    saved_step = replace(case.saved_step, batch=_chosen(case.saved_step.batch, good))
    seen = observation_of(observe_step(case.parts, saved_step), case.seen.learner)
    without = f"without the {len(bad)} samples" if len(bad) > 1 else "without the one sample"
    outcome = f"{without} the step is {'finite' if seen.finite else 'not finite either: ' + first_cause(seen).what}"
    yield Remedy((), text, seen.finite, outcome)


def _try_remedy(
    case: DiagnosisCase, words: tuple[str, ...], text: str, underflow: bool
) -> tuple[Remedy, DiagnosisCase | None]:
    """Do the step again under some words; where only gradients are wrong then, at another loss scale as well."""
    try:
        changed = case.with_overrides(*words)
    except (EnvironmentRefused, ConfigError) as error:
        return Remedy(words, text, None, f"not tried: {error}"), None
    offender = _offender(changed, underflow)
    if offender is None:
        agrees = "finite on this batch" + (", and agrees with FP32" if changed.accuracy is not None else "")
        return Remedy(words, text, True, "not lost on this batch" if underflow else agrees), changed
    if changed.cause.kind == "backward" and (another := _another_scale(changed)) is not None and another.helped:
        text = f"{text}, and {another.text}"
        return Remedy((*words, *another.words), text, True, another.outcome), changed
    what = f"values of {offender} are lost" if changed.is_sound else changed.cause.what
    return Remedy(words, text, False, "the same happens" if what == case.cause.what else what), changed


def _until_it_helps(*several: Iterable[Remedy]) -> Iterator[Remedy]:
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


@dataclass(frozen=True)
class KeptModules:
    """Entries of ``precision.keep_fp32``, beside those that a configuration has, that grow while offenders are found.

    They follow offenders through all modules of their kind.

    Attributes:
        model: Whose modules are meant.
        before: Modules that were kept to begin with.
        entries: Qualified names, patterns of them, and class names.
    """

    model: nn.Module
    before: Collection[str]
    entries: tuple[str, ...] = ()

    @functools.cached_property
    def classes(self) -> dict[str, str]:
        """The class of each module."""
        return {name: type(module).__name__ for name, module in self.model.named_modules()}

    def with_module(self, module: str) -> KeptModules | None:
        """Return the list with one more offender; one that is kept already gives way to what is around it.

        A kept module answers in the dtype that it was given, so what it computes must fit there; within a kept module it need not.
        Where a module of the same class is in the list, one entry takes the place of both: the class, where it is the user's or
        a library's own; of a class of torch.nn, which says little about what a module does, a pattern of their names.

        Args:
            module: Where values are wrong now.

        Returns:
            None where nothing is left but the whole model, or nothing changes.
        """
        covered = {entry: self._selected(entry) for entry in self.entries}
        inside = set().union(*covered.values())
        while module in self.before or any(f"{module}.".startswith(f"{name}.") for name in inside):
            module = module.rpartition(".")[0]
            if not module:
                return None
        kept = [entry for entry in self.entries if not all(name.startswith(f"{module}.") for name in covered[entry])]
        kind = self.classes[module]
        alike = [entry for entry in kept if any(self.classes[name] == kind for name in covered[entry])]
        together = self._together(module, {name for entry in alike for name in covered[entry]}) if alike else None
        entries = (*(entry for entry in kept if together is None or entry not in alike), together or module)
        return None if entries == self.entries else replace(self, entries=entries)

    def _selected(self, entry: str) -> set[str]:
        """The modules that an entry names."""
        return set(kept_modules(self.model, (entry,)))

    def _together(self, module: str, others: set[str]) -> str | None:
        """One entry for modules of one class; None where it would name others too."""
        kind = self.classes[module]
        same = {name for name, one in self.classes.items() if one == kind}
        whole = any(is_inside(inner, name) for name in same for inner in same) or "" in same
        if not hasattr(nn, kind) and not whole and self._selected(kind) == same:
            return kind
        parts = [name.split(".") for name in (module, *sorted(others))]
        if len({len(one) for one in parts}) > 1:
            return None
        pattern = ".".join(one[0] if len(set(one)) == 1 else "*" for one in zip(*parts, strict=True))
        return pattern if pattern.strip("*.") and self._selected(pattern) <= same else None
