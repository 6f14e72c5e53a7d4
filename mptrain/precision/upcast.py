"""Half-precision products of a training step on CPUs without half-precision arithmetic.

Without AVX512-FP16 or AMX, torch's FP16 convolutions and matrix products on a CPU run scalar fallbacks, 10 to 80 times
slower than FP32, and LSTM under autocast does not run at all. This module computes such a product like a tensor core
(Micikevicius et al. 2018, section 3.3): operands in half precision, products and sums in FP32, the result rounded once
to half precision. Tensors in memory keep their dtype; only the arithmetic inside the product is FP32. The difference to
a native kernel is the order of an FP32 sum.

An operator that chains products computes in FP32 from operands to results: attention, and an LSTM layer over all time
steps if torch runs it as one operator, which is the case under autocast with FP32 input. With FP16 input or weights
torch runs the LSTM as many small operators on such a CPU, and intermediate results are rounded at each time step.

Some operators are upcast on every CPU: torch's CPU kernels accumulate some sums in half precision where its CUDA
kernels use FP32, no CPU trains convolutions or LSTM layers in FP16, because oneDNN supports them for inference
only, and fused attention is slower in half precision than in FP32.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mptrain.system.torch_private import Convolution, TorchDispatchMode, has_native_half

if TYPE_CHECKING:
    from mptrain.precision.policy import Policy

aten = torch.ops.aten

#: Operators that compute sums of products, on a CPU and on CUDA. Their first tensor is an operand.
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
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
        aten._cudnn_rnn.default,
        aten._cudnn_rnn_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._grouped_mm.default,  # experts of a mixture; autocast does not cast it
        # Called whole only on accelerators with kernels of their own for them: MPS, XPU, ROCm.
        aten.linear.default,
        aten.linear_backward.default,
        aten.addbmm.default,
        aten.miopen_rnn.default,
        aten.miopen_rnn_backward.default,
        aten._lstm_mps.default,
        aten.lstm_mps_backward.default,
        aten._scaled_dot_product_attention_math_for_mps.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        # Called by code that bypasses `scaled_dot_product_attention`.
        aten._flash_attention_forward.default,
        aten._flash_attention_backward.default,
        aten._efficient_attention_forward.default,
        aten._efficient_attention_backward.default,
    }
)

#: Sums that only CPU kernels accumulate in half precision: of 8,192 gradients of one token, FP16 loses half.
SUMS = frozenset(
    {
        aten.embedding_dense_backward.default,
        aten._embedding_bag_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)

#: Products that no CPU supports in FP16 for training. With AVX512-FP16 the gradients of a convolution took 8 to 80
#: times as long as in FP32 (torch 2.14), and an LSTM layer failed because oneDNN has no such primitive.
NOT_TRAINED_IN_FP16 = frozenset(
    {
        aten.convolution_backward.default,
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
    }
)

#: Fused attention of torch's CPU kernels. Its backward pass in BF16 took 4 times as long as in FP32 for 32 sequences of
#: 64 tokens, 8 times for 256 tokens (torch 2.14, AVX2), and 7 times as long as products and a softmax (AVX512-BF16).
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)

#: Products that torch rejects for operands of different dtypes. They are not upcast, so that a CPU rejects them too.
_OF_ONE_DTYPE = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
    }
)

#: Indices of results that are FP32 for any operands in torch's kernels: statistics, and gradients that autograd rounds.
_STAY_WIDE: Mapping[Any, frozenset[int]] = {
    aten.mkldnn_rnn_layer_backward.default: frozenset(range(7)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: frozenset({1}),
    aten.native_layer_norm.default: frozenset({1, 2}),
}


class EagerMode(TorchDispatchMode):
    """Base class of torch's dispatch modes (`TorchDispatchMode`) that does not import torch's compiler.

    By default torch wraps a mode's dispatch method to exclude it from compilation and imports the compiler to do so,
    which takes longer than everything else at the start of a run.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


#: Operators of `SUMS` and `NOT_TRAINED_IN_FP16` that each module class may run, in this step or a later one.
_RUN_BY: tuple[tuple[type[nn.Module], tuple[Any, ...]], ...] = (
    (nn.LayerNorm, (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)),
    (nn.Embedding, (aten.embedding_dense_backward.default,)),
    (nn.EmbeddingBag, (aten._embedding_bag_backward.default,)),
    (Convolution, (aten.convolution_backward.default,)),
    (nn.RNNBase, (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)),
)


class Upcast(EagerMode):
    """Dispatch mode that runs half-precision products and sums of a step with FP32 kernels, forward and backward.

    Half-precision operands are cast to float32, and results are rounded to the dtype of the operands, except statistics
    that torch's own kernels return in FP32. A product of operands of different dtypes is left for torch to reject.
    """

    def __init__(self, operators: frozenset[Any] = PRODUCTS | SUMS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        half = next((a.dtype for a in args if _is_half(a)), None) if func in self.operators else None
        if half is None or (func in _OF_ONE_DTYPE and any(_is_float(a) and a.dtype != half for a in args)):
            return func(*args, **(kwargs or {}))
        result = func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})
        if isinstance(result, torch.Tensor):
            return result.to(half)
        stays = _STAY_WIDE.get(func, frozenset())
        return tuple(
            part.to(half) if _is_float(part) and index not in stays else part for index, part in enumerate(result)
        )


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _widen(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


_HALF = (torch.float16, torch.bfloat16)

#: Modules whose results and gradients have the dtype of their weights, even under autocast.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def uses_upcast(policy: Policy, device: torch.device) -> bool:
    """Return whether a run computes all its half-precision products with FP32 kernels (`Upcast`).

    This holds on a CPU if ``policy.cpu_kernels`` is ``upcast``, or ``auto`` and the CPU has no such arithmetic.
    """
    if device.type != "cpu" or not policy.half or policy.cpu_kernels == "native":
        return False
    return policy.cpu_kernels == "upcast" or not has_native_half(policy.compute)


class Products:
    """Choice of kernels for the half-precision products and sums of a run's forward and backward passes.

    `Upcast` runs ``operators`` in FP32; if they are empty, ``context`` does nothing. The context surrounds each pass
    and can be entered repeatedly.

    Attributes:
        calls: Number of calls of products by what an emulation of formats makes of them; empty without one.
    """

    def __init__(self, operators: frozenset[Any] = frozenset()) -> None:
        self.operators = operators
        self.calls: Counter[str] = Counter()
        self.context: AbstractContextManager[Any] = Upcast(operators) if operators else contextlib.nullcontext()

    def leave_out_idle(self, model: nn.Module, in_half: Collection[Any]) -> None:
        """Clear the operators to upcast if a network runs none, as a dispatch mode slows every operator slightly.

        If the network runs any of them, all are kept: they cost nothing more, and evaluation may run other operators.
        ``in_half`` has the operators called with half-precision tensors in one forward and backward pass; operators
        that the network's modules may run in other steps count too.
        """
        may = {
            operator
            for module in model.modules()
            for kind, operators in _RUN_BY
            if isinstance(module, kind) and not (isinstance(module, _TABLES) and module.weight.dtype not in _HALF)
            for operator in operators
        }
        if not self.operators & (may | set(in_half)):
            self.operators, self.context = frozenset(), contextlib.nullcontext()

    def begin_step(self, seed: int, step: int, rank: int = 0) -> None:
        """Let the random bits of a step's products, if any, follow from the run's seed, the step and the rank."""

    def of(self, model: nn.Module) -> Products:
        """Return the choice for a model with the same names of parameters, such as a gathered copy."""
        return self


def products(policy: Policy, device: torch.device, *, compiled: bool = False) -> Products:
    """Return the choice of kernels with which a run computes half-precision products and sums.

    All are upcast if `uses_upcast`. On a CPU with half-precision arithmetic only `SUMS` and `ATTENTION`, and with FP16
    also `NOT_TRAINED_IN_FP16`, unless ``cpu_kernels`` is ``native`` or torch.compile generates the kernels
    (``compiled``), which sum in FP32. Otherwise none.
    """
    if uses_upcast(policy, device):
        return Products(PRODUCTS | SUMS)
    if device.type == "cpu" and policy.half and policy.cpu_kernels != "native" and not compiled:
        return Products(SUMS | ATTENTION | (NOT_TRAINED_IN_FP16 if policy.compute == "float16" else frozenset()))
    return Products()
