"""Numbers that a network compares, made alike in all passes that are compared with each other.

A network that chooses by comparing numbers (``argmin``, ``topk``, ``>``) chooses otherwise at a near tie if the numbers
are rounded, and one other choice changes its output by any amount. That is no error of a precision: both choices are
equally right. So the passes compare the same numbers wherever rounding explains that theirs differ. A number that is
wrong (infinite, underflowed, a difference whose digits are lost) stays as it is, so that a choice which follows from it
differs and is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mptrain.numerics.formats import FLOAT16
from mptrain.precision.upcast import EagerMode
from mptrain.probe.module_trail import ModuleTrail
from mptrain.system.torch_private import tree_map

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
        result = func(*tree_map(lambda one: self._change(key, one) if _is_float(one) else one, args), **kwargs)
        if not picks:
            return result
        place, dim = next((place, one) for place, one in enumerate(func._schema.arguments) if one.name == "dim")
        along = args[place] if place < len(args) else kwargs.get("dim", dim.default_value)
        if result[1].ndim == args[0].ndim:
            return args[0].gather(along, result[1]), result[1]
        return args[0].gather(along, result[1].unsqueeze(along)).squeeze(along), result[1]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def alike(key: str, said: Tensor, own: Tensor) -> Tensor:
    """Return the numbers of a half-precision pass where they differ by what rounding does, elsewhere the own ones.

    Rounding moves a number little against the distances of the numbers from each other (`RESOLVED`), or, if they are
    compared for equality, against itself. It does not make zero of a number below the range of FP16, nor another number
    of a whole one, which is a position or a count.

    Args:
        key: The key of what is compared, of `Comparisons`.
        said: The numbers of the half-precision pass, of any floating-point dtype.
        own: The numbers of the reference, of the same shape, float32 or float64.
    """
    said, size = said.to(own.dtype), own.abs()
    distances, usual = size, own[(size > 0) & (size < FLOAT16.max)]  # without zeros and masks
    if len(usual) and not key.endswith(("eq", "ne")):  # waits for the device
        centre = usual.median()
        spread = (usual - centre).abs().median()
        distances = (own - centre).abs().clamp(min=spread) if spread > 0 else size
    near = (said - own).abs() <= RESOLVED * distances
    vanished = (said == 0) & (size < FLOAT16.smallest_subnormal)
    return torch.where(near & ~vanished & (own != own.round()), said, own)
