"""Measurements of a step's gradients, beyond the overflow check, that a loss-scaling rule can request.

A measure is a callable that takes the gradients and returns one number. It adds operators only to the step of a scaler
that requests it (`mptrain.scaler.base.measure_of`). Measurements stay on the device; nothing here synchronises with the
host.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mptrain.device import in_widest, widest
from mptrain.torch_private import foreach_norm


class Measure(Protocol):
    """Interface of a measurement of a step's gradients: one number that a loss-scaling rule adjusts the scale by.

    Call it with the gradients of a process. With sharded parameters, `of_parts` then combines the shards' numbers.
    """

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Measure the gradients of a step, without synchronising with the host.

        Args:
            grads: Tensors of any float dtypes and shapes on one device: the gradients of the overflow check, summed
                over the micro-batches, scaled and possibly not finite.

        Returns:
            float64, or float32 on a device without FP64, shape (1,); 0 without elements; on the CPU without tensors.
        """

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Combine the measurements of shards into the measurement of the whole gradients.

        Args:
            measured: float64 ``[N]``: the measurement of each shard.
            elements: float64 ``[N]``: the number of elements of each shard.

        Returns:
            float64, shape (1,).
        """


@dataclass(frozen=True)
class LargestMagnitude:
    """Measure of the largest |g| over all elements of a step's gradients; inf or NaN if any element is."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the largest |g| over all elements, shape (1,); 0 without elements; see `Measure.__call__`."""
        filled = [grad for grad in grads if grad.numel()]  # an empty tensor has no maximum
        if not filled:
            return _nothing(grads)
        return torch.stack(foreach_norm(filled, math.inf, dtype=widest(filled[0].device))).amax().view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the largest of the shards' largest magnitudes, shape (1,); see `Measure.of_parts`."""
        return measured.amax().view(1)


@dataclass(frozen=True)
class ShareAbove:
    """Measure of the share of all elements of a step's gradients with a magnitude above an edge; NaN counts as above.

    Attributes:
        edge: Magnitudes up to and including this value are not counted; for scaled gradients, a scaled value.
    """

    edge: float

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Return the share of elements above the edge, 0 to 1, shape (1,); 0 without elements; see `Measure`."""
        elements = functools.reduce(operator.add, (grad.numel() for grad in grads), 0)  # known from shapes
        if not elements:
            return _nothing(grads)
        within = torch.stack([torch.count_nonzero(grad.abs() <= self.edge) for grad in grads]).sum()
        return (in_widest(elements - within) / elements).view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Return the mean of the shards' shares, weighted by their elements, shape (1,); see `Measure.of_parts`."""
        return (measured * elements).sum().view(1) / elements.sum().clamp(min=1.0)


def _nothing(grads: list[Tensor]) -> Tensor:
    device = grads[0].device if grads else torch.device("cpu")
    return torch.zeros(1, dtype=widest(device), device=device)
