"""Reversal of padded sequences on the device. Packed sequences of torch would need the lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_padded(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence within its own length and keep its padding in place; the function is its own inverse.

    Args:
        sequence: ``[N, T, C]``.
        lengths: Length of each sequence without padding, int64 ``[N]``.

    Returns:
        ``[N, T, C]``.
    """
    places = torch.arange(sequence.shape[1], device=lengths.device)
    opposite = lengths[:, None] - 1 - places
    order = torch.where(opposite >= 0, opposite, places)
    return sequence.gather(1, order[:, :, None].expand_as(sequence))
