"""Perplexity of a language model: the number of equally likely tokens that gives the same loss."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Return the perplexity of a language model: the exponential of its mean loss per token.

    Args:
        loss: Mean cross-entropy per token in nats. Above 709 nats a double overflows, and the result is infinity.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
