"""Reversal of padded sequences on the device. Packed sequences of torch would need the lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_padded(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence of a padded batch, ``[N, T, C]``, within its own length, int64 ``[N]``.

    Padding stays at the end. The function is its own inverse, and does not synchronise with the device.
    """
    places = torch.arange(sequence.shape[1], device=lengths.device)
    opposite = lengths[:, None] - 1 - places
    order = torch.where(opposite >= 0, opposite, places)
    return sequence.gather(1, order[:, :, None].expand_as(sequence))
