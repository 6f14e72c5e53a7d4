"""The module at work: in the forward pass by hooks, in the backward pass by the numbers that autograd gives its nodes.

Hooks are on the model while the trail is followed, and off it afterwards. They read and change nothing.

A thread numbers its own nodes. Where a piece of the forward pass is computed again in the backward pass
(`torch.utils.checkpoint`), that is on autograd's thread if the device is a GPU, and its numbers mean nothing here: they are
left out. So of a reentrant checkpoint on a GPU the backward operators may be said to be another module's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mptrain.precision.census import floating_in
from mptrain.torch_private import current_autograd_node, disable_current_modes, number_of_node, sequence_number

#: Where no module is at work: the task's own arithmetic on what the model said, and the loss.
LOSS = "(loss)"

#: The number of the nodes that add gradients up; they belong to no operator.
_ACCUMULATES = 2**64 - 1


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is within another, by their qualified names."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


@contextlib.contextmanager
def module_hooks(model: nn.Module, register: Callable[[str, nn.Module], Iterable[Any]]) -> Iterator[None]:
    """Hook all modules while this lasts, but for those of TorchScript.

    Args:
        model: Of the modules.
        register: Hooks a module of a name; gives the handles of its hooks.
    """
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for handle in register(name, module):
                    hooks.callback(handle.remove)
        yield


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module that has ended: whether the floating-point tensors that went in and came out were finite."""

    module: str
    finite_inputs: bool
    finite_output: bool


class ModuleTrail:
    """The module at work, by its qualified name; the model itself has the empty name.

    Attributes:
        calls: Modules in the order of their first call: name to how often they were called, in the forward pass.
        ended: Their calls in the order in which they ended.
        raised_in: The innermost module that an exception came out of, and that exception; None if none did.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.ended: list[ModuleCall] = []
        self.raised_in: tuple[str, BaseException] | None = None
        self._stack: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # inner ones before those around them
        self._known: dict[int, str] = {}
        self._latest = LOSS
        self._thread = threading.get_ident()

    def followed(self, model: nn.Module) -> AbstractContextManager[None]:
        """Notice the calls of the model's modules, while this lasts."""

        def hooked(name: str, module: nn.Module) -> Iterator[Any]:
            yield module.register_forward_pre_hook(self._entering(name), prepend=True)
            yield module.register_forward_hook(self._leaving, with_kwargs=True, always_call=True)

        return module_hooks(model, hooked)

    def module(self) -> str:
        """Return the module of the operator that is dispatched now."""
        node: Any = current_autograd_node()
        if self._stack:  # also where a backward pass computes a piece of the forward pass again
            return self._stack[-1][0]
        if node is None:
            return LOSS
        number = number_of_node(node)
        if number != _ACCUMULATES:
            self._latest = self.of_node(number)
        return self._latest

    def of_node(self, number: int) -> str:
        """The innermost module whose call made the node of this number.

        Args:
            number: autograd numbers the nodes of a thread in the order in which the forward pass makes them.
        """
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
        if not self._stack:  # its call was refused before it was noticed
            return
        name, first = self._stack.pop()
        if threading.get_ident() == self._thread:
            self._spans.append((first, sequence_number(), name))
        error = sys.exc_info()[1]
        if error is None:
            self.ended.append(ModuleCall(name, _are_finite((args, kwargs)), _are_finite(output)))
        elif self.raised_in is None or self.raised_in[1] is not error:
            self.raised_in = (name, error)


def _are_finite(values: Any) -> bool:
    """Return whether all floating-point tensors among some values are finite; the observer does not see that it is asked."""
    with torch.no_grad(), disable_current_modes():
        return all(bool(tensor.isfinite().all()) for tensor in floating_in(values))  # waits for the device
