"""Parts of networks for padded sequences, on the device.

Packed sequences of torch would need the lengths on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.system.errors import Problem


def reverse_padded(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence of a padded batch, ``[N, T, C]``, within its own length, int64 ``[N]``.

    Padding stays at the end. The function is its own inverse, and does not synchronise with the device.
    """
    places = torch.arange(sequence.shape[1], device=lengths.device)
    opposite = lengths[:, None] - 1 - places
    order = torch.where(opposite >= 0, opposite, places)
    return sequence.gather(1, order[:, :, None].expand_as(sequence))


def lengths_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a mask of padded sequences, bool ``[N, width]``: true before the end of each."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def problems_of_heads(width: int, heads: int) -> list[Problem]:
    """Return the problem that a number of attention heads does not divide the width of a model, if it does not."""
    if width % heads == 0:
        return []
    what = f"model.width={width} is not a multiple of model.heads={heads}"
    hint = f"set model.width={width // heads * heads + heads}, or a number of heads that divides {width}"
    return [Problem(what, hint)]
