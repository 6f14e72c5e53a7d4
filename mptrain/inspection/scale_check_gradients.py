"""Computes the gradients of one step again and again: in FP64, in FP32, and in a precision mode at many loss scales.

The passes are the engine's own, so what is measured is what training does. Nothing is updated, and everything that the passes
touch is put back. Dropout is off, since what it draws may depend on the dtype; all else that is random is drawn alike.

A ReLU that rounding turns off changes the gradients of all layers before it, by any amount. So half-precision gradients are
compared with those that FP64 computes where every module says what it said in half precision: the same ReLUs are on, and what
is left is the backward pass alone. What the forward pass says is compared by itself: outputs are continuous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mptrain.device import beside_fp64, capabilities
from mptrain.engine.guard import BufferGuard
from mptrain.engine.step import accumulate_gradients
from mptrain.errors import out_of_memory
from mptrain.inspection.gradient_path import GradientPath, breaks_proportion
from mptrain.inspection.module_outputs import Outputs, Replacement, distance, each_output, keep_in, norm, relative_error
from mptrain.inspection.scale_check_observation import half_weights, largest_values, without_dropout
from mptrain.inspection.scale_check_ranges import EPSILONS, LOST, Distances, OutputErrors
from mptrain.numerics.rounding import saturated
from mptrain.precision.apply import DTYPES
from mptrain.probe.module_trail import Trail
from mptrain.probe.observer import Observer, Operation
from mptrain.random_state import other_random_numbers
from mptrain.scaler.static import StaticScaler

if TYPE_CHECKING:
    from mptrain.engine.job import Parts
    from mptrain.engine.step import Learner
    from mptrain.numerics.formats import Format
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Objective

#: Exponents of the scales at which FP32 gradients are compared with those at scale 1.
FP32_EXPONENTS = (12, 24)

#: float64, by parameter.
Gradients = dict[str, "Tensor"]


@dataclass(frozen=True)
class Reference:
    """What is compared with: the gradients of one step without half precision, at the FP32 weights.

    Attributes:
        dtype: ``float64``; ``float32`` where the model or its task does not run in FP64.
        norms: Of the gradients, L2, by parameter.
        exact: Gradients of the half-precision forward pass, float64: of what its modules said.
        expected: Distance of those from the gradients without half precision, L2.
        fp32: Distance of the FP32 gradients from those that are exact for the FP32 forward pass.
        fp32_shift: See `mptrain.inspection.scale_check_ranges.Distances`.
        breaks: Modules in which gradients stop being in proportion to the loss in FP32.
        outputs: How wrong what each module said is.
        values: The largest magnitude of each parameter and buffer.
        notes: What was done differently from training, one sentence each.
    """

    dtype: str
    norms: dict[str, float]
    exact: Gradients
    expected: dict[str, float]
    fp32: dict[str, float]
    fp32_shift: dict[str, float]
    breaks: tuple[str, ...]
    outputs: dict[str, OutputErrors]
    values: dict[str, float]
    notes: tuple[str, ...]


def compute_reference(
    parts: Parts, batch: Batch, form: Format, said: Outputs, weights: Mapping[str, Tensor] | None = None
) -> Reference:
    """Everything that has to be known without half precision.

    Args:
        parts: The run in ``precision=fp32``; its model is left in another dtype and is of no use afterwards.
        batch: Prepared.
        form: The half-precision format whose rounding is to be expected.
        said: What the modules said in half precision.
        weights: The parameters that they said it with, where those are half: what rounding them does is the forward pass's matter.

    Raises:
        ConfigError: The task's loss is not a float32 scalar.
    """
    parts.model.train()
    values = largest_values(parts.model)
    notes = without_dropout(parts.model)
    said32: Outputs = {}
    with each_output(parts.model, keep_in(said32)):
        fp32 = gradients(parts, batch, 1.0)
    scaled = {exponent: gradients(parts, batch, 2.0**exponent) for exponent in FP32_EXPONENTS}
    shifts = {name: max(distance(one[name], grad) for one in scaled.values()) for name, grad in fp32.items()}
    tolerance = EPSILONS * form.epsilon
    wrong = {name.rpartition(".")[0] for name, shift in shifts.items() if not shift <= tolerance * norm(fp32[name])}
    breaks = find_breaks(parts, batch, (1.0, 2.0 ** FP32_EXPONENTS[-1]), wrong, tolerance) if wrong else ()
    dtype = torch.float64 if _runs_in_float64(parts, batch) else torch.float32
    if dtype == torch.float32:
        notes = (*notes, "the model does not run in FP64, so FP32 is what gradients are compared with")
    batch = batch.cast(dtype)
    right: Outputs = {}
    with each_output(parts.model, keep_in(right)):
        wide = gradients(parts, batch, 1.0)
    replacement = Replacement(said)
    with _weights(parts.model, weights or {}), each_output(parts.model, replacement):
        exact = gradients(parts, batch, 1.0)
    with each_output(parts.model, Replacement(said32)):
        exact32 = gradients(parts, batch, 1.0)
    rounded = _rounded_outputs(parts, batch, form)
    return Reference(
        dtype=str(dtype).removeprefix("torch."),
        norms={name: norm(grad) for name, grad in wide.items()},
        exact=exact,
        expected={name: distance(exact[name], grad) for name, grad in wide.items()},
        fp32={name: distance(fp32[name], grad) for name, grad in exact32.items()},
        fp32_shift=shifts,
        breaks=breaks,
        outputs={
            name: OutputErrors(
                half=relative_error(said.get(name, []), tensors),
                explained=relative_error(rounded.get(name, []), tensors),
                fp32=relative_error(said32.get(name, []), tensors),
                own=replacement.own_error(name),
                largest=max((_largest_finite(tensor) for tensor in tensors), default=0.0),
            )
            for name, tensors in right.items()
        },
        values=values,
        notes=notes,
    )


def compare_scales(parts: Parts, batch: Batch, reference: Reference, exponents: Sequence[int]) -> list[Distances]:
    """The gradients of a precision mode at each scale, compared with the reference.

    Args:
        parts: The run in its own precision; the scale of its learners is changed.
        batch: Prepared.
        reference: What to compare with.
        exponents: Of the scales, as powers of two.

    Returns:
        What was measured of each parameter that has a gradient.
    """
    parts.model.train()
    without_dropout(parts.model)
    errors: dict[str, dict[int, float]] = {name: {} for name in reference.exact}
    shifts: dict[str, dict[int, float]] = {name: {} for name in reference.exact}
    anchors: Gradients = {}
    for exponent in sorted(exponents, reverse=True):  # from above, so that the highest finite one comes first
        for name, grad in gradients(parts, batch, 2.0**exponent).items():
            if name not in errors:
                continue  # without half precision it has none
            errors[name][exponent] = distance(grad, reference.exact[name])
            if torch.isfinite(grad).all():
                anchors.setdefault(name, grad)
            shifts[name][exponent] = distance(grad, anchors.get(name, grad))
    return [
        Distances(
            name,
            grad.numel(),
            reference.norms[name],
            fp32=reference.fp32[name],
            expected=reference.expected[name],
            fp32_shift=reference.fp32_shift[name],
            errors=dict(sorted(errors[name].items())),
            shifts=dict(sorted(shifts[name].items())),
        )
        for name, grad in reference.exact.items()
        if errors[name]
    ]


def gradients(parts: Parts, batch: Batch, scale: float) -> Gradients:
    """The unscaled gradients of one step of every learner, float64 by parameter; nothing but the scale is changed.

    Args:
        parts: The run; the model in training mode.
        batch: Prepared.
        scale: Multiplies the loss; from now on that of the learners.
    """
    found: Gradients = {}
    guard = BufferGuard(parts.model)  # the model's dtype may be another than when it was built
    guard.snapshot()
    try:
        with other_random_numbers(parts.device):
            for learner in parts.learners:
                learner.scaler = StaticScaler(scale=scale)
                learner.scale_state = learner.scaler.initial(parts.device)
                learner.weights.gradients.zero_grad()
                accumulate_gradients(learner, parts.model, batch, parts.plan)
                found |= {
                    name: beside_fp64(grad).double() / scale
                    for name, grad in learner.weights.gradients.by_name().items()
                }
                learner.weights.gradients.zero_grad()
    finally:
        guard.recapture()
        guard.restore(torch.ones(1, device=parts.device))
    return found


def _largest_finite(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_finite(parts: Parts, batch: Batch) -> bool:
    """Return whether all gradients of a step are finite.

    Args:
        parts: The run; the model in training mode.
        batch: Prepared.
    """
    return all(bool(torch.isfinite(grad).all()) for grad in gradients(parts, batch, 1.0).values())


def breaking_operators(parts: Parts, batch: Batch) -> tuple[Operation, ...]:
    """Return the operators of a step that make something infinite, or no number, out of finite values, in their order.

    Args:
        parts: The run.
        batch: Prepared.
    """
    parts.model.train()
    trail = Trail()
    observer = Observer(trail)
    plan = replace(parts.plan, products=observer.inside(parts.plan.products))
    with trail.followed(parts.model):
        gradients(replace(parts, plan=plan), batch, 1.0)
    return tuple(operation for operation in observer.operations if operation.breaks)


def find_breaks(
    parts: Parts, batch: Batch, scales: tuple[float, float], wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """Where gradients stop being in proportion to the loss: see `breaks_proportion`.

    Args:
        parts: The run; the model in training mode.
        batch: Prepared.
        scales: Two, the first of which is taken for right.
        wrong: Names of the modules whose own parameters' gradients differ between them.
        tolerance: The largest relative difference that is none.
    """
    one, other = (GradientPath(scale) for scale in scales)
    for path in (one, other):
        with path.followed(parts.model):
            gradients(parts, batch, path.scale)
    return breaks_proportion(one, other, wrong, tolerance)


def find_backward_faults(
    half: Parts, batch: Batch, wide: Parts, said: Outputs, exponent: int, wrong: Collection[str], form: Format
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find the modules that are handed right gradients in half precision and hand on wrong ones.

    Args:
        half: The run in its own precision; the model in training mode, without dropout.
        batch: As the data set gives it.
        wide: The run in ``precision=fp32``, as it was built.
        said: What the modules said in half precision.
        exponent: Of the loss scale.
        wrong: Names of the modules whose own parameters' gradients are wrong.
        form: The half-precision format.

    Returns:
        Those modules; and for each the module to keep in FP32: it, or the one around it whose inputs' gradients the format holds.
    """
    tolerance = EPSILONS * form.epsilon
    found, right = GradientPath(2.0**exponent), GradientPath(1.0)
    with found.followed(half.model):
        gradients(half, half.prepare(batch), found.scale)
    wide.model.train()
    without_dropout(wide.model)
    weights = half_weights(half.model)
    with _weights(wide.model, weights), each_output(wide.model, Replacement(said)), right.followed(wide.model):
        gradients(wide, wide.prepare(batch), 1.0)
    faults = breaks_proportion(right, found, wrong, tolerance)
    half_dtype = DTYPES[form.name]  # type: ignore[index]
    return faults, tuple(dict.fromkeys(_holds(right, name, found.scale, half_dtype) for name in faults))


def _holds(right: GradientPath, module: str, scale: float, half: torch.dtype) -> str:
    """The module, or the one around it, whose inputs' gradients a half-precision format holds at a loss scale."""
    while module and not all(
        distance((gradient * scale).to(half).double() / scale, gradient) <= LOST * norm(gradient)
        for place, gradient in ((place, beside_fp64(kept).double()) for place, kept in right.kept.items())
        if place.module == module and place.side == "input"
    ):
        module = module.rpartition(".")[0]
    return module


@contextlib.contextmanager
def _weights(model: nn.Module, others: Mapping[str, Tensor]) -> Iterator[None]:
    """While this lasts, a model has other values of some of its parameters."""
    before = {name: value.detach().clone() for name, value in model.named_parameters() if name in others}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in others:
                value.copy_(others[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name in before:
                    value.copy_(before[name])


def _runs_in_float64(parts: Parts, batch: Batch) -> bool:
    """Whether the model and its task do; the model is left in FP64 where they do, else in FP32."""
    for learner in parts.learners:
        learner.objective = _with_float32_loss(learner)
    if not capabilities(parts.device).fp64:
        parts.model.float()
        return False
    parts.model.double()
    try:
        gradients(parts, batch.cast(torch.float64), 1.0)
    except (RuntimeError, TypeError) as error:  # it casts to FP32 by itself
        if out_of_memory(error):
            raise
        parts.model.float()
        return False
    return True


def _with_float32_loss(learner: Learner) -> Objective:
    """The objective with its loss rounded to float32, which is what the engine takes."""
    loss = learner.objective.loss
    return replace(learner.objective, loss=lambda model, micro: loss(model, micro).float())


def _rounded_outputs(parts: Parts, batch: Batch, form: Format) -> Outputs:
    """What modules say where weights, inputs and everything that they say is rounded to a half-precision format.

    The weights stay rounded.
    """
    half = DTYPES[form.name]  # type: ignore[index]
    found: Outputs = {}
    keep = keep_in(found)

    def rounded(name: str, value: Tensor) -> Tensor:
        return keep(name, value.to(half).to(value.dtype))

    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.copy_(saturated(parameter, half))
    with each_output(parts.model, rounded):
        gradients(parts, batch.cast(half).cast(batch.inputs.dtype), 1.0)
    return found
