"""Measurements of a step's gradients, beyond the overflow check, that a loss scaler can request.

A measure is a callable that takes the gradients. It adds operators only to the step of a scaler that requests it
(`mptrain.scaler.base.measure_of`). Measurements stay on the device; nothing here synchronises with the host.
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
    """Interface of a measurement of the gradients of a step."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """Measure gradients.

        Args:
            grads: Tensors of any float dtypes and shapes on one device: the gradients of the overflow check, summed
                over the micro-batches, scaled and possibly not finite.

        Returns:
            float64, or float32 on a device without FP64, shape (1,); 0 without elements; on the CPU without tensors.
        """

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """Combine the measurements of sharded gradients.

        Args:
            measured: float64 ``[N]``: the measurement of each shard.
            elements: float64 ``[N]``: the number of elements of each shard.

        Returns:
            float64, shape (1,).
        """


@dataclass(frozen=True)
class LargestMagnitude:
    """Largest |g| over all elements of all gradients; inf or NaN if any element is."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """See `Measure`."""
        filled = [grad for grad in grads if grad.numel()]  # an empty tensor has no maximum
        if not filled:
            return _nothing(grads)
        return torch.stack(foreach_norm(filled, math.inf, dtype=widest(filled[0].device))).amax().view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """See `Measure`."""
        return measured.amax().view(1)


@dataclass(frozen=True)
class ShareAbove:
    """Share of all elements of all gradients with a magnitude above an edge; NaN counts as above.

    Attributes:
        edge: Magnitudes up to and including this value are not counted.
    """

    edge: float

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """See `Measure`."""
        elements = functools.reduce(operator.add, (grad.numel() for grad in grads), 0)  # known from shapes
        if not elements:
            return _nothing(grads)
        within = torch.stack([torch.count_nonzero(grad.abs() <= self.edge) for grad in grads]).sum()
        return (in_widest(elements - within) / elements).view(1)

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """See `Measure`."""
        return (measured * elements).sum().view(1) / elements.sum().clamp(min=1.0)


def _nothing(grads: list[Tensor]) -> Tensor:
    device = grads[0].device if grads else torch.device("cpu")
    return torch.zeros(1, dtype=widest(device), device=device)
