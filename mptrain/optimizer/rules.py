"""Update rules on torch's fused kernels, which unscale gradients and skip updates on the device.

On a device without fused kernels the same formulae are computed tensor by tensor in FP32.

The kernels are called directly. An optimizer of torch.optim would bring its own state handling (which casts FP32
moments to FP16 on load), synchronise with the host in `GradScaler.step`, and import the compiler at start-up.

Properties of the kernels that the calls below rely on: they compare ``found_inf`` with exactly 1; they divide each
gradient by ``grad_scale`` before anything else; they never advance the step count. If its first step is skipped, fused
SGD later reads a momentum buffer that was never written. So the buffers start at zero and ``is_first_step`` is never
set (with identical results, because there is no dampening).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from mptrain.system.device import capabilities
from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, NonNegativeFloat
from mptrain.system.torch_private import fused_adagrad_, fused_adam_, fused_adamw_, fused_sgd_, has_kernel

if TYPE_CHECKING:
    #: Function of weight, unscaled gradient, state, weight decay and inputs; returns the new weight and state.
    Moved = Callable[[Tensor, Tensor, dict[str, Tensor], float, "UpdateInputs"], tuple[Tensor, dict[str, Tensor]]]

#: A fused torch kernel that updates a list of weights.
FusedKernel = Callable[..., None]

Epsilon = Annotated[float, Gt(0), Lt(1)]
Beta = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class Group:
    """Weights that one kernel call updates, as they have equal dtype, device and weight decay, with their state."""

    weights: list[Tensor]
    state: dict[str, list[Tensor]]
    weight_decay: float

    @functools.cached_property
    def fused(self) -> bool:
        """True if torch has fused optimizer kernels for the device of the weights."""
        return capabilities(self.weights[0].device).fused


class ParameterOptions(NamedTuple):
    """Learning rate factor and weight decay of an optimizer for one parameter."""

    lr_factor: float
    weight_decay: float


class UpdateInputs(NamedTuple):
    """Device values that an update rule reads in one update, each float32 of shape (1,).

    Attributes:
        step: Number of this update of these parameters, from 1; unchanged if the update is skipped.
        grad_scale: Divisor of every gradient: the loss scale with the clip coefficient folded in, or None.
        skip: 1 skips the update, 0 applies it.
    """

    lr: Tensor
    step: Tensor
    grad_scale: Tensor | None
    skip: Tensor


class Rule(Protocol):
    """Interface of an update rule such as SGD: a `torch.optim` optimizer without its state."""

    @property
    def lr(self) -> float:
        """Base learning rate, which the schedule's factors multiply."""

    @property
    def weight_decay(self) -> float:
        """Weight decay of the parameters that decay."""

    @property
    def decay_norms_and_biases(self) -> bool:
        """True if weight decay also applies to parameters with at most one dimension, such as biases."""

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the initial optimizer state of a weight: tensors of its shape and dtype, by name."""

    def apply(self, group: Group, grads: list[Tensor], inputs: UpdateInputs) -> None:
        """Update a group of weights and their state in place, unless ``inputs.skip`` is 1.

        The gradients are scaled, one per weight, in the dtype of the weights. They may be overwritten.
        """


#: Unused options of torch's fused SGD kernel.
_PLAIN = {"dampening": 0.0, "is_first_step": False}


@dataclass(frozen=True)
class SGD:
    """Update rule of stochastic gradient descent with momentum (`torch.optim.SGD`).

    A momentum of 0 uses no momentum buffer. Weight decay times the weight is added to the gradient (an L2 penalty).
    """

    lr: NonNegativeFloat = 0.05
    momentum: BelowOneOrZero = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov=true requires momentum", "set optimizer.momentum=0.9")

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a zeroed ``momentum_buffer`` of a weight, or nothing without momentum."""
        return {"momentum_buffer": torch.zeros_like(weight)} if self.momentum else {}

    def apply(self, group: Group, grads: list[Tensor], inputs: UpdateInputs) -> None:
        """Update a group of weights in place, with one fused call if torch has the kernel."""
        if group.fused:
            buffers = group.state.get("momentum_buffer", [])
            _fused(fused_sgd_, group, grads, inputs, buffers, momentum=self.momentum, nesterov=self.nesterov, **_PLAIN)
        else:
            _tensor_by_tensor(self._moved, group, grads, inputs)

    def _moved(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float, inputs: UpdateInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        grad = grad + decay * weight
        if not self.momentum:
            return weight - inputs.lr * grad, {}
        buffer = self.momentum * state["momentum_buffer"] + grad
        step = grad + self.momentum * buffer if self.nesterov else buffer
        return weight - inputs.lr * step, {"momentum_buffer": buffer}


@dataclass(frozen=True)
class _AdamConstants:
    """Constants and state that Adam and AdamW share.

    ``betas`` are the decay rates of the running averages of the gradient and of its square; ``eps`` is added to the
    square root of the second moment.
    """

    lr: NonNegativeFloat = 0.001
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = False

    _kernel: ClassVar[FusedKernel]

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def apply(self, group: Group, grads: list[Tensor], inputs: UpdateInputs) -> None:
        if group.fused:
            state = [group.state["exp_avg"], group.state["exp_avg_sq"], [], [inputs.step] * len(grads)]
            _fused(
                self._kernel,
                group,
                grads,
                inputs,
                *state,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                amsgrad=False,
            )
        else:
            _tensor_by_tensor(self._moved, group, grads, inputs)

    def _moved(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float, inputs: UpdateInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weight and state; any weight decay is already in the gradient or weight."""
        first, second = self.betas
        mean = torch.lerp(state["exp_avg"], grad, 1 - first)
        square = torch.lerp(state["exp_avg_sq"], grad * grad, 1 - second)
        seen1, seen2 = (-torch.expm1(inputs.step * math.log(beta)) if beta else 1.0 for beta in (first, second))
        denominator = (square / seen2).sqrt() + self.eps
        return weight - inputs.lr / seen1 * mean / denominator, {"exp_avg": mean, "exp_avg_sq": square}


@dataclass(frozen=True)
class Adam(_AdamConstants):
    """Update rule of Adam (Kingma and Ba 2015; `torch.optim.Adam`), whose weight decay is an L2 penalty."""

    _kernel: ClassVar[FusedKernel] = staticmethod(fused_adam_)

    def _moved(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float, inputs: UpdateInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return super()._moved(weight, grad + decay * weight, state, decay, inputs)


@dataclass(frozen=True)
class AdamW(_AdamConstants):
    """Update rule of Adam with decoupled weight decay (Loshchilov and Hutter 2019; `torch.optim.AdamW`).

    Each update first multiplies a weight by ``1 - lr * weight_decay``.
    """

    weight_decay: NonNegativeFloat = 0.01

    _kernel: ClassVar[FusedKernel] = staticmethod(fused_adamw_)

    def _moved(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float, inputs: UpdateInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return super()._moved(weight * (1 - inputs.lr * decay), grad, state, decay, inputs)


@dataclass(frozen=True)
class Adagrad:
    """Update rule of Adagrad (Duchi et al. 2011; `torch.optim.Adagrad` without its own learning rate decay).

    ``initial_accumulator`` is the first value of the sum of squared gradients; ``eps`` is added to its square root.
    Weight decay times the weight is added to the gradient (an L2 penalty).
    """

    lr: NonNegativeFloat = 0.01
    eps: Epsilon = 1e-10
    initial_accumulator: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    decay_norms_and_biases: bool = False

    def state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return ``sum``, the sum of squared gradients of a weight."""
        return {"sum": torch.full_like(weight, self.initial_accumulator)}

    def apply(self, group: Group, grads: list[Tensor], inputs: UpdateInputs) -> None:
        """Update a group of weights in place, with one fused call if torch has the kernel."""
        if group.fused and (_CUDA_ADAGRAD or group.weights[0].device.type != "cuda"):
            steps = [inputs.step] * len(grads)
            _fused(fused_adagrad_, group, grads, inputs, group.state["sum"], steps, eps=self.eps, lr_decay=0.0)
        else:
            _tensor_by_tensor(self._moved, group, grads, inputs)

    def _moved(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], decay: float, inputs: UpdateInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        grad = grad + decay * weight
        total = state["sum"] + grad * grad
        return weight - inputs.lr * grad / (total.sqrt() + self.eps), {"sum": total}


def _fused(
    kernel: FusedKernel, group: Group, grads: list[Tensor], inputs: UpdateInputs, *state: list[Tensor], **constants: Any
) -> None:
    varying = {"lr": inputs.lr, "grad_scale": inputs.grad_scale, "found_inf": inputs.skip}
    kernel(group.weights, grads, *state, **constants, **varying, weight_decay=group.weight_decay, maximize=False)


def _tensor_by_tensor(moved: Moved, group: Group, grads: list[Tensor], inputs: UpdateInputs) -> None:
    # Zero-dimensional, because a weight may be.
    grad_scale = None if inputs.grad_scale is None else inputs.grad_scale[0]
    inputs = UpdateInputs(lr=inputs.lr[0], step=inputs.step[0], grad_scale=None, skip=inputs.skip[0])
    refused = inputs.skip == 1
    for index, (weight, grad) in enumerate(zip(group.weights, grads, strict=True)):
        state = {name: tensors[index] for name, tensors in group.state.items()}
        wide = {name: tensor.float() for name, tensor in state.items()}
        unscaled = grad.float() if grad_scale is None else grad.float() / grad_scale
        new, following = moved(weight.float(), unscaled, wide, group.weight_decay, inputs)
        weight.copy_(torch.where(refused, weight, new))
        for name, value in following.items():
            state[name].copy_(torch.where(refused, state[name], value))


_CUDA_ADAGRAD = has_kernel("aten::_fused_adagrad_", "CUDA")
