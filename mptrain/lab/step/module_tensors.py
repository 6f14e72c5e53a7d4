"""Recording, comparison and replacement of what crosses the boundaries of modules in a pass, and of gradients there.

What crosses a boundary is a module's output, or an input that its caller has computed. The caller's arithmetic between
two submodules is so separated from that of the submodules. All hooks are removed from the model afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from mptrain.engine.module_trail import LOSS, ModuleTrail, is_inside, module_hooks
from mptrain.engine.parts import Parts
from mptrain.numerics.formats import FLOAT16
from mptrain.precision.census import current_pass
from mptrain.precision.upcast import EagerMode
from mptrain.system.device import beside_fp64
from mptrain.system.torch_private import disable_current_modes, is_transforming, tree_leaves, tree_map

#: Floating-point tensors at each boundary, in the order of the calls. The key is the name of a module for its outputs,
#: and ``CALLER to MODULE`` for inputs of a module that its caller has computed; the loss has the key `LOSS`, numbers
#: that a module compares the key of `Comparisons`.
Outputs = dict[str, list[Tensor]]

#: Function from the key of a boundary and a tensor there to the replacement of the tensor.
Change = Callable[[str, Tensor], Tensor]

#: Dtypes of indices, which are compared too: one that is made in half precision may choose another row.
INDICES = (torch.int64, torch.int32)

#: Separator of caller and module in the key of a boundary; names of modules have no blanks.
HANDED = " to "


def owner(boundary: str) -> str:
    """Return the name of the module whose own arithmetic computes the tensors at a boundary, a key of `Outputs`."""
    return boundary.partition(HANDED)[0]


def record_outputs(outputs: Outputs, half_outputs: Outputs | None = None) -> Change:
    """Return a function for `hook_step` that records module outputs, and what is compared, and leaves them unchanged.

    It adds detached copies to ``outputs``, by their keys, call by call. Numbers that are compared (`COMPARED`) are made
    `alike` to those in ``half_outputs``, if there are any.
    """
    calls = _ForwardCalls()

    def keep(name: str, value: Tensor) -> Tensor:
        at = calls.number(name, value)
        other = next(iter((half_outputs or {}).get(name, [])[at:]), None) if at is not None else None
        if COMPARED in name and other is not None and other.shape == value.shape:
            value = alike(name, other, value)
        if current_pass() == "forward":
            outputs.setdefault(name, []).append(value.detach().clone())
        return value

    return keep


class _ForwardCalls:
    """Numbers of the tensors at each boundary in the forward pass, also of those that a backward pass computes again.

    Activation checkpointing repeats calls in another order, and some of them. A repeated tensor has the values of the
    first one, by which it is known: so it needs no help of the code that repeats it, which may be the user's own.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, name: str, value: Tensor) -> int | None:
        """Return the number of a tensor among those at a boundary in the forward pass; None if none had its values."""
        plain = value.detach().flatten().clone(memory_format=torch.contiguous_format)  # a single one may have no stride
        mark = name, zlib.crc32(plain.view(torch.uint8).cpu().numpy().tobytes())
        if current_pass() == "backward":
            return self._numbers.get(mark)
        at = self._counts[name]
        self._counts[name] += 1
        self._numbers.setdefault(mark, at)  # of equal tensors the first: what follows from them is equal too
        return at


class _Replaced(torch.autograd.Function):
    """Tensor with other values than the original one, to which its gradient flows where that is finite.

    It saves no tensor for the backward pass, as activation checkpointing counts those of a call and of its repetition.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor, finite: Tensor) -> Tensor:
        ctx.finite = finite
        return other.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.where(ctx.finite, grads[0], 0.0), None, None


class OutputReplacement:
    """Function for `hook_step` that replaces tensors at module boundaries by recorded ones of another precision.

    The gradient of a replaced tensor flows to the original one. Each module thus gets the recorded inputs, what it
    computes differs from what was recorded only by its own error, and the backward pass belongs to the recorded forward
    pass.

    Args:
        recorded: Recorded tensors of each boundary, call by call. A tensor without a recorded one of the same shape is
            not replaced. Numbers that are compared are made `alike`.
    """

    def __init__(self, recorded: Outputs) -> None:
        self._said = recorded
        self._calls = _ForwardCalls()
        self._own: dict[str, tuple[float, float]] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor with the values recorded next at a boundary, and dtype, shape and gradient of ``value``."""
        at = self._calls.number(name, value)
        other = next(iter(self._said.get(name, [])[at:]), value) if at is not None else value
        if other.shape != value.shape:
            return value
        if COMPARED in name:
            return alike(name, other, value)
        if not value.is_floating_point():
            off, size = self._own.get(name, (0.0, 0.0))
            self._own[name] = math.hypot(off, norm(other != value)), math.hypot(size, value.numel() ** 0.5)
            return other
        other, plain = other.detach().to(value.dtype), value.detach()
        if torch.equal(other, plain):
            self._own.setdefault(name, (0.0, 0.0))
            return value
        off, size = self._own.get(name, (0.0, 0.0))
        finite = plain.isfinite()
        right = torch.where(finite, plain, 0.0)  # non-finite values come from an earlier module
        wrong = distance(torch.where(finite, other, 0.0), right)
        self._own[name] = math.hypot(off, wrong), math.hypot(size, norm(right))
        return cast("Tensor", _Replaced.apply(value, other, finite))

    def own_error(self, name: str) -> float:
        """Return the relative L2 error that a module itself adds to what was recorded at a boundary, over all calls.

        It is the norm of the difference between recorded and original outputs, divided by the norm of the original
        ones; inf if a recorded value is not finite where the original is.
        """
        off, size = self._own.get(name, (0.0, 0.0))
        return off / size if size else off


def hook_outputs(model: nn.Module, change: Change) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that applies a function to tensors at the boundaries of modules: numbers and indices.

    A tensor that crosses several boundaries unchanged is changed only once, at the first. Inputs of the model itself
    are left alone, and what modules are given inside a transform of `torch.func`, such as ``vmap``: it has no values of
    its own there, and counts as the arithmetic of the module that transforms. ``change`` maps the key of a boundary and
    a tensor to the tensor that replaces it.
    """
    known: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # tensors that crossed a boundary, with their versions
    running: list[str] = []
    callers: dict[str, str] = {}

    def crossing(boundary: str | None, values: Any) -> Any:
        if is_transforming():
            return values

        def changed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.dtype in INDICES):
                return value
            crossed, version = known.get(id(value), (None, 0))
            # An id is used again after its tensor has gone, and a tensor may have been written to since it crossed.
            if boundary is not None and (crossed is None or crossed() is not value or value._version != version):
                value = change(boundary, value)
            known[id(value)] = (weakref.ref(value), value._version)
            return value

        return tree_map(changed, values)

    def hooked(name: str, module: nn.Module) -> Iterator[Any]:
        def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
            caller = running[-1] if running else LOSS
            # Activation checkpointing calls a module again without its caller: that of the forward pass counts.
            if running or current_pass() == "forward":
                callers[name] = caller
            running.append(name)
            return crossing(f"{callers.get(name, caller)}{HANDED}{name}" if name else None, (args, kwargs))

        def leaving(module: nn.Module, args: Any, output: Any) -> Any:
            if running:
                running.pop()
            return crossing(name, output)

        yield module.register_forward_pre_hook(entering, with_kwargs=True)
        yield module.register_forward_hook(leaving, always_call=True)

    return module_hooks(model, hooked)


@contextlib.contextmanager
def hook_step(parts: Parts, change: Change) -> Iterator[None]:
    """Apply a function in passes inside the context: as `hook_outputs` does, to the loss, and to what is compared.

    The key of the loss is `LOSS`; those of numbers that are compared contain `COMPARED`.
    """
    trail = ModuleTrail(check_finite=False)
    change = disable_current_modes()(change)  # its operators are not those of the model
    objectives = [learner.objective for learner in parts.learners]
    for learner, objective in zip(parts.learners, objectives, strict=True):
        learner.objective = replace(objective, loss=_changed(objective.loss, change))
    try:
        with trail.followed(parts.model), Comparisons(trail, change), hook_outputs(parts.model, change):
            yield
    finally:
        for learner, objective in zip(parts.learners, objectives, strict=True):
            learner.objective = objective


def _changed(loss: Callable[..., Tensor], change: Change) -> Callable[..., Tensor]:
    return lambda model, micro: change(LOSS, loss(model, micro))


def relative_error(outputs: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the relative L2 error of a module's outputs against reference outputs; inf if an output is not finite.

    Infinities that the reference has too are ignored. Indices are compared for equality. If the shapes differ, the
    outputs cannot be compared and the error is 0.
    """
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in right]:
        return 0.0
    whole = [not other.is_floating_point() for other in right]  # of indices, the share that differs
    outputs = [output == other if index else output for output, other, index in zip(outputs, right, whole, strict=True)]
    right = [torch.ones_like(other) if index else other for other, index in zip(right, whole, strict=True)]
    same = [
        (output == other) & other.isinf() for output, other in zip(outputs, right, strict=True)
    ]  # masked scores of -inf
    outputs = [output.masked_fill(at, 0) for output, at in zip(outputs, same, strict=True)]
    right = [other.masked_fill(at, 0) for other, at in zip(right, same, strict=True)]
    size = math.hypot(*(norm(tensor) for tensor in right))
    off = math.hypot(*(distance(_double(output), _double(other)) for output, other in zip(outputs, right, strict=True)))
    return off if off == math.inf else off / size if size else 0.0


def _double(tensor: Tensor) -> Tensor:
    return beside_fp64(tensor).double()


def norm(tensor: Tensor) -> float:
    """Return the L2 norm of a tensor of any dtype and shape, accumulated in FP64."""
    numbers = beside_fp64(tensor) if tensor.is_floating_point() else _double(tensor)
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))


def distance(tensor: Tensor, other: Tensor) -> float:
    """Return the L2 norm of the difference of two tensors, accumulated in FP64; inf if one of them is not finite."""
    difference = norm(tensor - other)
    return difference if difference == difference else math.inf


class _Place(NamedTuple):
    module: str
    call: int
    side: str
    position: int


class GradientPath:
    """Recorder of the gradients of the inputs and outputs of all modules in one backward pass.

    The gradient of an input is what the module itself returns for it, without that of others which read the tensor too.

    Attributes:
        scale: Loss scale of the pass.
        kept: Scaled gradients by module name, number of the module's call, side (``input`` or ``output``), and index of
            the tensor on that side.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.kept: dict[_Place, Tensor] = {}

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Record gradients of passes inside the context, without changing them."""
        calls = Counter[str]()

        def keep(location: _Place, gradient: Tensor) -> None:
            if location not in self.kept:
                self.kept[location] = gradient.detach().clone()

        def follow(value: Tensor, location: _Place) -> None:
            # A parameter would keep the hook, so it is removed explicitly.
            hooks.callback(value.register_hook(functools.partial(keep, location)).remove)

        def entering(name: str, given: Any) -> Any:
            views: dict[int, Tensor] = {}  # one of a tensor that is given twice: attention asks whether both are one
            positions = itertools.count()

            def own(value: Any) -> Any:
                location = _Place(name, calls[name] - 1, "input", next(positions))
                if not isinstance(value, torch.Tensor) or not value.requires_grad or is_transforming():
                    return value
                view = views.setdefault(id(value), value.view_as(value))
                follow(view, location)
                follow(value, location)  # later, with the sum of all readers: of a view that its reader writes to
                return view

            return tree_map(own, given)

        def hooked(name: str, module: nn.Module) -> Iterator[Any]:
            def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
                calls[name] += 1
                return entering(name, (args, kwargs))

            def after(module: nn.Module, args: Any, output: Any) -> None:
                for index, value in enumerate(tree_leaves(output)):
                    if isinstance(value, torch.Tensor) and value.requires_grad and not is_transforming():
                        follow(value, _Place(name, calls[name] - 1, "output", index))

            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after)

        with contextlib.ExitStack() as hooks, module_hooks(model, hooked):
            yield


def breaks_proportion(
    reference: GradientPath, other: GradientPath, wrong: Collection[str], tolerance: float
) -> tuple[str, ...]:
    """Return the innermost modules whose backward pass makes gradients disproportionate to the loss scale.

    Such a module receives gradients proportional to the loss and returns others that are not, so it is the origin of
    the error. So is one that receives an overflow and returns finite numbers in its place, which hides it.

    Args:
        reference: Gradients of a pass at the reference scale.
        other: Gradients of the same pass at another scale.
        wrong: Names of the modules whose own parameters' gradients are not proportional.
        tolerance: Largest relative L2 difference that counts as proportional.

    Returns:
        Qualified names, empty for the model itself; `LOSS` if the gradient that the model receives from the loss is
            already not proportional; an empty tuple if all gradients are proportional.
    """
    right: dict[str, bool] = {}
    suspects, given_inf, hiding = set(wrong), set[str](), dict[str, bool]()
    for location, gradient in reference.kept.items():
        exact, scaled = _double(gradient) / reference.scale, other.kept.get(location)
        near = scaled is not None and distance(_double(scaled) / other.scale, exact) <= tolerance * norm(exact)
        finite = scaled is not None and bool(scaled.isfinite().all())
        if location.side == "output":
            right[location.module] = right.get(location.module, True) and near
            given_inf |= set() if finite else {location.module}
        elif not near:
            hiding[location.module] = hiding.get(location.module, True) and finite
        if not near:
            suspects.add(location.module)
    if hides := [name for name in hiding if hiding[name] and name in given_inf]:
        return tuple(name for name in hides if not any(is_inside(inner, name) for inner in hides))
    if not suspects:
        return ()
    if not right.get("", True):
        return (LOSS,)
    guilty = {
        name
        for name, fine in right.items()
        if fine and any(suspect == name or is_inside(suspect, name) for suspect in suspects)
    }
    return tuple(name for name in right if name in guilty and not any(is_inside(inner, name) for inner in guilty))


#: Separator of a module and the operator with which it compares numbers, in the key of what is compared.
COMPARED = " compares by "

#: Largest error of numbers that are compared, relative to their median distance from their median, at which choices by
#: them are those of near ties, that is, few: of probabilities that are all 1 it is more. BF16 rounds by half of it.
RESOLVED = 2.0**-4

#: Operators whose results are indices or truth values of the numbers that they are given.
_COMPARE = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "searchsorted", "bucketize", "multinomial", "nms"}
)

#: Operators that return some of the numbers, and their indices in one dimension.
_PICK = frozenset({"max", "min", "topk", "sort", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin"})


class Comparisons(EagerMode):
    """Dispatch mode that compares other numbers than those that are given, if a function says so.

    Only indices and truth values follow from the other numbers; values are taken from those that are given.

    Args:
        trail: Tracker of the current module. The caller follows it on the model.
        change: Function from a key (the module, `COMPARED`, and the operator's name) and a tensor that is compared to
            the tensor that is compared in its place.
    """

    def __init__(self, trail: ModuleTrail, change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trail, self._change = trail, change

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        picks = name in _PICK and len(func._schema.returns) == 2 and args[0].is_floating_point()
        if not (picks or name in _COMPARE) or func._schema.is_mutable:
            return func(*args, **kwargs)
        key = f"{self._trail.module()}{COMPARED}{name}"
        result = func(*tree_map(lambda leaf: self._change(key, leaf) if _is_float(leaf) else leaf, args), **kwargs)
        if not picks:
            return result
        index, dim = next(
            (index, argument) for index, argument in enumerate(func._schema.arguments) if argument.name == "dim"
        )
        along = args[index] if index < len(args) else kwargs.get("dim", dim.default_value)
        if result[1].ndim == args[0].ndim:
            return args[0].gather(along, result[1]), result[1]
        return args[0].gather(along, result[1].unsqueeze(along)).squeeze(along), result[1]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def alike(key: str, recorded: Tensor, own: Tensor) -> Tensor:
    """Return the numbers of a half-precision pass where they differ by what rounding does, elsewhere the own ones.

    Rounding moves a number little against the distances of the numbers from each other (`RESOLVED`), or, if they are
    compared for equality, against itself. It does not make zero of a number below the range of FP16, nor another number
    of a whole one, which is a position or a count.

    Args:
        key: The key of what is compared, of `Comparisons`.
        recorded: The numbers of the half-precision pass, of any floating-point dtype.
        own: The numbers of the reference, of the same shape, float32 or float64.
    """
    recorded, size = recorded.to(own.dtype), own.abs()
    distances, usual = size, own[(size > 0) & (size < FLOAT16.max)]  # without zeros and masks
    if len(usual) and not key.endswith(("eq", "ne")):  # waits for the device
        centre = usual.median()
        spread = (usual - centre).abs().median()
        distances = (own - centre).abs().clamp(min=spread) if spread > 0 else size
    near = (recorded - own).abs() <= RESOLVED * distances
    vanished = (recorded == 0) & (size < FLOAT16.smallest_subnormal)
    return torch.where(near & ~vanished & (own != own.round()), recorded, own)
