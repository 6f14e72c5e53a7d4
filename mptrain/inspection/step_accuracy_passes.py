"""Measure how far a step in half precision is from the same step in FP64. Passes are the engine's own; nothing is updated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mptrain.inspection.gradient_path import GradientPath, breaks_proportion
from mptrain.inspection.module_outputs import Outputs, Replacement, distance, each_output, keep_in
from mptrain.inspection.scale_check_gradients import Gradients, Reference, compute_reference, gradients
from mptrain.inspection.scale_check_observation import without_dropout
from mptrain.inspection.scale_check_ranges import EPSILONS, Distances, by_module
from mptrain.inspection.step_accuracy import StepAccuracy
from mptrain.numerics.formats import FORMATS
from mptrain.precision.apply import input_dtype, set_products

if TYPE_CHECKING:
    from mptrain.engine.job import Parts
    from mptrain.inspection.step_replay import SavedStep


def measure_accuracy(
    half: Callable[[], Parts], wide: Callable[[], Parts], moment: SavedStep, learner: str, scale: float
) -> StepAccuracy:
    """Measure one learner's step.

    Args:
        half: Builds the run in half precision, brought to the moment.
        wide: Builds it in ``precision=fp32``, likewise.
        moment: The step.
        learner: Whose passes.
        scale: Its loss scale.
    """
    parts, batch32 = _alone(half(), learner), moment.batch.cast(torch.float32)
    form, batch = FORMATS[parts.policy.compute], moment.batch.cast(input_dtype(parts.policy))
    said: Outputs = {}
    with each_output(parts.model, keep_in(said)):
        found = gradients(parts, batch, scale)
    reference = compute_reference(_alone(wide(), learner), batch32, form, said)
    distances = _distances(found, reference, round(math.log2(scale)))
    modules = by_module(distances, form, list(reference.outputs))
    accuracy = StepAccuracy(form, reference.outputs, modules, reference.breaks)
    if accuracy.inexact_gradients and not accuracy.breaks:
        other = GradientPath(scale)
        set_products(parts.policy)
        with other.followed(parts.model):
            gradients(parts, batch, scale)
        exact, one = _alone(wide(), learner), GradientPath(1.0)
        with each_output(exact.model, Replacement(said)), one.followed(exact.model):
            gradients(exact, batch32, 1.0)
        wrong = [module.name for module in accuracy.inexact_gradients]
        breaks = breaks_proportion(one, other, wrong, EPSILONS * form.epsilon)
        accuracy = replace(accuracy, breaks=breaks)
    return accuracy


def _distances(found: Gradients, reference: Reference, exponent: int) -> list[Distances]:
    return [
        Distances(
            name=name,
            elements=exact.numel(),
            reference=reference.norms[name],
            fp32=reference.fp32[name],
            expected=reference.expected[name],
            fp32_shift=reference.fp32_shift[name],
            errors={exponent: distance(found[name], exact)},
            shifts={exponent: 0.0},
        )
        for name, exact in reference.exact.items()
        if name in found
    ]


def _alone(parts: Parts, learner: str) -> Parts:
    """The same parts with one learner, ready for passes whose numbers are compared."""
    parts = replace(parts, learners=tuple(one for one in parts.learners if one.name == learner))
    set_products(parts.policy)
    parts.model.train()
    without_dropout(parts.model)
    return parts
