"""Multi-tensor kernels for updates and gradient norms with minimal memory traffic.

torch's fused kernels require gradients and weights of one dtype. For FP32 master weights, half-precision gradients
would have to be widened before the update and the master weights rounded after it, which doubles the memory traffic.
These kernels read the gradient in its own dtype and write master, state and rounded weight in one pass: with FP16
weights and gradients SGD with momentum moves 20 bytes a parameter, AdamW 28, and the norms 2 more (naive: 40 and 48).

Kernels find their tensors through tables of addresses on the device (`mptrain.optimizer.gradient_table`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from mptrain.device import capabilities, on
from mptrain.optimizer.gradient_table import DTYPE_CODES, AddressTable, GradientTable, same_order, upload
from mptrain.optimizer.rules import SGD, Adagrad, Adam, AdamW, Group, Rule, UpdateInputs

if TYPE_CHECKING:
    from mptrain.optimizer.torch_rule import TorchRule

    #: Rules with a kernel.
    Known = SGD | Adam | AdamW | Adagrad

UPDATE_BLOCK = 1024  # elements of a program of four warps: 8 for each thread
NORM_BLOCK, NORM_ROUNDS = 1024, 8  # elements that a program squares at once, and number of rounds
PARTIALS_BLOCK = 512  # partial sums that a program adds at once
# Without fused multiply-add, as in Triton's interpreter, so that tests in the interpreter predict the device's results.
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_INTERPRETED = ("1", "true", "yes", "on", "y")  # values of TRITON_INTERPRET that Triton treats as true


def available(device: torch.device, rule: Known) -> bool:
    """Return whether the Triton kernels of this module run on a device for an update rule.

    Args:
        device: The training device.
        rule: Update rule that passes `supports`.
    """
    return not obstacle(device, rule)


@functools.cache
def obstacle(device: torch.device, rule: Known) -> str:
    """Return the reason why the Triton kernels of this module do not run on a device; empty if they do.

    They run on CUDA devices from compute capability 7.0 on. On a CPU they run only in Triton's interpreter
    (``TRITON_INTERPRET=1``), which is for tests. The result is cached for the process. The first call may take seconds:
    on CUDA it launches every kernel that a run with this rule needs.

    Args:
        device: The training device.
        rule: Update rule that passes `supports`.

    Returns:
        One line for the user, such as ``Triton is not installed``.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _INTERPRETED
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted != (device.type == "cpu"):
        return "TRITON_INTERPRET is set" if interpreted else "on a CPU torch's kernels are used"
    if device.type == "cpu":
        return ""
    if not capabilities(device).triton:
        return "the kernels require an NVIDIA device of compute capability 7.0 or later"
    try:
        _try(device, rule)
    except Exception as error:  # e.g. no C compiler, headers or driver, which torch's kernels do not need
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return ""


def _try(device: torch.device, rule: Known) -> None:
    """Compute norms and an update on small tensors; synchronises with the device.

    Raises:
        Exception: A kernel cannot be compiled or launched, or its results differ from torch's.
    """
    one = torch.ones(1, device=device)
    inputs = UpdateInputs(lr=one, step=one, grad_scale=one, skip=torch.zeros(1, device=device))
    grad = torch.tensor([3.0, 4.0], device=device)
    ours, theirs, rounded = grad.clone(), grad.clone(), grad.half()
    states = [{name: [value] for name, value in rule.state(weight).items()} for weight in (ours, theirs)]
    norm = MultiTensorNorms([grad])([grad])
    MultiTensorUpdate(rule, [ours], states[0], [rule.weight_decay], [rounded])([grad], inputs)
    rule.apply(Group([theirs], states[1], rule.weight_decay), [grad.clone()], inputs)
    if norm.item() != 5.0 or not torch.allclose(ours, theirs, atol=1e-6) or not torch.equal(rounded, ours.half()):
        raise RuntimeError("results differ from torch's")


def supports(rule: Rule | TorchRule) -> TypeGuard[Known]:
    """Return whether there is a Triton kernel for an update rule: SGD, Adam, AdamW or Adagrad.

    Subclasses are excluded, because they may change the formula.
    """
    return type(rule) in (SGD, Adam, AdamW, Adagrad)


class MultiTensorNorms:
    """Kernel that computes the L2 norm of each gradient of a step, in two launches and bit-for-bit reproducible.

    A norm is non-finite exactly if an element is: BF16 and FP32 values are squared and added in FP64, where no finite
    value overflows. FP16 squares are exact in FP32, where eight of them are added; those sums are added in FP64. The
    relative error of a norm is at most 2^-22 for FP16 and 2^-40 for BF16 and FP32.

    Args:
        weights: P tensors on one device, as for `GradientTable`; each gradient has the shape of its weight.
        table: Address table made of the same weights, to share with another kernel; None makes a new one.
    """

    def __init__(self, weights: Sequence[Tensor], table: GradientTable | None = None) -> None:
        self._table = table or GradientTable(weights)
        self._count = len(weights)
        device = self._table.device
        numels = torch.tensor([weight.numel() for weight in weights], dtype=torch.int64)
        blocks, first = _blocks(numels, NORM_BLOCK * NORM_ROUNDS)
        self._blocks, self._first, self._numels = (upload(tensor, device) for tensor in (blocks, first, numels))
        self._partials = torch.empty(len(blocks), dtype=torch.float64, device=device)

    def __call__(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms of P gradients of FP16, BF16 or FP32: float64, shape (P,), on their device."""
        kernels = _kernels()
        out = torch.empty(self._count, dtype=torch.float64, device=self._partials.device)
        table, _alive = self._table.locate(grads)
        with on(out.device):
            if len(self._blocks):
                kernels.partial_squares[(len(self._blocks),)](
                    self._blocks,
                    self._numels,
                    table,
                    self._partials,
                    self._count,
                    block=NORM_BLOCK,
                    rounds=NORM_ROUNDS,
                    **_LAUNCH,
                )
            if self._count:
                kernels.norms[(self._count,)](self._partials, self._first, out, block=PARTIALS_BLOCK, **_LAUNCH)
        return out


class MultiTensorUpdate:
    """Kernel that updates a fixed list of weights in one launch: unscale the gradient, apply the rule, round to half.

    The kernel computes the formulae of `mptrain.optimizer.rules` in FP32 without fused multiply-add, with bias
    corrections in FP64 and betas of 48 bits. After one update the error of every weight and state is at most 2^-21
    times the sum of the magnitudes of its terms (measured over 1500 random rules, gradients and states: 5.5 2^-24, and
    5.9 2^-24 against torch's fused CPU kernels). Masters are then rounded as in `MasterWeights.copy_to_params`: FP16
    saturates at 65504, NaN stays NaN.

    Gradients are not modified, whereas torch's kernels write the unscaled gradients back. An update whose ``skip`` is 1
    changes nothing and reads no gradient.

    Args:
        rule: Update rule that passes `supports`.
        weights: P dense FP32 tensors on one device: master copies, or parameters.
        state: P FP32 tensors for each state name of `Rule.state`, with the strides of the weights.
        weight_decays: Weight decay of each weight, P numbers.
        publish: For each weight the FP16 or BF16 parameter that receives the rounded value, with equal strides, or
            None.
        table: Address table made of the same weights, to share with another kernel; None makes a new one.

    Attributes:
        table: Address table of the gradients: the given table, or a new one.

    Raises:
        ValueError: There is no kernel for the rule.
    """

    def __init__(
        self,
        rule: Rule,
        weights: Sequence[Tensor],
        state: dict[str, list[Tensor]],
        weight_decays: Sequence[float],
        publish: Sequence[Tensor | None],
        table: GradientTable | None = None,
    ) -> None:
        name, constants, keys = _plan(rule)
        self._weights = list(weights)
        self._state = [state[key] for key in keys]
        self._publish = list(publish)
        self._parameters = [w if p is None else p for w, p in zip(self._weights, self._publish, strict=True)]
        self.table = table or GradientTable(weights)
        device = self.table.device
        self._places = AddressTable(device)
        self._decays = upload(torch.tensor(list(weight_decays), dtype=torch.float32), device)
        self._constants = upload(torch.tensor(constants, dtype=torch.float64), device)
        numels = torch.tensor([weight.numel() for weight in weights], dtype=torch.int64)
        self._blocks = upload(_blocks(numels, UPDATE_BLOCK)[0], device)
        self._static: dict[str, Any] = {
            "rule": name,
            "momentum": name == "sgd" and bool(keys),
            "nesterov": isinstance(rule, SGD) and rule.nesterov,
            "decaying": any(weight_decays),
            "block": UPDATE_BLOCK,
            **_LAUNCH,
        }

    def __call__(self, grads: Sequence[Tensor], inputs: UpdateInputs) -> None:
        """Update the weights in place, unless ``inputs.skip`` is 1.

        Args:
            grads: P scaled gradients, each of FP16, BF16 or FP32.
            inputs: Learning rate, number of the update, divisor of the gradients, and whether to skip, as device
                values.

        Raises:
            ValueError: Weights, state and published parameters do not match in dtype, layout or device.
        """
        table, _alive = self.table.locate(grads)
        addresses = list(map(torch.Tensor.data_ptr, self._parameters))  # a module can reallocate a parameter
        tensors = self._places.current(addresses, self._rows)
        if len(self._blocks):
            with on(self._decays.device):
                _kernels().update[(len(self._blocks),)](
                    self._blocks,
                    tensors,
                    table,
                    self._decays,
                    self._constants,
                    inputs.lr,
                    inputs.step,
                    inputs.grad_scale,
                    inputs.skip,
                    len(self._weights),
                    **self._static,
                )
        torch.autograd.graph.increment_version(self._parameters)

    def _rows(self) -> list[list[int]]:
        halves = (torch.float16, torch.bfloat16)
        for index, weight in enumerate(self._weights):
            half = self._publish[index]
            wide = [weight, *(tensors[index] for tensors in self._state)]
            if any(tensor.dtype != torch.float32 for tensor in wide) or (half is not None and half.dtype not in halves):
                raise ValueError("weights and state must be FP32, and published weights FP16 or BF16")
            for tensor in wide if half is None else [*wide, half]:
                if not same_order(weight, tensor) or tensor.device != weight.device:
                    raise ValueError(f"weight, state and published weight of {tuple(weight.shape)} do not match")
        none = [0] * len(self._weights)
        states = [list(map(torch.Tensor.data_ptr, tensors)) for tensors in self._state]
        return [
            [weight.data_ptr() for weight in self._weights],
            *[*states, none, none][:2],
            [0 if half is None else half.data_ptr() for half in self._publish],
            [0 if half is None else DTYPE_CODES[half.dtype] for half in self._publish],
            [weight.numel() for weight in self._weights],
        ]


def _plan(rule: Rule) -> tuple[str, list[float], tuple[str, ...]]:
    """Return the kernel's name of a rule, its constants, and the names of its state."""
    if not supports(rule):
        raise ValueError(f"there is no kernel for {type(rule).__name__}")
    if isinstance(rule, SGD):
        return "sgd", [rule.momentum], ("momentum_buffer",) if rule.momentum else ()
    if isinstance(rule, Adagrad):
        return "adagrad", [rule.eps], ("sum",)
    assert isinstance(rule, Adam | AdamW)
    logarithms = [math.log2(beta) if beta else -math.inf for beta in rule.betas]
    constants = [rule.eps, *_parts(rule.betas[0]), *_parts(rule.betas[1]), *logarithms]
    return "adam" if isinstance(rule, Adam) else "adamw", constants, ("exp_avg", "exp_avg_sq")


def _parts(beta: float) -> tuple[float, float, float]:
    """Split a beta into the largest FP32 number below it, the positive remainder and the complement to 1."""
    nearest = torch.tensor(beta, dtype=torch.float32)
    upper = nearest.item()
    if 0 < beta <= upper:
        upper = torch.nextafter(nearest, torch.zeros(())).item()
    return upper, beta - upper, 1.0 - beta


def _blocks(numels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return tensor and block of each program, int32, shape (N, 2); and the first program of each tensor, (P + 1,)."""
    counts = (numels + size - 1) // size
    first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tensors = torch.repeat_interleave(torch.arange(len(counts)), counts)
    numbers = torch.arange(len(tensors)) - first[tensors]
    return torch.stack([tensors, numbers], dim=1).to(torch.int32).contiguous(), first


def _kernels() -> ModuleType:
    """Return the module of the kernels, imported lazily because importing Triton takes 0.4 seconds."""
    return importlib.import_module("mptrain.optimizer.triton_kernels")
