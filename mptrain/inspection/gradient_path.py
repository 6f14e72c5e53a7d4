"""Finds the module in which gradients stop being in proportion to the loss.

The gradients of all modules' inputs and outputs of two passes are compared, at two loss scales. Where what comes in from above is
in proportion and what goes out below is not, there is the fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mptrain.device import beside_fp64
from mptrain.probe.module_trail import LOSS


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
        self._calls: dict[str, int] = {}

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, gradients are kept as they come by; they are not changed."""
        with contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    before, after = self._before(name, hooks), self._after(name, hooks)
                    hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(after).remove)
            yield

    def _before(self, name: str, hooks: contextlib.ExitStack) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[name] = self._calls.get(name, -1) + 1
            self._keep(name, "input", (args, kwargs), hooks)

        return hook

    def _after(self, name: str, hooks: contextlib.ExitStack) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._keep(name, "output", output, hooks)

        return hook

    def _keep(self, name: str, side: str, values: Any, hooks: contextlib.ExitStack) -> None:
        for index, value in enumerate(tree_leaves(values)):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                keeper = self._keeper(_Place(name, self._calls.get(name, 0), side, index))
                hooks.callback(
                    value.register_hook(keeper).remove
                )  # it may be a parameter, which would keep it for good

    def _keeper(self, place: _Place) -> Any:
        def hook(gradient: Tensor) -> None:
            self.kept[place] = gradient.detach().clone()

        return hook


def breaks_proportion(
    one: GradientPath, other: GradientPath, wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """The innermost modules that are handed gradients in proportion to the loss and hand on others.

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
        differs = _differs(beside_fp64(gradient).double() / one.scale, other.kept.get(place), other.scale, tolerance)
        if place.side == "output":
            right[place.module] = right.get(place.module, True) and not differs
        if differs:
            suspects.add(place.module)
    if not suspects:
        return ()
    if not right.get("", True):
        return (LOSS,)
    guilty = {name for name, fine in right.items() if fine and _has_inside(name, suspects, right)}
    return tuple(name for name in right if name in guilty and not any(_is_inside(inner, name) for inner in guilty))


def _has_inside(name: str, suspects: set[str], right: Mapping[str, bool]) -> bool:
    return any(suspect == name or _is_inside(suspect, name) for suspect in suspects)


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _differs(right: Tensor, scaled: Tensor | None, scale: float, tolerance: float) -> bool:
    if scaled is None:
        return True
    distance = torch.linalg.vector_norm(beside_fp64(scaled).double() / scale - right).item()
    return not distance <= tolerance * torch.linalg.vector_norm(right).item()
