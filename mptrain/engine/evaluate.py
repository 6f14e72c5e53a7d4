"""Evaluation of a model on a split. It must not run inside a training step or consume the training's random numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.exhibit import on_host
from mptrain.engine.fingerprints import sample_digests
from mptrain.engine.sample_metrics import SampleMetrics
from mptrain.engine.weights_io import set_extra_states
from mptrain.numerics.tensors import saturated, whole
from mptrain.system.process_state import other_random_numbers
from mptrain.system.records import EvalRecord
from mptrain.system.words import listed
from mptrain.workloads.base.task import Exhibit, Task

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.loader import Loader


@dataclass(frozen=True)
class EvalResult:
    """Metrics of a model on a split, and pictures, texts or sounds that the task shows, by name, if requested.

    ``doubts`` are warnings about the task's measures.
    """

    record: EvalRecord
    exhibits: dict[str, Exhibit] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()


def evaluate(
    parts: Parts,
    loader: Loader,
    split: str,
    step: int,
    epoch: int,
    stop: Callable[[], bool],
    *,
    average: bool = True,
    exhibit: bool = False,
    intervals: bool = False,
) -> EvalResult | None:
    """Evaluate a run's current weights on all samples of a split; None if aborted. All ranks must call this together.

    Sums are accumulated on the device and read at the end. With several ranks, each measures its part of every batch;
    the metrics cover all samples, each counted once. The split is not shuffled; ``step`` and ``epoch`` are for the
    record. ``stop``, called between batches, aborts the evaluation. ``average`` evaluates the running average of the
    weights if there is one, ``exhibit`` collects what the task shows of the first batch, on rank 0, and ``intervals``
    computes 95 % confidence intervals of the metrics over the choice of samples.
    """
    gathered, comm = SampleMetrics(), parts.comm
    exhibits: dict[str, Exhibit] = {}
    scalars: tuple[Batch, dict[str, Tensor]] | None = None
    with measuring(parts, average=average) as (model, prepare, autocast):
        for batch in loader.batches(epoch=0):
            if stop():
                return None
            if batch.is_dummy:
                gathered.skip()
                continue
            prepared = prepare(batch)
            with autocast:
                if exhibit and comm.is_rank_zero and not gathered.samples:
                    exhibits = parts.task.exhibits(model, prepared)
                sums = parts.task.measure(model, prepared)
                gathered.add(prepared, sums, parts.task.answers(model, prepared), sample_digests(batch))
                named = {name: value for name, value in sums.items() if value.numel() == 1}
                if named and scalars is None and comm.is_rank_zero:
                    scalars = prepared, named
        with autocast:  # last, because a model may keep state until it is restored
            doubts = _means(parts.task, model, *scalars) if scalars is not None else ()
    gathered = gathered.over(comm)
    metrics = gathered.metrics(parts.task)
    reach = gathered.intervals(parts.task, metrics) if intervals else {}
    record = EvalRecord(split, step, epoch, gathered.samples, metrics, reach, gathered.digest)
    return EvalResult(record, {name: on_host(shown) for name, shown in exhibits.items()}, doubts)


def _means(task: Task, model: nn.Module, batch: Batch, scalars: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a warning if scalars that a task measures of a batch are means: those of its halves average to them.

    Sums of the halves add up. The margins are wide enough for rounding in half precision, and a measure that draws
    random numbers is no mean by chance: its sums would have to differ by half.
    """
    try:
        halves = batch.split(2)
        (first, second), share = (task.measure(model, half) for half in halves), halves[0].terms / batch.terms
        means = [
            name
            for name, whole in scalars.items()
            if abs(share * first[name] + (1 - share) * second[name] - whole) <= 0.01 * abs(whole)
            and abs(first[name] + second[name] - whole) > 0.5 * abs(whole)
        ]
    except Exception:  # one sample has no halves, and a task may refuse some
        return ()
    return (f"measure() of the task returns {listed(means)} as a mean, not as a sum over its terms",) if means else ()


@contextlib.contextmanager
def measuring(
    parts: Parts, *, average: bool
) -> Iterator[tuple[nn.Module, Callable[[Batch], Batch], contextlib.AbstractContextManager[object]]]:
    """Give the model of an evaluation, in its mode and precision, the preparation of batches, and a forward's autocast.

    All ranks must enter this together. Afterwards the model and the generators of random numbers are as before.
    """
    wide = parts.policy.eval == "fp32" and parts.policy.reduced
    prepare = parts.prepare_float32 if wide else parts.prepare
    inert, model = contextlib.nullcontext(), gather_model(parts)
    of_model = parts.plan.products if model is parts.model else parts.plan.products.of(model)
    products, autocast = (inert, inert) if wide else (of_model.context, parts.plan.autocast)
    with in_evaluation_mode(parts, model, _weights_to_measure(parts, model, wide=wide, average=average)), products:
        yield model, prepare, autocast


@contextlib.contextmanager
def in_evaluation_mode(
    parts: Parts, model: nn.Module, weights: contextlib.AbstractContextManager[None] | None = None
) -> Iterator[None]:
    """Evaluate a model inside the ``with`` block: no gradients, separate random numbers, and its buffers restored.

    ``weights`` is entered before the model is in its evaluation mode, and left after it.
    """
    was_training = model.training
    with undone(parts, model, parts.comm.rank), weights or contextlib.nullcontext():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


@contextlib.contextmanager
def undone(parts: Parts, model: nn.Module, seed: int) -> Iterator[None]:
    """Restore generators of random numbers, which are seeded meanwhile, modes and buffers afterwards; no gradients."""
    modes = [(module, module.training) for module in model.modules()]
    parts.plan.guard.snapshot()
    try:
        with torch.no_grad(), other_random_numbers(parts.device, seed):
            yield
    finally:
        for module, training in modes:
            module.training = training
        parts.plan.guard.restore(torch.ones(1, device=parts.device))  # a model may keep state in its buffers


@contextlib.contextmanager
def _weights_to_measure(parts: Parts, model: nn.Module, *, wide: bool, average: bool) -> Iterator[None]:
    """Give the model itself the weights and dtypes requested inside the ``with`` block.

    The tensors stay the same objects with other data, because closures, hooks and attributes may refer to them; in a
    copy of the model they would lead to the original.
    """
    values = {name: whole(value) for name, value in parts.averages().items()} if average else {}
    wide = wide and parts.policy.parameters != "float32"
    if wide:
        values = {**{name: whole(value) for name, value in parts.full_precision().items()}, **values}
    tensors: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if wide or name in values
    }
    tensors |= dict(model.named_buffers()) if wide else {}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    before = [(tensor, tensor.data) for tensor in tensors.values()]
    kept: list[Any] = [module for module in model.modules() if wide and hasattr(module, "answers_in")]
    answers = [module.answers_in for module in kept]
    try:
        for name, tensor in tensors.items():
            dtype = torch.float32 if wide else tensor.dtype
            tensor.data = torch.empty_like(tensor.data, dtype=dtype).copy_(
                saturated(values.get(name, tensor.data), dtype)
            )
        for module in kept:
            module.answers_in = torch.float32
        if tensors:
            _join_recurrent_weights(model)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
        for module, dtype in zip(kept, answers, strict=True):
            module.answers_in = dtype


def _join_recurrent_weights(model: nn.Module) -> None:
    """Lay the weights of each recurrent layer out as cuDNN needs them; else it would do so in each call."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def gather_model(parts: Parts) -> nn.Module:
    """Return a run's model in training dtypes, or a gathered copy if sharded. All ranks must call this."""
    if parts.blank is None:
        return parts.model
    model = copy.deepcopy(parts.blank)
    copies: dict[int, Tensor] = {}
    for path, module in parts.model.named_modules():
        own = model.get_submodule(path)._buffers  # training may have made or reshaped some
        for name, buffer in module._buffers.items():
            own[name] = None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
    set_extra_states(model, parts.model.state_dict(), "the model")
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    values = {name: saturated(whole(value), dtypes[name]) for name, value in parts.model.named_parameters()}
    return with_values(model, values)


def without_storage(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters on the meta device: with shapes and dtypes, but without memory."""
    blank = copy.deepcopy(model)
    return with_values(blank, {name: torch.empty_like(p, device="meta") for name, p in blank.named_parameters()})


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Replace all parameters of a model by other tensors, without copying them, and return the model.

    Tied parameters stay tied; the tensor of the first name is used.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                full_name = f"{path}.{name}" if path else name
                made[id(parameter)] = nn.Parameter(values[full_name].detach(), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    return model


def with_weights(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy values of any dtype into parameters of a copy by name, in place, and return it; FP16 saturates."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                parameter.copy_(saturated(values[name], parameter.dtype))
    _join_recurrent_weights(model)
    return model
