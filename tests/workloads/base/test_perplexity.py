"""Perplexity: the exponential of a mean loss."""

from __future__ import annotations

import math

import pytest

from mptrain.workloads.base.task import perplexity


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, 1.0), (math.log(29), 29.0), (709.0, math.exp(709.0)), (710.0, math.inf), (math.nan, math.nan)],
)
def test_a_perplexity_is_the_exponential_of_the_loss(loss, expected):
    assert perplexity(loss) == pytest.approx(expected, nan_ok=True)
