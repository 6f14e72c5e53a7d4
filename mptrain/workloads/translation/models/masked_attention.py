"""Masked attention over sequences of different lengths. Padding gets a weight of exactly zero, in every dtype.

The softmax is in FP32, where the mask value is below any score. In FP16 a mask of -1e9 would be -inf, and a row of -inf
only gives NaN. Here a fully masked row gives zeros, and so do its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(places: int, device: torch.device) -> Tensor:
    """Return a mask in which each position sees itself and earlier ones: bool ``[places, places]``, query by key."""
    return torch.ones(places, places, dtype=torch.bool, device=device).tril()


def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """Compute masked dot-product attention (Vaswani et al. 2017, equation 1), zeros for a fully masked query.

    The queries ``[..., T, D]`` are scaled before the product with the keys ``[..., S, D]``, because the product without
    scaling may overflow FP16. ``keep`` is broadcastable to ``[..., T, S]``; None masks nothing. The result
    ``[..., T, E]`` has the dtype of the values.
    """
    scores = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).float()
    if keep is None:
        weights = scores.softmax(-1)
    else:
        hidden = ~keep
        weights = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1).masked_fill(hidden, 0.0)
    answer: Tensor = weights.to(value.dtype) @ value
    return answer
