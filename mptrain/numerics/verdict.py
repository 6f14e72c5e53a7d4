"""Whether a step's gradients are finite, and how large they are, as device values that the host never waits for.

The norm of each gradient is taken in FP64. No FP32 gradient can overflow there, so a non-finite norm means a
non-finite element, and one pass serves the verdict, the clipping norm and the names of the offenders. An FP32 norm
would call [1e30, 1e30] an overflow although both elements are finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step's gradients turned out to be. All tensors live on the training device.

    Attributes:
        overflow: bool, shape (1,): some gradient holds inf or NaN, or the scale is 0.
        skip: float32, shape (1,): 1 where the update is refused, else 0. Exactly 0 or 1, because torch's fused
            optimizers compare with 1.
        grad_norm: float64, shape (1,): L2 norm of the unscaled gradients before clipping; non-finite on overflow.
        norms: float64, shape (P,): L2 norm of each parameter's gradient, still scaled; inf or NaN names an offender,
            -1 a parameter without a gradient.
        measured: float64, shape (1,): what the scaler asked to know of the gradients (`mptrain.numerics.measures`);
            None where it asks for nothing.
    """

    overflow: Tensor
    skip: Tensor
    grad_norm: Tensor
    norms: Tensor
    measured: Tensor | None = None


def gradient_norms(grads: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each gradient in FP64.

    Args:
        grads: P tensors of any float dtype and shape on one device.

    Returns:
        P scalars, float64.
    """
    return list(torch._foreach_norm(grads, 2, dtype=torch.float64)) if grads else []


def judge(norms: Tensor, scale: Tensor, refuse: Tensor, measured: Tensor | None = None) -> Verdict:
    """Turn per-parameter norms into a verdict.

    Args:
        norms: float64, shape (P,): norms of the scaled gradients; -1 where a parameter had none.
        scale: float32, shape (1,): the loss scale these gradients carry.
        refuse: float32, shape (1,): 1 where an overflow refuses the update, 0 where it is applied all the same.
        measured: What the scaler asked to know.
    """
    total = torch.linalg.vector_norm(norms.clamp(min=0.0), keepdim=True)  # clamp keeps NaN and inf
    grad_norm = total / scale
    overflow = grad_norm.isfinite().logical_not_()  # also where a scale has fallen to 0: nothing can be unscaled by it
    skip = overflow * refuse
    if measured is not None:
        measured = measured.to(norms.device)  # it is elsewhere only where there was no gradient to measure
    return Verdict(overflow=overflow, skip=skip, grad_norm=grad_norm, norms=norms, measured=measured)


def clip_coefficient(grad_norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings a gradient norm down to ``max_norm``, at most 1 (as `torch.nn.utils.clip_grad_norm_`).

    A non-finite norm gives 1: clipping by it would zero the finite gradients and go on as if nothing had happened.

    Args:
        grad_norm: float64, shape (1,): unscaled norm.
        max_norm: The largest norm to let through.

    Returns:
        float64, shape (1,).
    """
    coefficient = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return torch.where(grad_norm.isfinite(), coefficient, 1.0)
