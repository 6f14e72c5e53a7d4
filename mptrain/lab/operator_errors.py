"""The operator whose rounding makes a module's own arithmetic wrong in half precision, although all values are finite.

The forward pass is computed in FP64, where only the results of one operator of the module are rounded to the format, in
those of its calls that return half precision in the run. It is repeated for each such operator. What the module is
given (its inputs, its weights, outputs of its submodules) is the same in all passes. The operator that makes the module
most wrong loses the accuracy: a sum of large numbers, a product that underflows, a constant or a position that the
format cannot hold. Or the module's own buffer or parameter does, if it is the one thing that is rounded.

If no operator does, it is sought again with each operator computed in the format. An operator may round inside, such as
a sum over indices, or take the difference of nearly equal values, which is exact: it makes the rounding of its inputs
grow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mptrain.precision.census import current_pass, floating_in
from mptrain.probe.module_trail import ModuleTrail
from mptrain.probe.observer import ModuleObserver
from mptrain.system.torch_private import tree_map, written_tensors

#: Names for the user of operators that no code calls by name.
_SHOWN = {"_to_copy": "a cast", "lift_fresh": "a constant"}


class OperatorError(NamedTuple):
    """Operator whose rounding makes its module wrong.

    Attributes:
        operator: Name of the operator in torch, such as ``cumsum``; ``a cast`` for a conversion; the qualified name of
            a buffer or parameter that the module stores in half precision.
        error: Relative L2 error of what the module computes, if only the results of that operator are rounded.
    """

    operator: str
    error: float


class RoundedOperator(ModuleObserver):
    """Dispatch mode that rounds the results of one operator of some modules to half precision, in the forward pass.

    Args:
        trail: Tracker of the current module. The caller follows it on the observed model.
        modules: Qualified names of the modules, or `mptrain.probe.module_trail.LOSS`.
        half: The half-precision dtype.
        chosen: Name of the operator, as in `OperatorError`; None rounds nothing.
        inside: Whether the operator is computed in the dtype, so that its inputs are rounded too.
        rounds: For the calls of an operator in a module, in order, whether they are rounded; all are if it has none.

    Attributes:
        calls: For the calls of each operator in a module, in order, whether they returned the dtype.
    """

    def __init__(
        self,
        trail: ModuleTrail,
        modules: Collection[str],
        half: torch.dtype,
        chosen: str | None = None,
        inside: bool = False,
        rounds: Mapping[tuple[str, str], Sequence[bool]] | None = None,
    ) -> None:
        super().__init__(trail)
        self.calls: dict[tuple[str, str], list[bool]] = {}
        self._modules, self._half, self._chosen, self._inside = modules, half, chosen, inside
        self._rounds = rounds or {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        module, name = self.trail.module(), func.overloadpacket.__name__
        if module not in self._modules or current_pass() != "forward" or (func.is_view and name not in _SHOWN):
            return func(*args, **(kwargs or {}))
        place = module, _SHOWN.get(name, name.strip("_"))
        calls = self.calls.setdefault(place, [])
        chosen = place[1] == self._chosen and self._rounds.get(place, ())[len(calls) : len(calls) + 1] != [False]
        calls.append(False)
        if chosen and self._inside and name not in _SHOWN and not list(written_tensors(func, args, kwargs or {})):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # no kernel in the dtype
                small = func(*tree_map(self._rounded, args), **tree_map(self._rounded, dict(kwargs or {})))
                return tree_map(lambda one: one.double() if _is_of(one, self._half) else one, small)
        result = func(*args, **(kwargs or {}))
        calls[-1] = any(_is_of(one, self._half) for one in floating_in(result))
        if chosen and torch.Tag.nondeterministic_seeded not in func.tags:
            written = list(written_tensors(func, args, kwargs or {}))

            def rounded(value: Any) -> Any:
                new = self._rounded(value)
                if new is value:
                    return value
                return value.copy_(new) if any(value is one for one in written) else new.double()

            result = tree_map(rounded, result)
        return result

    def _rounded(self, value: Any) -> Any:
        """Return a tensor in the half-precision dtype if it is FP64; others are FP32 in every precision."""
        return value.to(self._half) if _is_of(value, torch.float64) else value


def _is_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype
