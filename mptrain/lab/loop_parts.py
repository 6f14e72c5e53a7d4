"""Model, batch and loss of a training loop that is not mptrain's, as the parts of a configuration that names them.

So a loop is examined by the code that examines runs: every precision and remedy builds these parts anew.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.config.compose import compose, recompose
from mptrain.config.schema import Config
from mptrain.precision.apply import cast_floating
from mptrain.probe.module_trail import unwrapped
from mptrain.system.errors import ConfigError, instance
from mptrain.system.process_state import other_random_numbers, settings_restored
from mptrain.system.torch_private import disable_current_modes, storage_key, tree_leaves, tree_map
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.dataset import Dataset, IndependentSamples
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.task import OneNetworkTask

#: Function of a model and a batch: the loss, a tensor with one element.
LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LoopBatch(Batch):
    """Batch in the form in which a loop has it: tensors in nested lists, tuples, mappings, or anything else.

    ``extras`` has all its tensors by their place, such as ``batch[0]``.

    Attributes:
        value: The batch itself.
        model_inputs: Places of the floating-point tensors that a model in half precision is given in half precision.
        is_even: Whether the batch is only tensors whose first dimensions are equal: those of the samples.
    """

    value: Any = None
    model_inputs: frozenset[str] = frozenset()
    is_even: bool = False

    @classmethod
    def of(cls, value: Any, find_inputs: Callable[[Mapping[str, Tensor]], Sequence[str]]) -> LoopBatch:
        """Return the batch of a value. ``find_inputs`` returns the places of the tensors that the model is given."""
        tensors = dict(_tensors(value))
        given = [name for name in find_inputs(tensors) if tensors[name].ndim]
        floating = [name for name in given if tensors[name].is_floating_point()]
        first = next(iter((*floating, *given)), "")
        inputs = tensors.get(first, torch.zeros(1, dtype=torch.int64, device="cpu"))
        leaves = [one for one in tree_leaves(value) if one is not None]
        even = len(leaves) == len(tensors) and len({tensor.shape[:1] for tensor in leaves}) == 1
        return cls(inputs, inputs, extras=tensors, value=value, model_inputs=frozenset(floating), is_even=even)

    @property
    @override
    def samples(self) -> int:
        return len(self.inputs) if self.is_even else 1

    @override
    def cast(self, dtype: torch.dtype) -> LoopBatch:
        if not dtype.is_floating_point:  # that of inputs without floating-point values, such as tokens
            return self
        names = self.model_inputs if dtype in _HALVES else self.extras
        return self._changed(lambda name, one: cast_floating(one, dtype) if name in names else one)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {f"values of {name}": tensor for name, tensor in self.extras.items()}

    def rebuilt(self) -> Any:
        """Return the batch in the form of the loop, with copies of its present tensors, which the loop may change."""
        with disable_current_modes():  # no operators of the loop
            return _rebuilt(self.value, {name: tensor.detach().clone() for name, tensor in self.extras.items()})

    @override
    def _each(self, change: Callable[[Tensor], Tensor]) -> LoopBatch:
        return self._changed(lambda _, one: change(one))

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> LoopBatch:
        tensors = {name: change(name, one) for name, one in self.extras.items()}
        first = next((tensors[name] for name, one in self.extras.items() if one is self.inputs), self.inputs)
        return replace(self, inputs=first, targets=first, extras=tensors)


def _tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    for key, inner in _inside(value).items():
        yield from _tensors(inner, f"{name}[{key!r}]")


def _inside(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _rebuilt(value: Any, tensors: Mapping[str, Tensor], name: str = "batch") -> Any:
    inner = {key: _rebuilt(one, tensors, f"{name}[{key!r}]") for key, one in _inside(value).items()}
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)  # also what transformers' tokenizers return
        for key, one in inner.items():
            made[key] = one
        return made
    if isinstance(value, list | tuple):
        return type(value)(*inner.values()) if hasattr(value, "_fields") else type(value)(inner.values())
    return tensors.get(name, value)


class Loop:
    """Model, loss function and batch that a caller has given of a training loop; nothing of them is changed.

    Raises ConfigError if the model is not in FP32 or cannot be copied, or the loss is no tensor with one element.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, batch: Any, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.model, self.loss_fn = unwrapped(model), loss_fn
        params = list(self.model.parameters())
        if halves := {one.dtype for one in params} & {*_HALVES}:
            raise ConfigError(f"the model has parameters in {halves.pop()}", "give it in FP32: precision= casts a copy")
        self.device = params[0].device if params else torch.device("cpu")
        groups = [] if optimizer is None else optimizer.param_groups
        trained = params if optimizer is None else [one for group in groups for one in group["params"]]
        self._trained = {id(one) for one in trained if one.requires_grad}
        self.batch = LoopBatch.of(batch, lambda tensors: self._find_inputs(batch, tensors))

    def copied(self) -> nn.Module:
        """Return a copy of the model in training mode. One in half precision casts what it is given, as FSDP does.

        Modules that the caller has put into evaluation mode stay in it, unless the whole model is in that mode.
        """
        try:
            made = copy.deepcopy(self.model)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"the model cannot be copied: {error}", "give one that copy.deepcopy takes") from error
        for own, other in zip(self.model.parameters(), made.parameters(), strict=True):
            other.requires_grad_(id(own) in self._trained)
        if made.training:
            made.train = types.MethodType(_keep_modes, made)  # type: ignore[method-assign]
        made.register_forward_pre_hook(_cast_to_model, with_kwargs=True)
        return made

    def _find_inputs(self, batch: Any, tensors: Mapping[str, Tensor]) -> list[str]:
        """Compute the loss once, in FP32, and return the places of the tensors that a module of the model is given."""
        given = {name: one.detach().clone() for name, one in tensors.items()}
        places = {key: name for name, one in given.items() for key in _memory(one)}
        found: dict[str, None] = {}

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_autocast_enabled(self.device.type):
                raise ConfigError("loss_fn or the model uses autocast", "leave it out: precision= chooses autocast")
            found.update(dict.fromkeys(places[key] for key in _memory((args, kwargs)) if key in places))

        model = self.copied().train()
        for module in model.modules():
            module.register_forward_pre_hook(look, with_kwargs=True)
        loss = self.loss_fn(model, _rebuilt(batch, given))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else instance(loss)
            raise ConfigError(f"loss_fn returned {got}", "return the loss, a tensor with one element")
        trained = [one for one in model.parameters() if one.requires_grad]
        reached = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad and trained else ()
        if all(one is None for one in reached):
            what = "the loss does not depend on a parameter of the model that loss_fn is given"
            raise ConfigError(what, "compute it with its first argument, which is a copy of the model")
        return list(found)


def _memory(values: Any) -> list[int]:
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.layout == torch.strided)
    return [storage_key(one.untyped_storage()) for one in tensors]


def _keep_modes(model: nn.Module, mode: bool = True) -> nn.Module:
    return model


def _cast_to_model(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floating-point arguments to the dtype of a model's parameters, if that is another than FP32."""
    dtypes = [one.dtype for one in model.parameters() if one.dtype in (*_HALVES, torch.float64)]
    return tree_map(lambda one: cast_floating(one, dtypes[0]), (args, kwargs)) if dtypes else (args, kwargs)


_LOOP: ContextVar[Loop] = ContextVar("loop")


def loop_model() -> nn.Module:
    """Return a copy of the model of the loop under examination."""
    return _LOOP.get().copied()


class LoopData(IndependentSamples, Dataset):
    """Data set, and its training split, with one sample: the batch of the loop under examination."""

    name, workers, val, test, in_memory = "loop", 0, None, None, True

    def __init__(self) -> None:
        self.train, self.faults = self, Faults()

    def __len__(self) -> int:
        return 1

    @override
    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        return _LOOP.get().batch.to(torch.device("cpu")).clone()

    @override
    def facts(self) -> dict[str, Any]:
        return {}

    @override
    def card(self) -> dict[str, Any]:
        return {}


class LoopTask(OneNetworkTask):
    """Task with the loss of the loop under examination, and without metrics."""

    metric, higher_is_better = None, False

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, LoopBatch)
        return _LOOP.get().loss_fn(model, batch.rebuilt()).float().reshape(())

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {}


#: Nodes of the configuration of a loop that name its parts, and words for it.
_PARTS = {
    "model": {"_target_": f"{__name__}.loop_model"},
    "dataset": {"_target_": f"{__name__}.LoopData"},
    "task": {"_target_": f"{__name__}.LoopTask"},
    "extensions": {"allow": [__name__]},
}
_WORDS = (
    *("optimizer=sgd", "schedule=constant", "train.batch_size=1", "train.channels_last=false"),
    "train.max_consecutive_overflows=1000",  # a loop of torch has no such end
)


@contextlib.contextmanager
def loop_config(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    words: Sequence[str],
) -> Iterator[Config]:
    """Yield a configuration whose parts are those of a loop, and restore random numbers and torch's settings.

    Raises ConfigError as `Loop`, or if the words, such as ``precision=amp_dynamic``, are invalid.
    """
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    with contextlib.ExitStack() as restore:
        for setting in (settings_restored(), other_random_numbers(device)):
            restore.enter_context(setting)
        for mode in (torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False)):
            restore.enter_context(mode)
        restore.callback(_LOOP.reset, _LOOP.set(Loop(model, loss_fn, batch, optimizer)))
        config = compose((*_WORDS, f"device={device}", *words))
        yield recompose({**config.tree, **_PARTS}, allow=(__name__,))
