"""The operator in which a module's own arithmetic becomes wrong in half precision, although all its values are finite.

Each operator of the module is computed a second time, in FP64, from the FP64 results of the operators before it. What
the module is given (its inputs, its weights, outputs of its submodules) counts as exact. The first operator whose
half-precision result is far from the FP64 result is the one that loses accuracy: a difference of nearly equal numbers,
a product that underflows, a long sum, a cast of a number that the format cannot hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mptrain.inspection.module_tensors import distance, norm
from mptrain.precision.census import current_pass, floating_in
from mptrain.probe.module_trail import ModuleTrail
from mptrain.probe.observer import ModuleObserver
from mptrain.torch_private import tree_leaves, tree_map


class OperatorError(NamedTuple):
    """Operator whose result is the first of its module to be wrong.

    Attributes:
        operator: Name of the operator in torch, such as ``sub``; ``a cast`` for a conversion.
        error: Relative L2 error of its result.
    """

    operator: str
    error: float


class OperatorErrors(ModuleObserver):
    """Dispatch mode that compares each operator of some modules with FP64, in the forward pass.

    Args:
        trail: Tracker of the current module. The caller follows it on the observed model.
        modules: Qualified names of the modules, or `mptrain.probe.module_trail.LOSS`.
        tolerance: Relative L2 error up to which a result is not wrong.

    Attributes:
        found: First operator of each module whose result is wrong.
    """

    def __init__(self, trail: ModuleTrail, modules: Collection[str], tolerance: float) -> None:
        super().__init__(trail)
        self.found: dict[str, OperatorError] = {}
        self._modules, self._tolerance = modules, tolerance
        self._exact: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        module = self.trail.module()
        if module not in self._modules or current_pass() != "forward":
            return func(*args, **kwargs)
        given = tree_map(self._wide, (args, kwargs))  # before the call, which may change its arguments
        result = func(*args, **kwargs)
        values = list(floating_in(result))
        if not values:
            return result
        try:
            exact = [result] if torch.Tag.nondeterministic_seeded in func.tags else func(*given[0], **given[1])
        except (RuntimeError, NotImplementedError):  # no FP64 kernel
            return result
        for value, right in zip(values, map(torch.Tensor.double, floating_in(tree_leaves(exact))), strict=False):
            self._exact[id(value)] = (weakref.ref(value), right)
            size = norm(right)
            error = distance(value.double(), right) / size if size and value.shape == right.shape else 0.0
            if self._tolerance < error < float("inf") and module not in self.found:
                name = func.overloadpacket.__name__
                self.found[module] = OperatorError("a cast" if name == "_to_copy" else name.strip("_"), error)
        return result

    def _wide(self, value: Any) -> Any:
        """Return the FP64 value of an argument: the result of the operators before, or else the argument itself."""
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        known = self._exact.get(id(value))
        if known is None or known[0]() is not value:
            known = self._exact[id(value)] = (weakref.ref(value), value.detach().double().clone())
        return known[1]
