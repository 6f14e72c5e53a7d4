"""Sees in a forward pass what half precision does to constants, and which sums and exponentials are computed in it.

It looks and never touches. It keeps what was wrong, by module, and nothing of the values themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from mptrain.numerics.formats import FORMATS
from mptrain.precision.census import Observed, cast_of, current_pass, dtype_name, floating_in
from mptrain.precision.upcast import EagerMode, Products
from mptrain.probe.module_trail import Trail

#: Operators of which a number is an operand that the tensor's format has to hold.
_WITH_CONSTANT = frozenset(
    {
        "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "masked_fill", "masked_fill_", "where", "full", "full_like",
        "fill", "fill_", "new_full", "scalar_tensor", "index_fill", "constant_pad_nd",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum",
    }
)  # fmt: skip

#: Those of them in which a small number keeps something away from zero.
_GUARDS = frozenset({"add", "add_", "sub", "sub_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})

#: What torch's autocast computes in FP32 on CUDA ("CUDA Ops that can autocast to float32" in its documentation), by the
#: names of the operators that these functions end in. Norms are not among them: a mode says what becomes of those.
_WIDE_IN_AUTOCAST = frozenset(
    {
        "_softmax", "_log_softmax", "logsumexp", "softplus", "exp", "expm1", "log", "log2", "log10", "log1p", "pow",
        "reciprocal", "rsqrt", "sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "_cdist_forward",
        "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
        "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    }
)  # fmt: skip


class Constant(NamedTuple):
    """A number that a half-precision format does not hold.

    Attributes:
        module: Where: a qualified name, empty for the model itself, or `mptrain.probe.module_trail.LOSS`.
        operator: What it was an operand of.
        value: As it was written.
        becomes: ``zero``, or ``infinite``.
    """

    module: str
    operator: str
    value: float
    becomes: Literal["zero", "infinite"]


class HalfArithmetic(EagerMode):
    """Keeps what is suspicious about a forward pass in half precision.

    Args:
        trail: Knows the module at work; follow it on the model that is observed.

    Attributes:
        constants: How often each constant was met that the format does not hold.
        casts: How often tensors were cast to each half-precision dtype, forward and backward, by module.
        narrow: How often each operator that autocast would have computed in FP32 was computed in half, by module.
    """

    def __init__(self, trail: Trail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trail = trail
        self.constants: Counter[Constant] = Counter()
        self.casts: Counter[tuple[str, str]] = Counter()
        self.narrow: Counter[tuple[str, str]] = Counter()

    def inside(self, products: Products) -> Products:
        """A choice of kernels with this in front of it, so that it sees what is asked of them."""
        return Observed(self, products)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        forward = current_pass() == "forward"
        if forward and name in _WITH_CONSTANT and (half := _half_dtype(args, kwargs)):
            for value in _numbers(args, kwargs):
                self._note(name, value, half)  # before the call, which torch may refuse
        result = func(*args, **(kwargs or {}))
        if (cast := cast_of(func, args, result)) is not None and cast[1] in _HALVES:
            self.casts[self.trail.module(), cast[1]] += 1
        if forward and name in _WIDE_IN_AUTOCAST and any(dtype_name(one) in _HALVES for one in floating_in(result)):
            self.narrow[self.trail.module(), name.strip("_").removesuffix("_forward")] += 1
        return result

    def _note(self, operator: str, value: float, dtype: str) -> None:
        form, magnitude = FORMATS[dtype], abs(value)
        if math.isfinite(magnitude) and magnitude > form.max:
            self.constants[Constant(self.trail.module(), operator, value, "infinite")] += 1
        elif operator in _GUARDS and 0 < magnitude < form.smallest_subnormal:
            self.constants[Constant(self.trail.module(), operator, value, "zero")] += 1


_HALVES = ("float16", "bfloat16")


def _half_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str:
    """The half-precision format in which an operator computes; empty where it computes in another."""
    asked = (kwargs or {}).get("dtype")
    if asked is not None:
        name = str(asked).removeprefix("torch.")
        return name if name in _HALVES else ""
    names = [dtype_name(tensor) for tensor in floating_in((args, kwargs)) if not _is_number(tensor)]
    names = names or [dtype_name(tensor) for tensor in floating_in((args, kwargs))]
    return names[0] if names and names[0] in _HALVES and len(set(names)) == 1 else ""


def _numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[float]:
    """The numbers among the operands: plain ones, and tensors of no dimension in a wider format."""
    operands = [*args, *(value for key, value in (kwargs or {}).items() if key not in ("alpha", "dtype"))]
    for value in operands:
        if isinstance(value, float):
            yield value
        elif isinstance(value, torch.Tensor) and _is_number(value):
            yield value.item()  # waits for the device
        elif isinstance(value, int) and not isinstance(value, bool):
            yield float(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.dtype in (torch.float32, torch.float64)
