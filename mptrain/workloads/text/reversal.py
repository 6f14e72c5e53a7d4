"""Sequences of different lengths, read from behind. The lengths stay on the device, where packed sequences want them on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_padded(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence with its own places in reverse order, its padding where it was; doing it twice changes nothing.

    Args:
        sequence: ``[N, T, C]``.
        lengths: Places of each that are no padding, int64 ``[N]``.

    Returns:
        ``[N, T, C]``.
    """
    places = torch.arange(sequence.shape[1], device=lengths.device)
    opposite = lengths[:, None] - 1 - places
    order = torch.where(opposite >= 0, opposite, places)
    return sequence.gather(1, order[:, :, None].expand_as(sequence))
