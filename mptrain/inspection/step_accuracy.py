"""Distances of one step in half precision from the same step in FP64: of outputs, and of gradients at one loss scale.

What is right follows from the format, as for `mptrain doctor` (see `mptrain.inspection.scale_check_ranges` for how it was measured): an output
may be `EPSILONS` times the format's epsilon off, or `TIMES_ROUNDED` times what rounding weights, inputs and all outputs makes of it.
A gradient may be off by the former from what an exact backward pass makes of the same outputs, or by `TIMES_EXPECTED` times what
those outputs make of it; up to `ModuleScaling.allowed_loss` that is worth knowing and no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mptrain.engine.parts import Parts
from mptrain.inspection.module_tensors import Outputs, distance, hook_outputs, record_outputs
from mptrain.inspection.scale_check_gradients import compare_backward, compute_reference, gradients
from mptrain.inspection.scale_check_observation import disable_dropout
from mptrain.inspection.scale_check_ranges import (
    EPSILONS,
    ILL_CONDITIONED_OUTPUT,
    ModuleScaling,
    OutputErrors,
    by_module,
)
from mptrain.inspection.step_replay import SavedStep
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.apply import input_dtype, set_matmul_precision

#: An output that is further off than this has lost most of itself.
MUCH = 0.5


@dataclass(frozen=True)
class StepAccuracy:
    """Distances of one learner's step in half precision from FP64.

    Attributes:
        form: The half-precision format.
        outputs: Relative errors of what each module without children says, in the order of their calls.
        modules: Gradients by module in that order, at one scale.
        breaks: Modules in whose backward pass gradients go wrong, or stop being in proportion to the loss.
    """

    form: Format
    outputs: Mapping[str, OutputErrors]
    modules: Sequence[ModuleScaling]
    breaks: tuple[str, ...] = ()

    @property
    def ill_conditioned(self) -> str | None:
        """The first module that FP32 itself gets wrong, in its output or else in its gradients."""
        outputs = (name for name, errors in self.outputs.items() if errors.fp32 > ILL_CONDITIONED_OUTPUT)
        gradients = (module.name for module in self.modules[::-1] if module.ill_conditioned)
        return next(outputs, next(gradients, None))

    @property
    def disproportionate(self) -> tuple[ModuleScaling, ...]:
        """The modules whose gradients do not follow the loss scale in FP32 already, in the order of the backward pass."""
        return tuple(module for module in self.modules[::-1] if not module.in_proportion)

    @property
    def wrong_output(self) -> str | None:
        """The first module whose output is further off than rounding explains; those behind it are fed with that.

        Nothing is said of a module that FP32 gets wrong, nor of those behind it.
        """
        for name, errors in self.outputs.items():
            if math.isnan(errors.fp32):  # infinite in FP64 as well
                continue
            if errors.fp32 > ILL_CONDITIONED_OUTPUT:
                return None
            if not errors.half <= self.allowed(name):
                return name
        return None

    def allowed(self, name: str) -> float:
        """The largest relative error at which the output of a module is right."""
        return self.outputs[name].allowed(EPSILONS * self.form.epsilon)

    def lost_output(self, modules: Collection[str]) -> str | None:
        """Return the first of some modules, or of those behind it, most of whose output is gone.

        Rounding explains that: it rounds to zero what is too small for the format.

        Args:
            modules: In which values are lost to underflow.
        """
        names = list(self.outputs)
        first = min((names.index(name) for name in modules if name in names), default=0)
        return next((name for name in names[first:] if self.outputs[name].half > MUCH), None) if modules else None

    def ruined_output(self, modules: Collection[str]) -> str | None:
        """Return the same where gradients show it. Most values of a gate that is closed are lost too, which does no harm."""
        shown = any(one.judged and one.expected > MUCH for one in self.modules) or bool(self.wrong_gradients)
        return self.lost_output(modules) if shown else None

    @property
    def wrong_gradients(self) -> tuple[ModuleScaling, ...]:
        """The modules whose gradients are too far off to train with, in the order of the backward pass."""
        return tuple(one for one in self.inexact_gradients if not one.best <= one.allowed_loss)

    @property
    def inexact_gradients(self) -> tuple[ModuleScaling, ...]:
        """The modules whose gradients are further off than rounding explains, in that order."""
        return tuple(one for one in self.modules[::-1] if one.judged and not one.best <= one.allowed)


def measure_accuracy(
    half: Callable[[], Parts], wide: Callable[[], Parts], saved_step: SavedStep, learner: str, scale: float
) -> StepAccuracy:
    """Measure one learner's step.

    Args:
        half: Builds the run in half precision, brought to the moment.
        wide: Builds it in ``precision=fp32``, likewise.
        saved_step: The step.
        learner: Whose passes.
        scale: Its loss scale.
    """
    parts, batch32 = _alone(half(), learner), saved_step.batch.cast(torch.float32)
    form, batch = FORMATS[parts.policy.compute], saved_step.batch.cast(input_dtype(parts.policy))
    said: Outputs = {}
    with hook_outputs(parts.model, record_outputs(said)):
        found = gradients(parts, batch, scale)
    reference = compute_reference(_alone(wide(), learner), batch32, form, said)
    exponent = round(math.log2(scale))
    distances = [
        replace(one, errors={exponent: distance(found[name], reference.exact[name])}, shifts={exponent: 0.0})
        for name, one in reference.distances.items()
        if name in found
    ]
    modules = by_module(distances, form, list(reference.outputs))
    accuracy = StepAccuracy(form, reference.outputs, modules, reference.breaks)
    if not accuracy.inexact_gradients or accuracy.breaks:
        return accuracy
    set_matmul_precision(parts.policy)
    wrong = [module.name for module in accuracy.inexact_gradients]
    breaks, _ = compare_backward((parts, batch), lambda: (_alone(wide(), learner), batch32), said, scale, wrong, form)
    return replace(accuracy, breaks=breaks)


def _alone(parts: Parts, learner: str) -> Parts:
    """The same parts with one learner, ready for passes whose numbers are compared."""
    parts = replace(parts, learners=tuple(one for one in parts.learners if one.name == learner))
    set_matmul_precision(parts.policy)
    parts.model.train()
    disable_dropout(parts.model)
    return parts
