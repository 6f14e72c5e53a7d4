"""The update and the norms of whole lists of tensors in one kernel launch each, at the floor of memory traffic.

torch's fused kernels take gradients and weights of one dtype only. So half gradients of FP32 master copies have to be
widened before them and the masters rounded behind them, which moves twice the bytes that are necessary. These kernels
read the gradient as it is, and write master, state and rounded weight at once: with FP16 weights and gradients SGD
with momentum moves 20 bytes a parameter, AdamW 28, and the norms 2 more (naive: 40 and 48).

A kernel finds its tensors by tables of addresses on the device (`mptrain.optimizer.gradient_table`).
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
    #: Rules that there are kernels for.
    Known = SGD | Adam | AdamW | Adagrad

UPDATE_BLOCK = 1024  # elements of a program of four warps: 8 for each thread
NORM_BLOCK, NORM_ROUNDS = 1024, 8  # elements that a program squares at once, and how often
PARTIALS_BLOCK = 512  # partial sums that a program adds at once
# Products and sums are rounded one by one, as the interpreter does: so it tells which numbers a device computes.
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_INTERPRETED = ("1", "true", "yes", "on", "y")  # what Triton takes for yes


def available(device: torch.device, rule: Known) -> bool:
    """Return whether these kernels run there for a rule that `supports` knows."""
    return not obstacle(device, rule)


@functools.cache
def obstacle(device: torch.device, rule: Known) -> str:
    """Why these kernels do not run there; empty where they do: on CUDA devices from compute capability 7.0 on.

    On a CPU they run in Triton's interpreter only (``TRITON_INTERPRET=1``), which is for tests. The answer holds for
    the life of the process, and may take seconds: on CUDA, all kernels that a run with this rule launches are tried.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _INTERPRETED
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted != (device.type == "cpu"):
        return "TRITON_INTERPRET is set" if interpreted else "a CPU has torch's kernels"
    if device.type == "cpu":
        return ""
    if not capabilities(device).triton:
        return "the kernels are for NVIDIA devices of compute capability 7.0 and later"
    try:
        _try(device, rule)
    except Exception as error:  # a C compiler, its headers or a driver is missing: nothing that torch's kernels need
        return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    return ""


def _try(device: torch.device, rule: Known) -> None:
    """Compute norms and an update; waits for the device.

    Raises:
        Exception: A kernel cannot be compiled or launched, or gives other numbers than torch's.
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
        raise RuntimeError("they compute other numbers than torch's")


def supports(rule: Rule) -> TypeGuard[Known]:
    """Whether the kernels know an update rule; subclasses may have changed it."""
    return type(rule) in (SGD, Adam, AdamW, Adagrad)


class MultiTensorNorms:
    """The L2 norm of every gradient of a list, in two launches; the same bits for the same gradients.

    A norm is non-finite exactly where an element is: squares of BF16 and FP32 are formed and added in FP64, which no
    finite one can leave. Squares of FP16 are exact in FP32, where eight of them are added; those sums are added in FP64.
    So a norm is off by at most 2^-22 of itself for FP16, and 2^-40 for the others.

    Args:
        weights: P tensors on one device as `GradientTable` wants them.
        table: One that others use too, made of the same weights.
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
        """The norms of P gradients of FP16, BF16 or FP32: float64, shape (P,)."""
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
    """One launch that unscales, updates and rounds a fixed list of weights.

    It computes the formulae of `mptrain.optimizer.rules` in FP32, each operation rounded by itself, with bias
    corrections in FP64 and betas of 48 bits. After one update every weight and state is off the exact result by at most
    2^-21 times the sum of the magnitudes of its terms (5.5 2^-24 were measured over 1500 drawn rules, gradients and
    states), and off torch's fused CPU kernels by hardly more (5.9 2^-24). Then masters are rounded as `MasterWeights.copy_to_params`
    does: FP16 saturates at 65504, NaN stays NaN.

    Gradients keep their values, where torch's kernels write back what they have unscaled. An update whose ``skip`` is 1
    changes nothing and reads no gradient.

    Args:
        rule: One that `supports` knows.
        weights: P dense FP32 tensors on one device: master copies, or parameters.
        state: Name to P FP32 tensors, as `Rule.state` names them, with the weights' strides.
        weight_decays: P factors.
        publish: For each weight the FP16 or BF16 parameter that gets its rounded value and has its strides, or None.
        table: One that others use too, made of the same weights.

    Attributes:
        table: The same, or its own.
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
        """Update in place by P gradients, each of FP16, BF16 or FP32, unless ``skip`` refuses it."""
        table, _alive = self.table.locate(grads)
        addresses = list(map(torch.Tensor.data_ptr, self._parameters))  # a module can give a parameter new memory
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
                raise ValueError("weights and state are FP32, and published weights FP16 or BF16")
            for tensor in wide if half is None else [*wide, half]:
                if not same_order(weight, tensor) or tensor.device != weight.device:
                    raise ValueError(f"weight, state and published weight of {tuple(weight.shape)} do not correspond")
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
    """What the kernel calls a rule, its constants, and the names of its state."""
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
    """A beta as the largest FP32 number below it and the positive rest, and its complement to 1."""
    nearest = torch.tensor(beta, dtype=torch.float32)
    upper = nearest.item()
    if 0 < beta <= upper:
        upper = torch.nextafter(nearest, torch.zeros(())).item()
    return upper, beta - upper, 1.0 - beta


def _blocks(numels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which block of which tensor each program takes: int32, shape (N, 2); and the first program of each: (P + 1,)."""
    counts = (numels + size - 1) // size
    first = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tensors = torch.repeat_interleave(torch.arange(len(counts)), counts)
    numbers = torch.arange(len(tensors)) - first[tensors]
    return torch.stack([tensors, numbers], dim=1).to(torch.int32).contiguous(), first


def _kernels() -> ModuleType:
    """The kernels; imported here because importing Triton takes 0.4 seconds."""
    return importlib.import_module("mptrain.optimizer.triton_kernels")
