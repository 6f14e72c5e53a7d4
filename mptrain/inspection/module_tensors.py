"""Outputs of modules in a forward pass, kept, compared or replaced; and the gradients of their inputs and outputs.

Nothing is left behind on the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.device import beside_fp64
from mptrain.probe.module_trail import LOSS, is_inside, module_hooks
from mptrain.torch_private import tree_leaves, tree_map

#: The floating-point tensors that each module said, by its name, in the order in which it said them.
Outputs = dict[str, list[Tensor]]

#: From a module's name and something that it said to what is to stand in its place.
Change = Callable[[str, Tensor], Tensor]


def record_outputs(found: Outputs) -> Change:
    """Return a change that leaves outputs as they are and keeps them.

    Args:
        found: Where to.
    """

    def keep(name: str, value: Tensor) -> Tensor:
        found.setdefault(name, []).append(value.detach().clone())
        return value

    return keep


class OutputReplacement:
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


def hook_outputs(model: nn.Module, change: Change) -> contextlib.AbstractContextManager[None]:
    """Replace every floating-point tensor that a module says by what a function makes of it, while this lasts.

    What a module only hands on from the module within it that said it is that module's alone.

    Args:
        model: It is hooked, and left as it was.
        change: The function.
    """
    latest: list[tuple[Tensor, int]] = []  # what the module that ended last said, and its version

    def hooked(name: str, module: nn.Module) -> Iterator[Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            before = latest[:]
            latest.clear()

            def changed(value: Any) -> Any:
                if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                    return value
                if not any(value is one and value._version == version for one, version in before):
                    value = change(name, value)
                latest.append((value, value._version))
                return value

            return tree_map(changed, output)

        yield module.register_forward_hook(hook)

    return module_hooks(model, hooked)


def relative_error(said: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the relative L2 error of all that a module said; inf where it said something that is not finite.

    Infinities that it ought to have said count for nothing.

    Args:
        said: Call by call.
        right: What it ought to have said. Where the two do not match, the module does something else, and there is nothing
            to compare: 0.
    """
    if [tensor.shape for tensor in said] != [tensor.shape for tensor in right]:
        return 0.0
    same = [(one == other) & other.isinf() for one, other in zip(said, right, strict=True)]  # masked scores of -inf
    said = [one.masked_fill(at, 0) for one, at in zip(said, same, strict=True)]
    right = [one.masked_fill(at, 0) for one, at in zip(right, same, strict=True)]
    size = math.hypot(*(norm(tensor) for tensor in right))
    off = math.hypot(*(distance(_double(one), _double(other)) for one, other in zip(said, right, strict=True)))
    return off if off == math.inf else off / size if size else 0.0


def _double(tensor: Tensor) -> Tensor:
    return beside_fp64(tensor).double()


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, added up in FP64."""
    return float(torch.linalg.vector_norm(beside_fp64(tensor), dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """Return the L2 distance; inf where one of the two is not finite."""
    found = norm(one - other)
    return found if found == found else math.inf


class _Place(NamedTuple):
    module: str
    call: int
    side: str
    place: int


class GradientPath:
    """Keeps the gradients of all inputs and outputs of all modules, in one pass.

    Args:
        scale: That multiplies the loss.

    Attributes:
        scale: Likewise.
        kept: The gradients, still scaled, by where they are.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.kept: dict[_Place, Tensor] = {}

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Keep gradients as they come by, while this lasts; they are not changed."""
        calls = Counter[str]()

        def keep(place: _Place, gradient: Tensor) -> None:
            self.kept[place] = gradient.detach().clone()

        def follow(name: str, side: str, values: Any) -> None:
            for index, value in enumerate(tree_leaves(values)):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    keeper = functools.partial(keep, _Place(name, calls[name] - 1, side, index))
                    # It may be a parameter, which would keep the hook for good.
                    hooks.callback(value.register_hook(keeper).remove)

        def hooked(name: str, module: nn.Module) -> Iterator[Any]:
            def before(module: nn.Module, args: Any, kwargs: Any) -> None:
                calls[name] += 1
                follow(name, "input", (args, kwargs))

            def after(module: nn.Module, args: Any, output: Any) -> None:
                follow(name, "output", output)

            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after)

        with contextlib.ExitStack() as hooks, module_hooks(model, hooked):
            yield


def breaks_proportion(
    one: GradientPath, other: GradientPath, wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """Return the innermost modules that are handed gradients in proportion to the loss and hand on others.

    Where what comes in from above is in proportion and what goes out below is not, there is the fault.

    Args:
        one: Of a pass at the scale that is taken for right.
        other: Of the same pass at another scale.
        wrong: Names of the modules whose own parameters' gradients are not in proportion.
        tolerance: The largest relative L2 difference that counts as proportion.

    Returns:
        Qualified names, empty for the model itself; `LOSS` where the gradient that the loss hands to the model is not in
        proportion already; nothing where all is in order.
    """
    right: dict[str, bool] = {}
    suspects = set(wrong)
    for place, gradient in one.kept.items():
        exact, scaled = _double(gradient) / one.scale, other.kept.get(place)
        near = scaled is not None and distance(_double(scaled) / other.scale, exact) <= tolerance * norm(exact)
        if place.side == "output":
            right[place.module] = right.get(place.module, True) and near
        if not near:
            suspects.add(place.module)
    if not suspects:
        return ()
    if not right.get("", True):
        return (LOSS,)
    guilty = {
        name for name, fine in right.items() if fine and any(one == name or is_inside(one, name) for one in suspects)
    }
    return tuple(name for name in right if name in guilty and not any(is_inside(inner, name) for inner in guilty))
