"""Recording, comparison and replacement of module outputs in a pass, and recording of gradients at module boundaries.

All hooks are removed from the model afterwards.
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

#: Floating-point outputs of each module by name, in the order of the calls.
Outputs = dict[str, list[Tensor]]

#: Function from the name of a module and one of its outputs to the replacement of the output.
Change = Callable[[str, Tensor], Tensor]


def record_outputs(found: Outputs) -> Change:
    """Return a function for `hook_outputs` that records module outputs and leaves them unchanged.

    Args:
        found: Mapping from module name to outputs, call by call, to which detached copies are added.
    """

    def keep(name: str, value: Tensor) -> Tensor:
        found.setdefault(name, []).append(value.detach().clone())
        return value

    return keep


class OutputReplacement:
    """Function for `hook_outputs` that replaces module outputs by recorded ones of another precision.

    The gradient of a replaced output flows to the original output. Each module thus gets the recorded inputs, its
    output differs from the recorded one only by its own error, and the backward pass belongs to the recorded forward
    pass.

    Args:
        said: Recorded outputs of each module, call by call. An output without a recorded one of the same shape is not
            replaced.
    """

    def __init__(self, said: Outputs) -> None:
        self._rest = {name: list(reversed(tensors)) for name, tensors in said.items()}
        self._own: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return the replacement of a module output.

        Args:
            name: Qualified name of the module; its recorded outputs are used in the order of the calls.
            value: Output of the module.

        Returns:
            Tensor with the recorded values, and the dtype, shape and gradient of ``value``.
        """
        other = self._rest[name].pop() if self._rest.get(name) else value
        if other.shape != value.shape:
            return value
        other, finite = other.detach().to(value.dtype), value.isfinite()
        off, size = self._own.get(name, (0.0, 0.0))
        right = torch.where(finite, value, 0.0).detach()  # non-finite values come from an earlier module
        wrong = distance(torch.where(finite, other, 0.0), right)
        self._own[name] = math.hypot(off, wrong), math.hypot(size, norm(right))
        return torch.where(finite, value + (other - value).detach(), other)

    def own_error(self, name: str) -> float:
        """Return the relative L2 error that a module itself adds to its recorded outputs, over all calls.

        Args:
            name: Qualified name of the module.

        Returns:
            Norm of the difference between recorded and original outputs, divided by the norm of the original ones; inf
            if
            a recorded value is not finite where the original is.
        """
        off, size = self._own.get(name, (0.0, 0.0))
        return off / size if size else off


def hook_outputs(model: nn.Module, change: Change) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that applies a function to every floating-point module output of a model.

    An output that a module returns unchanged from a submodule is changed only once, as the output of the submodule.

    Args:
        model: The model. Its hooks are removed on exit.
        change: Function from the qualified name of a module and an output tensor to the tensor that replaces it.
    """
    latest: list[tuple[Tensor, int]] = []  # outputs of the module that ended last, with their versions

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
    """Return the relative L2 error of a module's outputs against reference outputs; inf if an output is not finite.

    Infinities that the reference has too are ignored.

    Args:
        said: Outputs, call by call.
        right: Reference outputs. If the shapes differ, the outputs cannot be compared and the error is 0.
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
    """Return the L2 norm of a tensor of any dtype and shape, accumulated in FP64."""
    return float(torch.linalg.vector_norm(beside_fp64(tensor), dtype=torch.float64))


def distance(one: Tensor, other: Tensor) -> float:
    """Return the L2 norm of the difference of two tensors, accumulated in FP64; inf if one of them is not finite."""
    found = norm(one - other)
    return found if found == found else math.inf


class _Place(NamedTuple):
    module: str
    call: int
    side: str
    place: int


class GradientPath:
    """Recorder of the gradients of the inputs and outputs of all modules in one backward pass.

    Args:
        scale: Loss scale of the pass.

    Attributes:
        scale: Loss scale of the pass.
        kept: Scaled gradients by module name, number of the module's call, side (``input`` or ``output``), and index of
            the
            tensor on that side.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.kept: dict[_Place, Tensor] = {}

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Record gradients of passes inside the context, without changing them.

        Args:
            model: The model, whose hooks are removed on exit.
        """
        calls = Counter[str]()

        def keep(place: _Place, gradient: Tensor) -> None:
            self.kept[place] = gradient.detach().clone()

        def follow(name: str, side: str, values: Any) -> None:
            for index, value in enumerate(tree_leaves(values)):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    keeper = functools.partial(keep, _Place(name, calls[name] - 1, side, index))
                    # A parameter would keep the hook, so it is removed explicitly.
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
    """Return the innermost modules whose backward pass makes gradients disproportionate to the loss scale.

    Such a module receives gradients proportional to the loss and returns others that are not, so it is the origin of
    the error.

    Args:
        one: Gradients of a pass at the reference scale.
        other: Gradients of the same pass at another scale.
        wrong: Names of the modules whose own parameters' gradients are not proportional.
        tolerance: Largest relative L2 difference that counts as proportional.

    Returns:
        Qualified names, empty for the model itself; `LOSS` if the gradient that the model receives from the loss is
        already not proportional; an empty tuple if all gradients are proportional.
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
