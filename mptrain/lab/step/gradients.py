"""Gradients of one training step in FP64, in FP32, and in a precision mode at many loss scales.

The passes are those of the engine, so the measurements apply to training. No weight is updated, and all state that the
passes change is restored. Dropout is off, because its random numbers may depend on the dtype; all other random numbers
are the same in every pass.

A ReLU that rounding turns off changes the gradients of all layers before it by any amount. Half-precision gradients are
therefore compared with FP64 gradients in which every module output is replaced by its half-precision output: the same
ReLUs are on, and only the backward pass differs. Outputs of the forward pass are continuous and compared directly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.module_trail import LOSS, ModuleTrail
from mptrain.engine.observer import Observer, Operation
from mptrain.engine.parts import Parts
from mptrain.engine.step import Learner, accumulate_gradients
from mptrain.lab.step.module_tensors import (
    COMPARED,
    Change,
    GradientPath,
    OutputReplacement,
    Outputs,
    breaks_proportion,
    distance,
    hook_step,
    norm,
    record_outputs,
    relative_error,
)
from mptrain.lab.step.observation import SameDraws, disable_dropout, largest_values
from mptrain.lab.step.ranges import (
    EPSILONS,
    LOST,
    MUCH,
    NOTHING,
    GradientErrors,
    OperatorError,
    OutputErrors,
    RoundedOperator,
)
from mptrain.numerics.formats import Format
from mptrain.numerics.tensors import saturated
from mptrain.precision.apply import DTYPES
from mptrain.scaler.static import StaticScaler
from mptrain.system.device import beside_fp64, capabilities
from mptrain.system.errors import out_of_memory
from mptrain.system.process_state import other_random_numbers
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Objective

#: Exponents of the scales at which FP32 gradients are compared with those at scale 1.
FP32_EXPONENTS = (12, 24)

#: Ratio of errors up to which two operators are equally wrong.
SAME = 1.1

#: Gradients by parameter name, float64.
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Reference gradients and outputs of one training step without half precision, at the FP32 weights.

    Attributes:
        dtype: ``float64``, or ``float32`` if the model or its task does not run in FP64.
        exact: Gradients, float64 by parameter name, of an exact backward pass of the half-precision forward pass.
        distances: Gradient errors of each parameter, without those in half precision (``errors`` and ``shifts``).
        breaks: Modules whose backward pass breaks proportionality to the loss in FP32.
        outputs: Output errors of each module.
        values: Largest magnitude of each parameter and buffer.
        notes: Differences from training, one sentence each.
    """

    dtype: str
    exact: Gradients
    distances: dict[str, GradientErrors]
    breaks: tuple[str, ...]
    outputs: dict[str, OutputErrors]
    values: dict[str, float]
    notes: tuple[str, ...]


def compute_reference(
    parts: Parts,
    batch: Batch,
    form: Format,
    half_outputs: Outputs,
    weights: Mapping[str, Tensor] | None = None,
    inputs: torch.dtype = torch.float32,
) -> Reference:
    """Compute gradients and outputs of one step without half precision, to compare a half-precision step with.

    Args:
        parts: The run in ``precision=fp32``. Its model is left in another dtype and cannot be used afterwards.
        batch: The prepared batch.
        form: The half-precision format, for the expected rounding errors.
        half_outputs: Outputs of each module in half precision, call by call. Those that are not finite, which changes
            neither loss nor gradients, are replaced by exact ones.
        weights: Half-precision parameters by name that produced those outputs, if any. Their rounding belongs to the
            forward pass.
        inputs: Dtype of the model's inputs in half precision, whose rounding belongs to the forward pass too.

    Raises:
        ConfigError: The task's loss is not a float32 scalar.
    """
    parts.model.train()
    values = largest_values(parts.model)
    notes = disable_dropout(parts.model)
    said32: Outputs = {}
    fp32 = _gradients_under(record_outputs(said32, half_outputs), parts, batch)
    scaled = {
        exponent: _gradients_under(record_outputs({}, half_outputs), parts, batch, 2.0**exponent)
        for exponent in FP32_EXPONENTS
    }
    shifts = {name: max(distance(grads[name], grad) for grads in scaled.values()) for name, grad in fp32.items()}
    tolerance = EPSILONS * form.epsilon
    wrong = {name.rpartition(".")[0] for name, shift in shifts.items() if not shift <= tolerance * norm(fp32[name])}
    breaks = find_breaks(parts, batch, (1.0, 2.0 ** FP32_EXPONENTS[-1]), wrong, tolerance) if wrong else ()
    dtype = torch.float64 if runs_in_float64(parts, batch) else torch.float32
    if dtype == torch.float32:
        notes = (*notes, "the model does not run in FP64, so gradients are compared with FP32")
    batch = batch.cast(dtype)
    right: Outputs = {}
    wide = _gradients_under(record_outputs(right, half_outputs), parts, batch)
    if unread := _leave_out_unread(parts, batch, half_outputs, right, wide, tolerance):
        named = ", ".join(dict.fromkeys(boundary or "the model" for boundary in unread))
        notes = (*notes, f"{named}: values are not finite in {form.name}, which changes neither loss nor gradients")
    replacement = OutputReplacement(half_outputs)
    with _weights(parts.model, weights or {}):
        exact = _gradients_under(replacement, parts, batch.cast(inputs).cast(dtype))
    exact32 = _gradients_under(OutputReplacement(said32), parts, batch)
    rounded = _rounded_outputs(parts, batch, form, half_outputs, inputs)
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
        outputs=_output_errors(half_outputs, right, rounded, said32, replacement),
        values=values,
        notes=notes,
    )


def _output_errors(
    half_outputs: Outputs, right: Outputs, rounded: Outputs, said32: Outputs, replacement: OutputReplacement
) -> dict[str, OutputErrors]:
    """Return the errors at each boundary; of an output that is rounding itself, in FP64, there are none."""
    errors: dict[str, OutputErrors] = {}
    typical = 0.0  # root mean square of the largest output so far
    for name, tensors in right.items():
        if COMPARED in name:
            continue
        elements = sum(tensor.numel() for tensor in tensors)
        size = math.hypot(*(norm(tensor.nan_to_num(0.0, 0.0, 0.0)) for tensor in tensors)) / math.sqrt(max(elements, 1))
        fp32 = relative_error(said32.get(name, []), tensors)
        typical = max(typical, size)
        if 0 < size <= NOTHING * typical and fp32 > MUCH:  # such as the normalised value of a single element
            errors[name] = OutputErrors(half=0.0, explained=0.0, fp32=0.0, own=0.0)
            continue
        errors[name] = OutputErrors(
            half=relative_error(half_outputs.get(name, []), tensors),
            explained=relative_error(rounded.get(name, []), tensors),
            fp32=fp32,
            own=replacement.own_error(name),
            largest=max(
                (float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()) for tensor in tensors if tensor.numel()),
                default=0.0,
            ),
        )
    return errors


def compare_scales(parts: Parts, batch: Batch, reference: Reference, exponents: Sequence[int]) -> list[GradientErrors]:
    """Measure the gradient errors of a half-precision step, for each parameter with a gradient, at many loss scales.

    The scales are powers of two with these exponents. The scale of the learners of ``parts``, the run in its own
    precision, is changed. ``reference`` belongs to the same step.
    """
    parts.model.train()
    disable_dropout(parts.model)
    errors: dict[str, dict[int, float]] = {name: {} for name in reference.exact}
    shifts: dict[str, dict[int, float]] = {name: {} for name in reference.exact}
    anchors: Gradients = {}
    for exponent in sorted(exponents, reverse=True):  # descending, so that the highest finite scale comes first
        for name, grad in scaled_gradients(parts, batch, 2.0**exponent).items():
            if name not in errors:
                continue  # it has no gradient without half precision
            errors[name][exponent] = distance(grad, reference.exact[name])
            if torch.isfinite(grad).all():
                anchors.setdefault(name, grad)
            shifts[name][exponent] = distance(grad, anchors.get(name, grad))
    return [
        replace(distances, errors=dict(sorted(errors[name].items())), shifts=dict(sorted(shifts[name].items())))
        for name, distances in reference.distances.items()
        if errors[name]
    ]


def scaled_gradients(parts: Parts, batch: Batch, scale: float) -> Gradients:
    """Return the unscaled gradients of one training step of all learners, float64 by parameter name.

    A learner is a model with its optimizer; a GAN has two. No weight is updated. The model is in training mode, and the
    learners keep the loss scale.
    """
    grads: Gradients = {}
    guard = BufferGuard(parts.model)  # the dtype of the model may have changed since it was built
    with guard.unharmed(parts.task), other_random_numbers(parts.device), SameDraws():
        for learner in parts.learners:
            learner.scaler = StaticScaler(scale=scale)
            learner.scale_state = learner.scaler.initial(parts.device)
            learner.weights.gradients.zero_grad()
            accumulate_gradients(learner, parts.model, batch, parts.plan)
            grads |= {
                name: beside_fp64(grad).double() / scale for name, grad in learner.weights.gradients.by_name().items()
            }
            learner.weights.gradients.zero_grad()
    return grads


def _gradients_under(change: Change, parts: Parts, batch: Batch, scale: float = 1.0) -> Gradients:
    with hook_step(parts, change):
        return scaled_gradients(parts, batch, scale)


def is_finite(parts: Parts, batch: Batch) -> bool:
    """Return whether all gradients of a training step without a loss scale are finite, in training mode."""
    return all(bool(torch.isfinite(grad).all()) for grad in scaled_gradients(parts, batch, 1.0).values())


def operators(parts: Parts, batch: Batch) -> tuple[Operation, ...]:
    """Return the operator calls of a step without a loss scale, in order."""
    parts.model.train()
    trail = ModuleTrail()
    observer = Observer(trail)
    plan = replace(parts.plan, products=observer.inside(parts.plan.products))
    with trail.followed(parts.model):
        scaled_gradients(replace(parts, plan=plan), batch, 1.0)
    return tuple(observer.operations)


def operator_errors(
    half: tuple[Parts, Batch],
    wide: Callable[[], tuple[Parts, Batch]],
    half_outputs: Outputs,
    wrong: Mapping[str, str],
    form: Format,
) -> dict[str, OperatorError]:
    """Return the operator of each of some modules whose rounding makes the module wrong in the forward pass.

    Args:
        half: The run in half precision and its prepared batch.
        wide: Function that returns a newly built run in ``precision=fp32`` and its batch.
        half_outputs: Tensors at the boundaries of modules in half precision, call by call.
        wrong: The boundary at which each module is wrong (a key of ``half_outputs``), by qualified name of the module.
        form: The half-precision format.

    Returns:
        The operators by module, or tensors that it stores; empty if the model or its task does not run in FP64.
    """
    dtype = DTYPES[form.name]  # type: ignore[index]
    rounds: dict[tuple[str, str], list[bool]] = {}

    def observed(
        parts: Parts, batch: Batch, change: Change, chosen: str | None = None, inside: bool = False
    ) -> RoundedOperator:
        trail = ModuleTrail()
        rounding = RoundedOperator(trail, wrong, dtype, chosen, inside, rounds)
        plan = replace(parts.plan, products=rounding.inside(parts.plan.products))
        with trail.followed(parts.model):
            _gradients_under(change, replace(parts, plan=plan), batch)
        return rounding

    in_half = {key: calls for key, calls in observed(*half, lambda _, value: value).calls.items() if any(calls)}
    stored = {name: tensor.detach() for name, tensor in _tensors(half[0].model).items() if tensor.dtype == dtype}
    parts, batch = wide()
    parts.model.train()
    disable_dropout(parts.model)
    if not runs_in_float64(parts, batch):
        return {}
    batch = batch.cast(torch.float64)

    def own(chosen: str | None = None, inside: bool = False) -> Outputs:
        computed, replacement = Outputs(), OutputReplacement({} if inside else half_outputs)
        keep = record_outputs(computed)
        observed(parts, batch, lambda at, tensor: replacement(at, keep(at, tensor)), chosen, inside)
        return computed

    worst: dict[str, OperatorError] = {}

    def judge(module: str, what: str, changed: Outputs, plain: Outputs) -> None:
        error = relative_error(changed.get(wrong[module], []), plain.get(wrong[module], []))
        known = worst.get(module, OperatorError("", EPSILONS * form.epsilon / 4)).error
        if error > SAME * known:  # the first of those that only pass values on
            worst[module] = OperatorError(what, error)

    calls64 = observed(parts, batch, lambda _, value: value).calls
    rounds.update({key: calls for key, calls in in_half.items() if len(calls) == len(calls64.get(key, ()))})
    plain = own()
    for name in [tensor_name for tensor_name in stored if tensor_name.rpartition(".")[0] in wrong]:
        with _weights(parts.model, {name: stored[name]}):
            judge(name.rpartition(".")[0], name, own(), plain)
    with _weights(parts.model, stored):
        for inside in (False, True):
            plain = own(None, inside)
            wanted = [key for key in in_half if key[0] not in worst or not inside]
            rounded = {chosen: own(chosen, inside) for chosen in dict.fromkeys(name for _, name in wanted)}
            for module, name in wanted:
                judge(module, name, rounded[name], plain)
    return worst


def find_breaks(
    parts: Parts, batch: Batch, scales: tuple[float, float], wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """Return the modules whose backward pass returns gradients that are not proportional to the loss scale.

    Gradients are linear in the loss: at twice the loss scale every gradient must be twice as large. The backward pass
    runs at two scales, of which the first is the reference, and `breaks_proportion` finds the innermost modules where
    this fails. The model is in training mode.
    """
    reference, other = (GradientPath(scale) for scale in scales)
    for path in (reference, other):
        with path.followed(parts.model):
            scaled_gradients(parts, batch, path.scale)
    return breaks_proportion(reference, other, wrong, tolerance)


def compare_backward(
    half: tuple[Parts, Batch],
    wide: Callable[[], tuple[Parts, Batch]],
    half_outputs: Outputs,
    scale: float,
    wrong: Collection[str],
    form: Format,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[str, ...], GradientPath]:
    """Find the modules that receive correct gradients in half precision and return wrong ones.

    Args:
        half: The run in its own precision and its prepared batch. The model is in training mode, without dropout.
        wide: Function that returns a newly built run in ``precision=fp32`` and its batch; called after the
            half-precision passes.
        half_outputs: Outputs of each module in half precision, call by call.
        scale: The loss scale.
        wrong: Names of the modules whose own parameters' gradients are wrong.
        form: The half-precision format.
        weights: Half-precision parameters by name that produced ``half_outputs``, if any.

    Returns:
        Qualified names of those modules, and the correct unscaled gradients at all module boundaries.
    """
    half_path, right = GradientPath(scale), GradientPath(1.0)
    with half_path.followed(half[0].model):
        scaled_gradients(*half, scale)
    parts, batch = wide()
    parts.model.train()
    disable_dropout(parts.model)
    with _weights(parts.model, weights or {}), right.followed(parts.model):
        _gradients_under(OutputReplacement(half_outputs), parts, batch)
    return breaks_proportion(right, half_path, wrong, EPSILONS * form.epsilon), right


def holding_gradients(right: GradientPath, module: str, scale: float, form: Format) -> str:
    """Return the module, or its nearest parent, whose input gradients fit the half-precision format at a loss scale.

    Gradients fit if rounding them to the format loses at most the share `LOST` of their norm. ``right`` has the correct
    unscaled gradients at all module boundaries.
    """
    half = DTYPES[form.name]  # type: ignore[index]
    while module and not all(
        distance((gradient * scale).to(half).double() / scale, gradient) <= LOST * norm(gradient)
        for location, gradient in ((location, beside_fp64(kept).double()) for location, kept in right.kept.items())
        if location.module == module and location.side == "input"
    ):
        module = module.rpartition(".")[0]
    return module


def _leave_out_unread(
    parts: Parts, batch: Batch, half_outputs: Outputs, right: Outputs, wide: Gradients, tolerance: float
) -> list[str]:
    """Replace tensors that are infinite in half precision alone by exact ones if neither loss nor gradients change.

    The first with which they change ends the search: others may follow from it. Returns the replaced boundaries.
    """
    unread: list[str] = []
    for boundary, tensors in right.items():
        for at, (half_tensor, other) in enumerate(zip(half_outputs.get(boundary, ()), tensors, strict=False)):
            if half_tensor.shape == other.shape and not (half_tensor.isfinite() | ~other.isfinite()).all():
                recorded: Outputs = {}
                others = {boundary: [*tensors[:at], half_tensor, *tensors[at + 1 :]]}
                keep, swap = record_outputs(recorded, half_outputs), OutputReplacement(others)
                grads = _gradients_under(lambda at, value: keep(at, swap(at, value)), parts, batch)  # noqa: B023
                same = [distance(grads[name], grad) <= tolerance * norm(grad) for name, grad in wide.items()]
                if not all(same) or relative_error(recorded[LOSS], right[LOSS]) > tolerance:
                    return unread
                half_outputs[boundary][at] = other
                unread.append(boundary)
    return unread


@contextlib.contextmanager
def _weights(model: nn.Module, others: Mapping[str, Tensor]) -> Iterator[None]:
    changed = {name: value for name, value in _tensors(model).items() if name in others}
    before = {name: value.detach().clone() for name, value in changed.items()}
    try:
        _copy(others, changed)
        yield
    finally:
        _copy(before, changed)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(values[name])


def runs_in_float64(parts: Parts, batch: Batch) -> bool:
    """Return whether the model and its task run in FP64, and leave the model in FP64 if so, otherwise in FP32.

    The losses of ``parts`` become float32.
    """
    for learner in parts.learners:
        learner.objective = _with_float32_loss(learner)
    try:
        if capabilities(parts.device).fp64:
            parts.model.double()
            scaled_gradients(parts, batch.cast(torch.float64), 1.0)
            return True
    except (RuntimeError, TypeError) as error:  # for example because the model casts to FP32
        if out_of_memory(error):
            raise
    parts.model.float()
    return False


def _with_float32_loss(learner: Learner) -> Objective:
    loss = learner.objective.loss
    return replace(learner.objective, loss=lambda model, micro: loss(model, micro).float())


def _rounded_outputs(parts: Parts, batch: Batch, form: Format, half_outputs: Outputs, inputs: torch.dtype) -> Outputs:
    """Return outputs with weights, inputs and outputs rounded to a format; the weights of the model stay rounded.

    ``inputs`` is the dtype to which the mode rounds the model's inputs.
    """
    half = DTYPES[form.name]  # type: ignore[index]
    outputs: Outputs = {}
    keep = record_outputs(outputs, half_outputs)

    def rounded(name: str, value: Tensor) -> Tensor:
        plain = name == LOSS or COMPARED in name or not value.is_floating_point()
        return keep(name, value if plain else value.to(half).to(value.dtype))

    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.copy_(saturated(parameter, half))
    _gradients_under(rounded, parts, batch.cast(inputs).cast(batch.inputs.dtype))
    return outputs
