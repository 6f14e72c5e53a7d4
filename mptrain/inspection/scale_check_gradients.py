"""Computes the gradients of one step again and again: in FP64, in FP32, and in a precision mode at many loss scales.

The passes are the engine's own, so what is measured is what training does. Nothing is updated, and everything that the passes
touch is put back. Dropout is off, since what it draws may depend on the dtype; all else that is random is drawn alike.

A ReLU that rounding turns off changes the gradients of all layers before it, by any amount. So half-precision gradients are
compared with those that FP64 computes where every module says what it said in half precision: the same ReLUs are on, and what
is left is the backward pass alone. What the forward pass says is compared by itself: outputs are continuous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mptrain.device import beside_fp64, capabilities
from mptrain.engine.guard import BufferGuard
from mptrain.engine.parts import Parts
from mptrain.engine.step import Learner, accumulate_gradients
from mptrain.errors import out_of_memory
from mptrain.inspection.module_tensors import (
    Change,
    GradientPath,
    OutputReplacement,
    Outputs,
    breaks_proportion,
    distance,
    hook_outputs,
    norm,
    record_outputs,
    relative_error,
)
from mptrain.inspection.scale_check_observation import disable_dropout, largest_values
from mptrain.inspection.scale_check_ranges import EPSILONS, LOST, GradientErrors, OutputErrors
from mptrain.numerics.formats import Format
from mptrain.numerics.rounding import saturated
from mptrain.precision.apply import DTYPES
from mptrain.probe.module_trail import ModuleTrail
from mptrain.probe.observer import Observer, Operation
from mptrain.random_state import other_random_numbers
from mptrain.scaler.static import StaticScaler
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Objective

#: Exponents of the scales at which FP32 gradients are compared with those at scale 1.
FP32_EXPONENTS = (12, 24)

#: float64, by parameter.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Reference of the comparison: the gradients of one step without half precision, at the FP32 weights.

    Attributes:
        dtype: ``float64``; ``float32`` where the model or its task does not run in FP64.
        exact: Gradients of the half-precision forward pass, float64: of what its modules said.
        distances: What was measured of each parameter's gradient, without errors and shifts in half precision.
        breaks: Modules in which gradients stop being in proportion to the loss in FP32.
        outputs: How wrong what each module said is.
        values: The largest magnitude of each parameter and buffer.
        notes: What was done differently from training, one sentence each.
    """

    dtype: str
    exact: Gradients
    distances: dict[str, GradientErrors]
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
    notes = disable_dropout(parts.model)
    said32: Outputs = {}
    fp32 = _gradients_under(record_outputs(said32), parts, batch)
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
    wide = _gradients_under(record_outputs(right), parts, batch)
    replacement = OutputReplacement(said)
    with _weights(parts.model, weights or {}):
        exact = _gradients_under(replacement, parts, batch)
    exact32 = _gradients_under(OutputReplacement(said32), parts, batch)
    rounded = _rounded_outputs(parts, batch, form)
    return Reference(
        dtype=str(dtype).removeprefix("torch."),
        exact=exact,
        distances={
            name: GradientErrors(
                name,
                exact[name].numel(),
                norm(grad),
                fp32=distance(fp32[name], exact32[name]),
                expected=distance(exact[name], grad),
                fp32_shift=shifts[name],
                errors={},
                shifts={},
            )
            for name, grad in wide.items()
        },
        breaks=breaks,
        outputs={
            name: OutputErrors(
                half=relative_error(said.get(name, []), tensors),
                explained=relative_error(rounded.get(name, []), tensors),
                fp32=relative_error(said32.get(name, []), tensors),
                own=replacement.own_error(name),
                largest=max(
                    (float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) for one in tensors if one.numel()), default=0.0
                ),
            )
            for name, tensors in right.items()
        },
        values=values,
        notes=notes,
    )


def compare_scales(parts: Parts, batch: Batch, reference: Reference, exponents: Sequence[int]) -> list[GradientErrors]:
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
    disable_dropout(parts.model)
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
        replace(one, errors=dict(sorted(errors[name].items())), shifts=dict(sorted(shifts[name].items())))
        for name, one in reference.distances.items()
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


def _gradients_under(change: Change, parts: Parts, batch: Batch) -> Gradients:
    """The gradients at scale 1 where every output of a module is what a function makes of it."""
    with hook_outputs(parts.model, change):
        return gradients(parts, batch, 1.0)


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
    trail = ModuleTrail()
    observer = Observer(trail)
    plan = replace(parts.plan, products=observer.inside(parts.plan.products))
    with trail.followed(parts.model):
        gradients(replace(parts, plan=plan), batch, 1.0)
    return tuple(operation for operation in observer.operations if operation.breaks)


def find_breaks(
    parts: Parts, batch: Batch, scales: tuple[float, float], wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """Return the modules in which gradients stop being in proportion to the loss: see `breaks_proportion`.

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


def compare_backward(
    half: tuple[Parts, Batch],
    wide: Callable[[], tuple[Parts, Batch]],
    said: Outputs,
    scale: float,
    wrong: Collection[str],
    form: Format,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[str, ...], GradientPath]:
    """Find the modules that are handed right gradients in half precision and hand on wrong ones.

    Args:
        half: The run in its own precision and the batch as prepared for it; the model in training mode, without dropout.
        wide: Gives the same in ``precision=fp32``, as it was built, once half precision is done.
        said: What the modules said in half precision.
        scale: The loss scale.
        wrong: Names of the modules whose own parameters' gradients are wrong.
        form: The half-precision format.
        weights: See `compute_reference`.

    Returns:
        Those modules; and the right gradients, unscaled.
    """
    found, right = GradientPath(scale), GradientPath(1.0)
    with found.followed(half[0].model):
        gradients(*half, scale)
    parts, batch = wide()
    parts.model.train()
    disable_dropout(parts.model)
    with _weights(parts.model, weights or {}), right.followed(parts.model):
        _gradients_under(OutputReplacement(said), parts, batch)
    return breaks_proportion(right, found, wrong, EPSILONS * form.epsilon), right


def holding_gradients(right: GradientPath, module: str, scale: float, form: Format) -> str:
    """Return the module, or the one around it, whose inputs' gradients a half-precision format holds at a loss scale."""
    half = DTYPES[form.name]  # type: ignore[index]
    while module and not all(
        distance((gradient * scale).to(half).double() / scale, gradient) <= LOST * norm(gradient)
        for place, gradient in ((place, beside_fp64(kept).double()) for place, kept in right.kept.items())
        if place.module == module and place.side == "input"
    ):
        module = module.rpartition(".")[0]
    return module


@contextlib.contextmanager
def _weights(model: nn.Module, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Give some of a model's parameters other values, while this lasts."""
    changed = {name: value for name, value in model.named_parameters() if name in others}
    before = {name: value.detach().clone() for name, value in changed.items()}
    try:
        _copy(others, changed)
        yield
    finally:
        _copy(before, changed)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(values[name])


def _runs_in_float64(parts: Parts, batch: Batch) -> bool:
    """Return whether the model and its task run in FP64; the model is left in FP64 where they do, else in FP32."""
    for learner in parts.learners:
        learner.objective = _with_float32_loss(learner)
    try:
        if capabilities(parts.device).fp64:
            parts.model.double()
            gradients(parts, batch.cast(torch.float64), 1.0)
            return True
    except (RuntimeError, TypeError) as error:  # it casts to FP32 by itself
        if out_of_memory(error):
            raise
    parts.model.float()
    return False


def _with_float32_loss(learner: Learner) -> Objective:
    """The objective with its loss rounded to float32, which is what the engine takes."""
    loss = learner.objective.loss
    return replace(learner.objective, loss=lambda model, micro: loss(model, micro).float())


def _rounded_outputs(parts: Parts, batch: Batch, form: Format) -> Outputs:
    """Return the outputs of modules where weights, inputs and all outputs are rounded to a half-precision format.

    The weights stay rounded.
    """
    half = DTYPES[form.name]  # type: ignore[index]
    found: Outputs = {}
    keep = record_outputs(found)

    def rounded(name: str, value: Tensor) -> Tensor:
        return keep(name, value.to(half).to(value.dtype))

    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.copy_(saturated(parameter, half))
    _gradients_under(rounded, parts, batch.cast(half).cast(batch.inputs.dtype))
    return found
