"""What modules say in a forward pass: keeps it, compares it, and puts something else in its place.

Nothing is left behind on the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mptrain.device import beside_fp64

#: The floating-point tensors that each module said, by its name, in the order in which it said them.
Outputs = dict[str, list["Tensor"]]

#: From a module's name and something that it said to what is to stand in its place.
Change = Callable[[str, "Tensor"], "Tensor"]


def keep_in(found: Outputs) -> Change:
    """Leaves outputs as they are and keeps them.

    Args:
        found: Where to.
    """

    def keep(name: str, value: Tensor) -> Tensor:
        found.setdefault(name, []).append(value.detach().clone())
        return value

    return keep


class Replacement:
    """Puts other outputs in the place of outputs; their gradients are those of what they replace.

    So each module is given what the others were given, and what it says itself differs by its own error alone.

    Args:
        said: The others. What is left over, or has another shape, is left out.
    """

    def __init__(self, said: Outputs) -> None:
        self._rest = {name: list(reversed(tensors)) for name, tensors in said.items()}
        self._own: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return what stands in the place of an output."""
        other = self._rest[name].pop() if self._rest.get(name) else value
        if other.shape != value.shape:
            return value
        other, finite = other.detach().to(value.dtype), value.isfinite()
        off, size = self._own.get(name, (0.0, 0.0))
        right = torch.where(finite, value, 0.0).detach()  # where it is not finite, something before it is at fault
        wrong = distance(torch.where(finite, other, 0.0), right)
        self._own[name] = math.hypot(off, wrong), math.hypot(size, norm(right))
        return torch.where(finite, value + (other - value).detach(), other)

    def own_error(self, name: str) -> float:
        """Return the relative L2 error of the replaced outputs of a module, all calls together; inf where it made one infinite."""
        off, size = self._own.get(name, (0.0, 0.0))
        return off / size if size else off


@contextlib.contextmanager
def each_output(model: nn.Module, change: Change) -> Iterator[None]:
    """While this lasts, every floating-point tensor that a module says is what a function makes of it.

    What a module only hands on from the module within it that said it is that module's alone.

    Args:
        model: It is hooked, and left as it was.
        change: The function.
    """
    latest: list[tuple[Tensor, int]] = []  # what the module that ended last said, and its version

    def hook_of(name: str) -> Any:
        def changed(value: Any) -> Any:
            if not _is_float(value):
                return value
            if not any(value is one and value._version == version for one, version in before):
                value = change(name, value)
            latest.append((value, value._version))
            return value

        before: list[tuple[Tensor, int]] = []

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            before[:] = latest
            latest.clear()
            try:
                return tree_map(changed, output)
            finally:
                before.clear()

        return hook

    handles = [
        module.register_forward_hook(hook_of(name))
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        latest.clear()
        for handle in handles:
            handle.remove()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def relative_error(said: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the relative L2 error of all that a module said; inf where it said something that is not finite.

    Infinities that it ought to have said count for nothing.

    Args:
        said: Call by call.
        right: What it ought to have said. Where the two do not match, the module does something else, and there is nothing
            to compare: 0.
    """
    if len(said) != len(right) or any(one.shape != other.shape for one, other in zip(said, right, strict=True)):
        return 0.0
    same = [(one == other) & other.isinf() for one, other in zip(said, right, strict=True)]  # masked scores of -inf
    said = [one.masked_fill(at, 0) for one, at in zip(said, same, strict=True)]
    right = [one.masked_fill(at, 0) for one, at in zip(right, same, strict=True)]
    size = math.hypot(*(norm(tensor) for tensor in right))
    off = math.hypot(
        *(
            distance(beside_fp64(one).double(), beside_fp64(other).double())
            for one, other in zip(said, right, strict=True)
        )
    )
    if off == math.inf:
        return off
    return off / size if size else 0.0


def norm(tensor: Tensor) -> float:
    """L2 norm, added up in FP64."""
    return float(torch.linalg.vector_norm(beside_fp64(tensor), dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """L2 distance; inf where one of the two is not finite."""
    found = norm(one - other)
    return found if found == found else float("inf")
