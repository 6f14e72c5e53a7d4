"""Tracking of the running module, and names of modules and parameters without the prefixes of wrappers.

The hooks are removed when tracking ends. They read tensors and change nothing.

Autograd numbers nodes separately in each thread. With `torch.utils.checkpoint` on a GPU, part of the forward pass is
recomputed in autograd's thread, whose numbers cannot be compared with those of the main thread and are ignored.
Backward operators of a reentrant checkpoint on a GPU may therefore be attributed to another module.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mptrain.precision.census import floating_in
from mptrain.system.torch_private import (
    current_autograd_node,
    disable_current_modes,
    is_transforming,
    number_of_node,
    sequence_number,
)

#: Module name for operators outside all modules: the loss, and the task's arithmetic on the outputs of the model.
LOSS = "(loss)"

#: The sequence number of nodes that accumulate gradients; they belong to no operator.
_ACCUMULATES = 2**64 - 1


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is a submodule of another, at any depth, by qualified name; the model's name is empty."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@contextlib.contextmanager
def module_hooks(model: nn.Module, register: Callable[[str, nn.Module], Iterable[Any]]) -> Iterator[None]:
    """Hook all modules except TorchScript's, and remove the hooks, which ``register`` returns, on exit."""
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for handle in register(name, module):
                    hooks.callback(handle.remove)
        yield


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Finished call of a module by qualified name, and whether its floating-point inputs and output were finite."""

    module: str
    finite_inputs: bool
    finite_output: bool


class ModuleTrail:
    """Tracker of the module that runs at any moment of a forward or backward pass, by its qualified name.

    The model itself has the empty name; operators outside all modules, such as the loss, have the name `LOSS`.
    ``calls`` counts calls in the forward pass, in the order of the first ones. With ``check_finite``, finished calls
    are recorded in ``ended``, for which the device is waited for. ``raised_in`` is the innermost module that raised an
    exception, and that exception.
    """

    def __init__(self, *, check_finite: bool = True) -> None:
        self._check_finite = check_finite
        self.calls: dict[str, int] = {}
        self.ended: list[ModuleCall] = []
        self.raised_in: tuple[str, BaseException] | None = None
        self._stack: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # inner spans before the spans that enclose them
        self._known: dict[int, str] = {}
        self._latest = LOSS
        self._thread = threading.get_ident()

    def followed(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager that hooks the model's modules and tracks their calls; hooks are removed on exit."""

        def hooked(name: str, module: nn.Module) -> Iterator[Any]:
            yield module.register_forward_pre_hook(self._entering(name), prepend=True)
            yield module.register_forward_hook(self._leaving, with_kwargs=True, always_call=True)

        return module_hooks(model, hooked)

    def module(self) -> str:
        """Return the module of the operator being dispatched; backward, the module whose call created the node."""
        node: Any = current_autograd_node()
        if self._stack:  # also when the backward pass recomputes part of the forward pass
            return self._stack[-1][0]
        if node is None:
            return LOSS
        number = number_of_node(node)
        if number != _ACCUMULATES:
            self._latest = self.of_node(number)
        return self._latest

    def of_node(self, number: int) -> str:
        """Return the innermost module whose call created the autograd node of a sequence number; `LOSS` if none did."""
        if number not in self._known:
            inside = (name for first, end, name in self._spans if first <= number < end)
            self._known[number] = next(inside, LOSS)
        return self._known[number]

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            again = current_autograd_node() is not None
            self.calls[name] = self.calls.get(name, 0) + (not again)
            self._stack.append((name, sequence_number()))

        return hook

    def _leaving(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._stack:  # the call failed before its pre-hook ran
            return
        name, first = self._stack.pop()
        if threading.get_ident() == self._thread:
            self._spans.append((first, sequence_number(), name))
        error = sys.exc_info()[1]
        if error is None and self._check_finite and not is_transforming():
            self.ended.append(ModuleCall(name, _are_finite((args, kwargs)), _are_finite(output)))
        elif error is not None and (self.raised_in is None or self.raised_in[1] is not error):
            self.raised_in = (name, error)


def _are_finite(values: Any) -> bool:
    """Return whether all floating-point tensors in a nested value are finite, hidden from the observer."""
    with torch.no_grad(), disable_current_modes():
        return all(bool(tensor.isfinite().all()) for tensor in floating_in(values))  # waits for the device


#: Attributes under which wrappers keep the module: torch.compile, DataParallel and DDP, Fabric (twice), checkpoints.
_WRAPPERS = frozenset(
    {"_orig_mod", "module", "_forward_module", "_original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def named_models(model: Models) -> dict[str, nn.Module]:
    """Return models by the prefix of their names: empty for a single one, else ``KEY.`` or ``0.``, ``1.`` ..."""
    if isinstance(model, nn.Module):
        return {"": model}
    given = model if isinstance(model, Mapping) else {str(at): module for at, module in enumerate(model)}
    return {f"{key}.": module for key, module in given.items()}


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, in module order; a tied parameter has the first of its names.

    Parts of names that wrappers add are left out, unless two parameters would get the same name.
    """
    names: dict[int, str] = {}
    for prefix, model in models.items():
        full: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            full.setdefault(id(parameter), name)
        short = {key: without_wrappers(name) for key, name in full.items()}
        alike = len(set(short.values())) < len(short)
        for key, name in (full if alike else short).items():
            names.setdefault(key, prefix + name)
    return names


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile, DataParallel, DDP and Fabric."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(module.module)
    inner = getattr(module, "_orig_mod", None) or getattr(module, "_original_module", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def without_wrappers(name: str) -> str:
    """Return the name of a module or parameter without the attributes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
