"""What modules say in a forward pass: keeps it, compares it, and puts something else in its place.

Only modules without children are looked at. Nothing is left behind on the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

#: The floating-point tensors that each module without children said, by its name, in the order in which it said them.
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


def replace_by(said: Outputs) -> Change:
    """Puts other outputs in the place of outputs; their gradients are those of what they replace.

    Args:
        said: The others. What is left over, or has another shape, is left out.
    """
    rest = {name: list(reversed(tensors)) for name, tensors in said.items()}

    def exchange(name: str, value: Tensor) -> Tensor:
        other = rest[name].pop() if rest.get(name) else value
        return value + (other.to(value.dtype) - value).detach() if other.shape == value.shape else value

    return exchange


@contextlib.contextmanager
def each_output(model: nn.Module, change: Change) -> Iterator[None]:
    """While this lasts, every floating-point tensor that a module without children says is what a function makes of it.

    Args:
        model: It is hooked, and left as it was.
        change: The function.
    """

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(lambda value: change(name, value) if _is_float(value) else value, output)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]
    handles = [
        leaf.register_forward_hook(hook_of(name))
        for name, leaf in leaves
        if not isinstance(leaf, torch.jit.ScriptModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def relative_error(said: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Relative L2 error of all that a module said; inf where it said something that is not finite.

    Args:
        said: Call by call.
        right: What it ought to have said. Where the two do not match, the module does something else, and there is nothing
            to compare: 0.
    """
    if len(said) != len(right) or any(one.shape != other.shape for one, other in zip(said, right, strict=True)):
        return 0.0
    size = math.hypot(*(norm(tensor) for tensor in right))
    off = math.hypot(*(distance(one.double(), other.double()) for one, other in zip(said, right, strict=True)))
    return off / size if size else 0.0


def norm(tensor: Tensor) -> float:
    """L2 norm, added up in FP64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """L2 distance; inf where one of the two is not finite."""
    found = norm(one - other)
    return found if found == found else float("inf")
