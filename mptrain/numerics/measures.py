"""Measurements of a step's gradients, beyond the overflow check, that a loss-scaling rule can request.

Measurements stay on the device and never synchronise. Only the step of a scaler that requests one has its operators.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mptrain.system.device import in_widest, widest
from mptrain.system.torch_private import foreach_norm


class Measure(Protocol):
    """Interface of a measurement of a process's gradients: one number that a loss-scaling rule adjusts the scale by."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Measure the gradients of a step, without synchronising with the host.

        The gradients are those of the overflow check, of any float dtypes and shapes on one device: summed over the
        micro-batches, scaled and possibly not finite. The result has shape (1,), float64, or float32 on a device
        without FP64; it is 0 without elements, and on the CPU without tensors.
        """

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Combine the shards' measurements and numbers of elements, both float64 [N], into one of shape (1,)."""


@dataclass(frozen=True)
class LargestMagnitude:
    """Measure of the largest |g| over all elements of a step's gradients: 0 without elements, not finite if any is."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the largest |g|, shape (1,)."""
        filled = [grad for grad in grads if grad.numel()]  # an empty tensor has no maximum
        if not filled:
            return _nothing(grads)
        return torch.stack(foreach_norm(filled, math.inf, dtype=widest(filled[0].device))).amax().view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the largest of the shards' largest magnitudes."""
        return measured.amax().view(1)


@dataclass(frozen=True)
class ShareAbove:
    """Measure of the share of all gradient elements with a scaled magnitude above ``edge``; NaN counts as above."""

    edge: float

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the share of elements above the edge, 0 to 1, shape (1,); 0 without elements."""
        elements = functools.reduce(operator.add, (grad.numel() for grad in grads), 0)  # known from shapes
        if not elements:
            return _nothing(grads)
        within = torch.stack([torch.count_nonzero(grad.abs() <= self.edge) for grad in grads]).sum()
        return (in_widest(elements - within) / elements).view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the mean of the shards' shares, weighted by their elements."""
        return (measured * elements).sum().view(1) / elements.sum().clamp(min=1.0)


def _nothing(grads: list[Tensor]) -> Tensor:
    device = grads[0].device if grads else torch.device("cpu")
    return torch.zeros(1, dtype=widest(device), device=device)
