"""Perplexity: between how many equally likely tokens a model is torn."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; infinite above 709 nats, which a double cannot raise e to."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
