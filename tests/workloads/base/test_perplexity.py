"""Perplexity: the exponential of a mean loss."""

from __future__ import annotations

import math

import pytest

from mptrain.workloads.base.task import perplexity


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (math.log(29), 29.0), (709.0, math.exp(709.0))])
def test_a_perplexity_is_the_exponential_of_the_loss(loss, expected):
    assert perplexity(loss) == pytest.approx(expected)


@pytest.mark.parametrize("loss", [710.0, 1e6, math.inf])
def test_a_perplexity_too_large_to_say_is_infinite(loss):
    assert perplexity(loss) == math.inf


def test_a_loss_that_is_not_a_number_gives_such_a_perplexity():
    assert math.isnan(perplexity(math.nan))
