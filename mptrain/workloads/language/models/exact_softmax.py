"""The softmax over a whole vocabulary, part by part, so that a large one fits into memory. For evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

#: Scores that are held at a time: 256 MiB of them in FP32.
SCORES_AT_A_TIME = 2**26


def exact(
    rows: Tensor, right: Tensor, scores: Callable[[Tensor], Tensor], vocabulary_size: int
) -> tuple[Tensor, Tensor]:
    """What the right tokens cost, and which tokens would have been best.

    Args:
        rows: What the last layer is given, ``[R, F]``.
        right: Token numbers, int64 ``[R]``.
        scores: From rows to the scores of all tokens, ``[r, V]``; logarithms of probabilities will do.
        vocabulary_size: V.

    Returns:
        Losses in nats, float32 ``[R]``, and best guesses, int64 ``[R]``.
    """
    size = max(1, SCORES_AT_A_TIME // vocabulary_size)
    losses, best = [], []
    for part, targets in zip(rows.split(size), right.split(size), strict=True):
        of_part = scores(part).float()
        losses.append(F.cross_entropy(of_part, targets, reduction="none"))
        best.append(of_part.argmax(1))
    return torch.cat(losses), torch.cat(best)
