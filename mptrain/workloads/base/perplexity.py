"""Perplexity of a language model: the number of equally likely tokens that gives the same loss."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss per token in nats; infinity above 709 nats, where a double overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
