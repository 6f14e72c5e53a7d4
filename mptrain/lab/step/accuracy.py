"""Errors of one training step in half precision against FP64: of module outputs, and of gradients at one loss scale.

Acceptable errors follow from the format, as in ``mptrain doctor``; `mptrain.lab.step.ranges` describes
the measurements. An output may be off by `EPSILONS` times the format's epsilon, or by `TIMES_ROUNDED` times the error
from rounding weights, inputs and all outputs. A gradient may be off by `EPSILONS` times the epsilon from an exact
backward pass of the same outputs, or by `TIMES_EXPECTED` times its expected distance. Errors up to
`ModuleScaling.allowed_loss` are noted but are no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mptrain.engine.module_trail import LOSS
from mptrain.engine.parts import Parts
from mptrain.lab.finding import precise_percent
from mptrain.lab.step.gradients import compare_backward, compute_reference, operator_errors, scaled_gradients
from mptrain.lab.step.module_tensors import HANDED, Outputs, distance, hook_step, owner, record_outputs
from mptrain.lab.step.observation import disable_dropout
from mptrain.lab.step.ranges import (
    EPSILONS,
    MUCH,
    ModuleScaling,
    OperatorError,
    OutputErrors,
    by_module,
    is_spoiled,
    lost_boundary,
    spoiling_boundary,
)
from mptrain.lab.step.repetition import SavedStep
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.apply import input_dtype, set_matmul_precision


def largest_errors(outputs: Mapping[str, OutputErrors], modules: Sequence[ModuleScaling]) -> tuple[float, float]:
    """Return the largest relative error of a module output and of a module's gradients in half precision.

    Rounding that a format explains counts too. Left out is what FP32 computes wrongly as well. Of the gradients, the
    best loss scale counts.
    """
    gradients = [math.hypot(module.expected, module.best) for module in modules if module.judged]
    right = [errors.half for at, errors in outputs.items() if not errors.ill_conditioned and at != LOSS]
    return max(right, default=0.0), max(gradients, default=0.0)


def why_worse(before: tuple[float, float] | None, after: tuple[float, float], coarser: float = 1.0) -> str:
    """Return the reason, as part of a sentence, why a changed step is no remedy of another; empty if it may be one.

    Compared are the largest errors of outputs and gradients; ``before`` is None if the first step is not finite.
    ``coarser`` is the epsilon of the changed step's format over that of the first: by as much errors may grow.
    """
    for what, at in (("an output", 0), ("the gradients of a module", 1)):
        if after[at] > MUCH:
            return f"{what} would be off by {precise_percent(after[at])} against FP32"
    if before is None or not math.isfinite(before[1]):
        return ""
    if 2 * coarser * before[1] < after[1] and coarser * before[0] < after[0]:
        instead = f"{precise_percent(after[1])} instead of {precise_percent(before[1])}"
        return f"rounding errors grow: gradients are off by up to {instead}"
    return ""


@dataclass(frozen=True)
class StepAccuracy:
    """Errors of one learner's training step in half precision against FP64.

    Attributes:
        form: The half-precision format.
        outputs: Relative errors at each boundary of modules (`mptrain.lab.step.module_tensors.Outputs`), in the order
            of the forward pass.
        modules: Gradient errors by module at one loss scale, in the same order; modules without own outputs come last.
        breaks: Modules whose backward pass makes gradients wrong or not proportional to the loss.
        operator: Operator whose rounding makes the module wrong that `wrong_output` blames.
    """

    form: Format
    outputs: Mapping[str, OutputErrors]
    modules: Sequence[ModuleScaling]
    breaks: tuple[str, ...] = ()
    operator: OperatorError | None = None

    @property
    def largest_errors(self) -> tuple[float, float]:
        """Largest relative error of a module output and of a module's gradients."""
        return largest_errors(self.outputs, self.modules)

    @property
    def doubt(self) -> str:
        """Errors that are too large for an all-clear although no module is to blame, as a clause; empty for none."""
        if is_spoiled(self.outputs, self.modules, self.form):
            errors = " and ".join(map(precise_percent, self.largest_errors))
            return f"rounding errors of many modules add up: outputs and gradients are off by up to {errors}"
        if inexact := self.inexact_gradients:
            return f"gradients are off by up to {precise_percent(max(module.best for module in inexact))}"
        return ""

    @property
    def ill_conditioned(self) -> str | None:
        """Name of the first module whose output, or else gradients, are wrong in FP32 too; None if there is none.

        Half precision is not the cause of such errors.
        """
        outputs = (owner(at) for at, errors in self.outputs.items() if errors.ill_conditioned and at != LOSS)
        gradients = (module.name for module in self.modules[::-1] if module.ill_conditioned)
        return next(outputs, next(gradients, None))

    @property
    def disproportionate(self) -> tuple[ModuleScaling, ...]:
        """Modules with gradients not proportional to the loss scale even in FP32, in the order of the backward pass."""
        return tuple(module for module in self.modules[::-1] if not module.in_proportion)

    @property
    def wrong_output(self) -> str | None:
        """Boundary whose error is larger than rounding explains, a key of ``outputs``; later modules use it.

        It is one to which the module's own arithmetic adds the error, of the first such module the one to which it adds
        most; or else one that `lost_boundary` or `spoiling_boundary` blames. None if there is no such boundary, or if
        an earlier module is already wrong in FP32.
        """
        wrong = []
        for boundary, errors in self.outputs.items():
            if math.isnan(errors.fp32):  # infinite in FP64 as well
                continue
            if errors.ill_conditioned:
                break
            # Not `>`: an error that is NaN is too large as well.
            if not errors.half <= self.allowed(boundary):
                wrong.append(boundary)
        own = [name for name in wrong if not self.outputs[name].own <= EPSILONS * self.form.epsilon]
        if not own:
            lost = lost_boundary(self.outputs, self.modules, self.form)
            return lost[0] if lost else spoiling_boundary(self.outputs, self.modules, self.form)
        return max((name for name in own if owner(name) == owner(own[0])), key=lambda name: self.outputs[name].own)

    def allowed(self, name: str) -> float:
        """Return the largest acceptable relative error in half precision of an output, by its key of ``outputs``."""
        return self.outputs[name].allowed(EPSILONS * self.form.epsilon)

    def lost_output(self, modules: Collection[str]) -> str | None:
        """Return the first module, from the first of ``modules`` on, that has lost most of its output to underflow.

        Rounding explains such an error: it rounds to zero the values that are too small for the format. ``modules``
        names those that lose values to underflow. None if there is no such module.
        """
        names = [name for name in self.outputs if HANDED not in name]
        first = min((names.index(name) for name in modules if name in names), default=0)
        return next((name for name in names[first:] if self.outputs[name].half > MUCH), None) if modules else None

    def ruined_output(self, modules: Collection[str]) -> str | None:
        """Return `lost_output` if wrong gradients confirm that the loss matters; otherwise None.

        A closed gate also loses most of its values, without harm.
        """
        shown = any(module.judged and module.expected > MUCH for module in self.modules) or bool(self.wrong_gradients)
        return self.lost_output(modules) if shown else None

    @property
    def wrong_gradients(self) -> tuple[ModuleScaling, ...]:
        """Gradient errors of the modules whose errors are too large for training, in the order of the backward pass."""
        return tuple(module for module in self.inexact_gradients if not module.best <= module.allowed_loss)

    @property
    def inexact_gradients(self) -> tuple[ModuleScaling, ...]:
        """Gradient errors of the modules whose errors exceed rounding, in the order of the backward pass."""
        return tuple(module for module in self.modules[::-1] if module.judged and not module.best <= module.allowed)


def measure_accuracy(
    half: Callable[[], Parts], wide: Callable[[], Parts], saved_step: SavedStep, learner: str, scale: float
) -> StepAccuracy:
    """Measure the errors of module outputs and gradients in one learner's step in half precision against FP64.

    ``half`` builds the run in half precision and restores the state before the step; ``wide`` does so in
    ``precision=fp32``.
    """
    parts, batch32 = _alone(half(), learner), saved_step.batch.cast(torch.float32)
    form, batch = FORMATS[parts.policy.compute], saved_step.batch.cast(input_dtype(parts.policy))
    outputs: Outputs = {}
    with hook_step(parts, record_outputs(outputs)):
        measured = scaled_gradients(parts, batch, scale)
    inputs = input_dtype(parts.policy)
    reference = compute_reference(_alone(wide(), learner), batch32, form, outputs, inputs=inputs)
    batch32 = batch32.cast(inputs).cast(torch.float32)
    exponent = round(math.log2(scale))
    distances = [
        replace(errors, errors={exponent: distance(measured[name], reference.exact[name])}, shifts={exponent: 0.0})
        for name, errors in reference.distances.items()
        if name in measured
    ]
    modules = by_module(distances, form, list(reference.outputs))
    accuracy = StepAccuracy(form, reference.outputs, modules, reference.breaks)
    if (wrong_output := accuracy.wrong_output) is not None:
        blamed = {owner(wrong_output): wrong_output}
        set_matmul_precision(parts.policy)
        operators = operator_errors((parts, batch), lambda: (_alone(wide(), learner), batch32), outputs, blamed, form)
        accuracy = replace(accuracy, operator=next(iter(operators.values()), None))
    if not accuracy.inexact_gradients or accuracy.breaks:
        return accuracy
    set_matmul_precision(parts.policy)
    wrong = [module.name for module in accuracy.inexact_gradients]
    breaks, _ = compare_backward(
        (parts, batch), lambda: (_alone(wide(), learner), batch32), outputs, scale, wrong, form
    )
    return replace(accuracy, breaks=breaks)


def _alone(parts: Parts, learner: str) -> Parts:
    """Return the parts of a run with only one learner, in training mode and without dropout."""
    parts = replace(parts, learners=tuple(candidate for candidate in parts.learners if candidate.name == learner))
    set_matmul_precision(parts.policy)
    parts.model.train()
    disable_dropout(parts.model)
    return parts
