"""Half-precision products on CPUs that have no half-precision arithmetic.

Without AVX512-FP16 or AMX, torch's FP16 convolutions and matrix products on a CPU run scalar fallbacks, 10 to 80 times
slower than FP32. Here such a product is computed as a tensor core computes it (Micikevicius et al. 2018, section 3.3):
operands in half precision, products and sums in FP32, the result rounded once to half precision. Every tensor in
memory keeps its dtype, before and after; only the inside of the product is wide. The difference to a native kernel is
the order of an FP32 sum.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from mptrain.precision.policy import Policy

aten = torch.ops.aten

#: Operators whose arithmetic is products summed up; all else is point-wise or reduces in FP32 already.
PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)


class Widened(TorchDispatchMode):
    """Runs half-precision products through FP32 kernels, forward and backward."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        half = next((a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in _HALF), None)
        if half is None:
            return func(*args, **(kwargs or {}))
        wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype in _HALF else a for a in args]
        result = func(*wide, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            return result.to(half)
        return tuple(None if part is None else part.to(half) for part in result)


_HALF = (torch.float16, torch.bfloat16)


def has_native_half(dtype: str) -> bool:
    """Whether this CPU computes in ``float16`` or ``bfloat16`` (as oneDNN sees it, ONEDNN_MAX_CPU_ISA included)."""
    probe = (
        torch.ops.mkldnn._is_mkldnn_fp16_supported if dtype == "float16" else torch.ops.mkldnn._is_mkldnn_bf16_supported
    )
    return torch.backends.mkldnn.is_available() and bool(probe())


def widens(policy: Policy, device: torch.device) -> bool:
    """Whether half-precision products of a run go through FP32 kernels."""
    if device.type != "cpu" or not policy.half or policy.cpu_kernels == "native":
        return False
    return policy.cpu_kernels == "widened" or not has_native_half(policy.compute)


def products(policy: Policy, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What to enter around a forward and backward pass: `Widened` where a run widens its products, else nothing."""
    return Widened if widens(policy, device) else contextlib.nullcontext
