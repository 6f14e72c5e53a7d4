"""Measurements of a step's gradients that a loss scaler can ask for besides whether they are finite, taken on their device.

A measure is a value that is called with the gradients. It adds its own operators to the step of a scaler that names one
(`mptrain.scaler.base.measure_of`), and none to any other's. The host waits for nothing here.
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
    """Something to measure on the gradients of a step."""

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """The measurement.

        Args:
            grads: Tensors of any float dtypes and shapes on one device, as the verdict judges them: summed
                over the micro-batches, carrying the loss scale, perhaps not finite.

        Returns:
            float64, or float32 on a device without FP64, shape (1,); 0 where there is no element, in host memory where there is no tensor either.
        """

    def of_parts(self, measured: Tensor, elements: Tensor) -> Tensor:
        """The measurement of gradients of which several ranks hold parts.

        Args:
            measured: float64 ``[N]``: what was measured on each part.
            elements: float64 ``[N]``: of how many elements.

        Returns:
            float64, shape (1,).
        """


@dataclass(frozen=True)
class LargestMagnitude:
    """max |g| over all elements of all gradients; inf or NaN where one of them is."""

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
    """The share of all elements of all gradients whose magnitude is above an edge; NaN counts as above.

    Attributes:
        edge: The edge.
    """

    edge: float

    def __call__(self, grads: list[Tensor]) -> Tensor:
        """See `Measure`."""
        elements = functools.reduce(
            operator.add, (grad.numel() for grad in grads), 0
        )  # of their shapes, which the host knows
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
