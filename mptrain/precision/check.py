"""Reads from a real step which dtypes it had, and compares them with what the policy promised."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mptrain.errors import EnvironmentRefused
from mptrain.precision.apply import DTYPES
from mptrain.precision.widened import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from mptrain.precision.policy import Policy


class ProductCensus(TorchDispatchMode):
    """Counts products (of matrices, convolutions, attention, LSTM layers) by operator and operand dtype; changes nothing.

    Attributes:
        counts: Operator name to operand dtype to number of calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, dict[torch.dtype, int]] = defaultdict(lambda: defaultdict(int))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            # The first alone: statistics among the others, such as an attention's, are FP32 in every mode.
            floating = (a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
            if (dtype := next(floating, None)) is not None:
                self.counts[func.overloadpacket.__name__][dtype] += 1
        return func(*args, **(kwargs or {}))

    def inside(self, products: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        """A choice of kernels with this census in front of it, so that it sees what is asked of them."""

        @contextlib.contextmanager
        def observed() -> Iterator[None]:
            with products(), self:
                yield

        return observed


def check_step(policy: Policy, model: nn.Module, kept: Mapping[str, nn.Module], census: ProductCensus) -> None:
    """Compare what a step did with what its policy says.

    Args:
        policy: The mode.
        model: After `cast_model`, and after one step.
        kept: The modules kept in FP32.
        census: What the step's products were made of.

    Raises:
        EnvironmentRefused: A parameter or a product had another dtype than promised.
    """
    promised = DTYPES[policy.parameters]
    in_kept = {id(p) for module in kept.values() for p in module.parameters()}
    wrong = [
        f"parameter {name} is {parameter.dtype}"
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dtype != (torch.float32 if id(parameter) in in_kept else promised)
    ]
    allowed = {DTYPES[policy.compute]}
    if any(True for module in kept.values() for p in module.parameters() if p.ndim > 1):
        allowed.add(torch.float32)  # a kept module with kernels or matrices multiplies in FP32 by request
    wrong += [
        f"{count} {name} products were {dtype}"
        for name, by_dtype in census.counts.items()
        for dtype, count in by_dtype.items()
        if dtype not in allowed
    ]
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise EnvironmentRefused(
            f"precision={policy.name} promises parameters {policy.parameters} and compute {policy.compute}, but {listed}",
            "the model casts by itself or leaves autocast: name the module in precision.keep_fp32, or mend its forward",
        )
