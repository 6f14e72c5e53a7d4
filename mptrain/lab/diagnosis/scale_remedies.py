"""Remedies of a failed training step that change the loss scale: the scale, and the overrides that set it.

No overrides are needed if the scaler reaches the scale without them. They are suggested only after a check that a run
with them starts at that scale. All exponent counts are of the unscaled FP16 gradients, as FP32 computes them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mptrain.lab.diagnosis.case import DiagnosisCase
from mptrain.lab.diagnosis.causes import module_rows, only_zeros, small_gradients
from mptrain.lab.step.repetition import with_overrides
from mptrain.numerics.exponents import lost_share, nonzero
from mptrain.numerics.forecast import MARGIN
from mptrain.numerics.formats import FLOAT16, FLOAT32
from mptrain.numerics.overflow_check import Verdict
from mptrain.run.build.parts import build
from mptrain.runlog.diagnosis_file import Remedy
from mptrain.scaler import NoScaler, StaticScaler
from mptrain.system.device import widest
from mptrain.system.errors import ConfigError, EnvironmentRefused
from mptrain.system.records import ExponentCounts
from mptrain.system.words import scale_in_words

#: Share of gradients rounded to zero above which a scale is no remedy.
LOSES = 0.1

#: Beginning of the description of a remedy that the scaler applies itself.
NO_CHANGE = "no change is needed: "

#: Advice added to a higher scale, because it must not overflow at any other step.
_MORE_STEPS = "mptrain recommend evaluates more steps than this one"


def lower_scale(case: DiagnosisCase, gradients: ExponentCounts) -> Remedy | None:
    """Return a lower loss scale, tried on the step, for gradients that overflow; None if no lower scale is possible."""
    edge = _highest_finite(case, gradients)
    if not FLOAT32.smallest_normal <= 2.0**edge < case.seen.loss_scale:
        return None
    if isinstance(case.learner.scaler, StaticScaler) and (remedy := _dynamic(case, gradients)) is not None:
        return remedy
    if (landing := _by_itself(case, 2.0**edge)) is not None:
        text = f"{NO_CHANGE}steps are skipped until the loss scale has fallen to {scale_in_words(landing)}, as usual"
        if (remedy := _lowered(case, (), text, landing, gradients)).helped:
            return remedy
    lowest = 0 if edge >= 0 else math.ceil(math.log2(FLOAT32.smallest_normal))
    rooms = (
        room for room in range(MARGIN, 0, -1) if edge - room >= lowest and lost_share(gradients, edge - room) <= LOSES
    )
    room = next(rooms, 0)
    scale = 2.0 ** (edge - room)
    words = scale_words(case, scale)
    if case.learner.scaler.on_overflow == "apply":
        words = (*words, f"{_prefix(case)}.on_overflow=skip")
    return _lowered(case, words, f"a loss scale of {scale_in_words(scale)}", scale, gradients, room)


def _dynamic(case: DiagnosisCase, gradients: ExponentCounts) -> Remedy | None:
    """Return the dynamic scaler, tried on the step, in place of a constant scale that overflows; None if it fails."""
    if (changed := _with_dynamic(case)) is None:
        return None
    words = _dynamic_words(case)
    scale = float(changed.learner.scaler.initial(changed.parts.device)["scale"])
    begun = changed.at_scale(scale)
    if begun.seen.finite:
        if not begun.is_sound or not _has_gradients(begun):
            return None
        where = f"a dynamic loss scale, first {scale_in_words(scale)}, which follows later gradients"
        return Remedy(words, where, True, f"correct on this batch at {scale_in_words(scale)}{_zeros(begun)}")
    begun = replace(begun, ended=False)  # another scaler begins
    goal = 2.0 ** _highest_finite(begun, gradients)
    if (landing := _by_itself(begun, goal)) is None:
        return None
    text = f"a dynamic loss scale, which falls to {scale_in_words(landing)} by itself and follows later gradients"
    remedy = _lowered(begun, (), text, landing, gradients)
    return replace(remedy, words=words) if remedy.helped else None


def _dynamic_words(case: DiagnosisCase) -> tuple[str, ...]:
    prefix = _prefix(case)
    return ("scaler=dynamic" if prefix == "scaler" else f"{prefix}={{_target_:mptrain.scaler.DynamicScaler}}",)


def _with_dynamic(case: DiagnosisCase) -> DiagnosisCase | None:
    """Return the step with a dynamic scaler; None if the configuration does not allow one."""
    try:
        return case.with_overrides(*_dynamic_words(case))
    except (ConfigError, EnvironmentRefused):
        return None


def _has_gradients(case: DiagnosisCase) -> bool:
    return any(nonzero(output) for operation in case.seen.of("backward") for output in operation.outputs)


def _zeros(case: DiagnosisCase) -> str:
    """Return which modules only zero gradients reach: of their scale nothing was seen. Empty if there is none."""
    return "".join(f"; {sentence}" for sentence in only_zeros(module_rows(case.seen, causes=())))


def _edge(gradients: ExponentCounts) -> int:
    """Return the base-2 exponent of the highest scale at which the largest of some unscaled gradients fits FP16."""
    return math.floor(math.log2(FLOAT16.max / gradients.largest)) if gradients.largest else 0


def _highest_finite(case: DiagnosisCase, gradients: ExponentCounts) -> int:
    """Return the base-2 exponent of the highest loss scale below the present one at which the step is finite.

    `_edge` is too low if the largest gradient is computed in FP32 in this step too, or is discarded. Higher scales are
    therefore tried.
    """
    finite, infinite = _edge(gradients), math.ceil(math.log2(case.seen.loss_scale))
    if finite + 1 >= infinite or not case.at_scale(2.0 ** max(finite + 1, 0)).seen.finite:
        return finite
    finite = max(finite + 1, 0)
    while infinite - finite > 1:
        middle = (finite + infinite) // 2
        if case.at_scale(2.0**middle).seen.finite:
            finite = middle
        else:
            infinite = middle
    return finite


def _lowered(
    case: DiagnosisCase, words: tuple[str, ...], text: str, scale: float, gradients: ExponentCounts, room: int = 0
) -> Remedy:
    """Repeat a step at a lower loss scale, ``room`` doublings below the highest finite one, and return the remedy."""
    candidate, shown = case.at_scale(scale), scale_in_words(scale)
    lost = lost_share(gradients, math.floor(math.log2(scale)))
    cost, finite = f"{100 * lost:.2g} % of the nonzero gradients are rounded to zero", "finite on this batch"
    refusal, helped = None, False
    if not candidate.seen.finite:
        outcome = f"at loss scale {shown} the step still overflows"
    elif lost > LOSES:
        outcome = f"{finite}, but {cost} there"
    elif not candidate.is_sound:
        outcome = f"{finite} at {shown}, but wrong: {candidate.cause.what}"
    else:
        outcome, helped = f"{finite} at {shown}{_below(room)}; {cost}", True
        if candidate.accuracy is not None and (off := candidate.accuracy.doubt):
            outcome, text = f"{outcome}; {off}", text.removeprefix(NO_CHANGE)
        refusal = _refusal(case, words, scale) if words else None
    return _unless_refused(Remedy(words, text, helped, outcome), refusal)


def _unless_refused(remedy: Remedy, refusal: str | None) -> Remedy:
    """Return a remedy, marked as untested if no run with its overrides starts at its scale."""
    outcome = f"finite on this batch, but no run starts at that scale: {refusal}"
    return remedy if refusal is None else replace(remedy, helped=None, outcome=outcome)


def raised_scale(case: DiagnosisCase, gradients: ExponentCounts) -> Remedy | None:
    """Return a higher loss scale, tried on the step, for gradients that underflow; None if no higher one is possible.

    The scaler's first scale is tried first, or a lower one if that overflows.
    """
    first = float(case.learner.scaler.initial(case.parts.device)["scale"])
    if first > case.seen.loss_scale:
        begun, shown = case.at_scale(first), scale_in_words(first)
        if begun.is_sound:
            return Remedy((), f"the scaler's first loss scale, {shown}", True, f"correct on this batch at {shown}")
        if not begun.seen.finite and begun.cause.kind == "backward":
            return lower_scale(begun, gradients)
    room = 2.0 ** _edge(gradients) / case.seen.loss_scale
    return higher_scale(case, math.inf, room, gradients) if room >= 2 else None


def higher_scale(case: DiagnosisCase, share: float, room: float, gradients: ExponentCounts) -> Remedy:
    """Return a higher loss scale, tried on the step, for gradients that are small for FP16.

    A remedy must halve ``share``, the share of nonzero FP16 gradients below 2^-14. ``room`` is the factor by which the
    scale can be multiplied before the largest gradient overflows. In place of a constant scale comes a dynamic one: a
    network that has not learned has small gradients, and larger ones as soon as it does.
    """
    constant = isinstance(case.learner.scaler, (StaticScaler, NoScaler))
    if constant and (remedy := _dynamic(case, gradients)) is not None:
        return remedy
    if constant and _prefix(case) == "scaler" and (changed := _with_dynamic(case)) is not None:
        remedy = higher_scale(replace(changed.at_scale(case.seen.loss_scale), ceiling=math.inf), share, room, gradients)
        return replace(
            remedy,
            words=(*_dynamic_words(case), *remedy.words),
            text=remedy.text.replace("a loss", "a dynamic loss", 1),
        )
    for margin in range(MARGIN, -1, -1):
        scale = case.seen.loss_scale * room / 2.0**margin
        if scale <= case.seen.loss_scale:
            continue
        if (limit := _limit(case, scale)) is not None:
            return Remedy((), f"a loss scale of {scale_in_words(scale)}", None, limit)
        candidate = case.at_scale(scale)
        small = small_gradients(candidate.seen)
        helped = candidate.is_sound and _has_gradients(candidate) and (small is None or small[0] < share / 2)
        if helped:
            break
    words, text = scale_words(case, scale), f"a loss scale of {scale_in_words(scale)}"
    if not helped:
        small_ones = "just as many gradients are below 2^-14" if _has_gradients(candidate) else "all gradients are zero"
        return Remedy(words, text, False, small_ones if candidate.is_sound else candidate.cause.what)
    few = ", and few gradients are below 2^-14" if small is None else ""
    outcome = f"finite on this batch{_below(margin)}{few}{_zeros(candidate)}; {_MORE_STEPS}"
    if constant:  # no run was seen to train with it
        return Remedy(words, text, None, f"not shown to train: {outcome}")
    return _unless_refused(Remedy(words, text, True, outcome), _refusal(case, words, scale))


def _limit(case: DiagnosisCase, scale: float) -> str | None:
    highest = getattr(case.learner.scaler, "max_scale", None)
    if scale >= case.ceiling:
        return f"not advised: the run overflowed at {scale_in_words(case.ceiling)}; {_MORE_STEPS}"
    if highest is not None and scale > highest:
        return f"not advised: {_prefix(case)}.max_scale={_written(highest)} is lower; {_MORE_STEPS}"
    return None


def _below(room: int) -> str:
    return f", {room} doubling{'s' if room > 1 else ''} below the highest finite scale" if room else ""


def scale_words(case: DiagnosisCase, scale: float) -> tuple[str, ...]:
    """Return the command-line overrides with which a run starts at a loss scale, such as ``scaler.init_scale=1024``.

    The present scaler is kept if it has a scale to set, and its limits are moved if the scale is beyond them. Otherwise
    a static scaler replaces it.
    """
    rule, prefix, value = case.learner.scaler, _prefix(case), _written(scale)
    if hasattr(rule, "scale"):
        return (f"{prefix}.scale={value}",)
    if not hasattr(rule, "init_scale"):
        if prefix == "scaler":
            return ("scaler=static", f"scaler.scale={value}")
        return (f"{prefix}={{_target_:mptrain.scaler.StaticScaler,scale:{value}}}",)
    words = [f"{prefix}.init_scale={value}"]
    lowest, highest = getattr(rule, "min_scale", None), getattr(rule, "max_scale", None)
    if lowest is not None and lowest > scale:
        words.append(f"{prefix}.min_scale={value}")
    if highest is not None and highest < scale:
        words.append(f"{prefix}.max_scale={value}")
    if getattr(rule, "min_loss_scale", 0.0) >= scale:  # an exclusive limit: the scale stays above it
        words.append(f"{prefix}.min_loss_scale={_written(scale / 2)}")
    return tuple(words)


def _prefix(case: DiagnosisCase) -> str:
    """Return the key of the learner's scaler in overrides. With several learners, only this one's is changed."""
    name = case.seen.learner
    own = name in case.config.learners or len(case.parts.learners) > 1
    return f"learners.{name}.scaler" if own else "scaler"


def _written(scale: float) -> str:
    return str(int(scale) if scale == int(scale) else scale)


def _refusal(case: DiagnosisCase, words: tuple[str, ...], scale: float) -> str | None:
    try:
        parts, _ = build(with_overrides(case.config, *words), weights=False)
    except (ConfigError, EnvironmentRefused) as error:
        return str(error)
    learner = next(learner for learner in parts.learners if learner.name == case.seen.learner)
    first = float(learner.scaler.initial(parts.device)["scale"])
    return None if first == scale else f"the scale would start at {scale_in_words(first)}"


def _by_itself(case: DiagnosisCase, goal: float) -> float | None:
    """Return the loss scale at which the present scaler stops overflowing, if it reaches it before the run ends.

    Later batches may need a lower scale than ``goal``, the highest finite one. The scaler must therefore be able to
    fall by `MARGIN` further doublings, or to its floor, before ``train.max_consecutive_overflows`` ends the run.
    """
    learner = case.learner
    if case.ended or learner.scaler.on_overflow == "apply":
        return None
    device = case.parts.device
    infinite = torch.full((1,), math.inf, dtype=widest(device), device=device)
    yes = torch.ones(1, dtype=torch.bool, device=device)
    refused = Verdict(yes, ~yes, torch.ones(1, device=device), infinite, infinite, infinite)
    in_a_row = int(case.saved_step.state["accounts"][learner.name]["history"]["consecutive"])
    state = {**learner.scale_state, "scale": torch.full_like(learner.scale, case.seen.loss_scale)}
    landing, enough = None, max(goal / 2.0**MARGIN, learner.scaler.floor)
    for _ in range(case.config.train.max_consecutive_overflows - in_a_row - 1):
        state = dict(learner.scaler.after(state, refused))
        scale = float(state["scale"])
        if landing is None and scale <= goal:
            landing = scale
        if landing is not None and scale <= enough:
            return landing
    return None
