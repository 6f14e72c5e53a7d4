"""Random numbers that are the same in every precision, for passes that are compared.

A model that draws random numbers in the dtype of its input (noise, stochastic depth, reparametrisation) draws other
numbers in FP16 than in FP64, because torch's generators depend on the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mptrain.precision.census import floating_in
from mptrain.precision.upcast import EagerMode
from mptrain.system.torch_private import tree_map, written_tensors

#: Fused operators that draw random numbers only inside, for their own dropout: computing them in FP32 would be no draw.
_FUSED = ("attention", "rnn")


class SameDraws(EagerMode):
    """Dispatch mode in which random numbers are drawn in FP32 and cast to the dtype that the model asks for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or any(part in name for part in _FUSED):
            return func(*args, **kwargs)
        given = next(floating_in((args, kwargs)), None)
        dtype = kwargs.get("dtype") or (torch.float32 if given is None else given.dtype)
        written = list(written_tensors(func, args, kwargs))
        if not dtype.is_floating_point or (dtype == torch.float32 and not written):
            return func(*args, **kwargs)
        if kwargs.get("dtype") is not None:
            kwargs["dtype"] = torch.float32
        wide = tree_map(
            lambda one: one.contiguous() if isinstance(one, torch.Tensor) else one, _cast(args, torch.float32)
        )
        drawn = func(*wide, **_cast(kwargs, torch.float32))
        for own, other in zip(args, wide, strict=True):
            if any(own is one for one in written):
                own.copy_(other)
                drawn = own if drawn is other else drawn
        return _cast(drawn, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda one: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one, values
    )
