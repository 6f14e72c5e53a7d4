"""Half-precision products on CPUs that have no half-precision arithmetic.

Without AVX512-FP16 or AMX, torch's FP16 convolutions and matrix products on a CPU run scalar fallbacks, 10 to 80 times
slower than FP32, and its LSTM under autocast does not run at all. Here such a product is computed as a tensor core
computes it (Micikevicius et al. 2018, section 3.3): operands in half precision, products and sums in FP32, the result
rounded once to half precision. Every tensor in memory keeps its dtype, before and after; only the inside of the product
is wide. The difference to a native kernel is the order of an FP32 sum.

An operator that chains products is wide from its operands to its results: attention, and an LSTM layer over all its
time steps where torch makes one operator of it, which is under autocast, from FP32 input. Of FP16 input or weights it
makes a chain of small operators on such a CPU, and what stands between its products is rounded at each time step.

Some operators are wide on every CPU. Torch's kernels there add some sums up in half precision, those for CUDA in FP32.
And no CPU trains convolutions or LSTM layers in FP16: oneDNN has primitives for inference alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mptrain.torch_private import Convolution, TorchDispatchMode, has_native_half

if TYPE_CHECKING:
    from mptrain.precision.policy import Policy

aten = torch.ops.aten

#: Operators whose arithmetic is products summed up, on a CPU and on CUDA. Their first tensor is an operand.
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
    }
)

#: Sums that a CPU alone adds up in half precision: of 8,192 gradients of one token, half is lost in FP16.
SUMS = frozenset(
    {
        aten.embedding_dense_backward.default,
        aten._embedding_bag_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)

#: Products that no CPU computes in FP16 when it trains. With AVX512-FP16 the gradients of a convolution took 8 to 80 times
#: as long as in FP32 (torch 2.14), and an LSTM layer raised that oneDNN has no such primitive.
NOT_TRAINED_IN_FP16 = frozenset(
    {
        aten.convolution_backward.default,
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
    }
)

#: Products that torch refuses of operands of several dtypes. Upcast they would be computed, and refused on other devices.
_OF_ONE_DTYPE = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
    }
)

#: Places of results that are FP32 whatever the operands are, in torch's own kernels: statistics, and gradients that
#: autograd rounds.
_STAY_WIDE: Mapping[Any, frozenset[int]] = {
    aten.mkldnn_rnn_layer_backward.default: frozenset(range(7)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: frozenset({1}),
    aten.native_layer_norm.default: frozenset({1, 2}),
}


class EagerMode(TorchDispatchMode):
    """A dispatch mode whose own operators are never compiled.

    By itself torch wraps the method of a mode to keep its compiler away, and imports the compiler for it, which takes longer
    than everything else at the start of a run.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


#: Modules that run a sum or an untrained product: in this step or, where a pass leaves modules out, in another.
_RUN_BY: tuple[tuple[type[nn.Module], tuple[Any, ...]], ...] = (
    (nn.LayerNorm, (aten.native_layer_norm.default, aten.native_layer_norm_backward.default)),
    (nn.Embedding, (aten.embedding_dense_backward.default,)),
    (nn.EmbeddingBag, (aten._embedding_bag_backward.default,)),
    (Convolution, (aten.convolution_backward.default,)),
    (nn.RNNBase, (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)),
)


class Upcast(EagerMode):
    """Runs half-precision products and sums through FP32 kernels, forward and backward.

    Args:
        operators: Which ones.
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
            part.to(half) if _is_float(part) and place not in stays else part for place, part in enumerate(result)
        )


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _widen(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


_HALF = (torch.float16, torch.bfloat16)

#: Their results and gradients have the dtype of their weights, under autocast too.
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def uses_upcast(policy: Policy, device: torch.device) -> bool:
    """Whether half-precision products of a run go through FP32 kernels."""
    if device.type != "cpu" or not policy.half or policy.cpu_kernels == "native":
        return False
    return policy.cpu_kernels == "upcast" or not has_native_half(policy.compute)


class Products:
    """The choice of kernels of a run's passes.

    Args:
        operators: Those that run `Upcast`; where there are none, the context does nothing.

    Attributes:
        operators: As given, until `leave_out_idle` forgets them.
        context: To be entered around each pass, again and again.
    """

    def __init__(self, operators: frozenset[Any] = frozenset()) -> None:
        self.operators = operators
        self.context: AbstractContextManager[Any] = Upcast(operators) if operators else contextlib.nullcontext()

    def leave_out_idle(self, model: nn.Module, in_half: Collection[Any]) -> None:
        """Forget the operators where a network runs none of them: a dispatch mode costs each of all operators some microseconds.

        Where it runs one, all are kept: they cost no more then, and evaluation may run others than training does.

        Args:
            model: The network; what its modules may run in other steps is kept.
            in_half: The operators that one forward and backward pass of it called with half-precision tensors.
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


def products(policy: Policy, device: torch.device, *, compiled: bool = False) -> Products:
    """The kernels of a run.

    Args:
        policy: The mode.
        device: Where it runs.
        compiled: torch.compile makes the kernels: it does nothing for a model within a `Upcast`, and sums in FP32.

    Returns:
        Everything `Upcast` where a run widens its products. On a CPU with arithmetic of its own `SUMS` are, and in FP16
        `NOT_TRAINED_IN_FP16`, unless native kernels were asked for. Else nothing is.
    """
    if uses_upcast(policy, device):
        return Products(PRODUCTS | SUMS)
    if device.type == "cpu" and policy.half and policy.cpu_kernels != "native" and not compiled:
        return Products(SUMS | NOT_TRAINED_IN_FP16 if policy.compute == "float16" else SUMS)
    return Products()
