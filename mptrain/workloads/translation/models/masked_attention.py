"""Attention over sequences of different lengths. What is padding weighs exactly nothing, in every dtype.

The softmax is in FP32, where a mask can be a number that no score reaches: -1e9 is -inf in FP16, and a row of such alone
gives NaN. Here such a row gives zeros, and so do its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths_mask(lengths: Tensor, width: int) -> Tensor:
    """Which places of padded rows hold something: bool ``[N, width]`` from lengths int64 ``[N]``."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def causal_mask(places: int, device: torch.device) -> Tensor:
    """Each place sees itself and those before it: bool ``[places, places]``."""
    return torch.ones(places, places, dtype=torch.bool, device=device).tril()


def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1).

    The query is divided by the root of its size before the product, and not the product after it, which FP16 might not hold.

    Args:
        query: ``[..., T, D]``.
        key: ``[..., S, D]``.
        value: ``[..., S, E]``.
        keep: What each query may see, bool, broadcast to ``[..., T, S]``; None lets it see all.

    Returns:
        ``[..., T, E]``, in the dtype of the values; zeros for a query that may see nothing.
    """
    scores = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).float()
    if keep is None:
        weights = scores.softmax(-1)
    else:
        hidden = ~keep
        weights = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1).masked_fill(hidden, 0.0)
    answer: Tensor = weights.to(value.dtype) @ value
    return answer
