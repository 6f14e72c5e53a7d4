"""Simulated comparisons: how often arms are found equivalent, and that what the verdict says beside it is true."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mptrain.comparison.statistics import bootstrap_p, equivalence, looks_skewed, tost_p, unseen_share

MARGIN = 0.01


def lower_tail(rng, seeds):
    """Return differences with a mean at the margin, -0.01, and a long lower tail (log-normal)."""
    return -MARGIN - 0.6 * MARGIN * (np.exp(rng.normal(size=seeds)) - math.exp(0.5))


def rare_collapse(rng, seeds):
    """Return differences of an arm that loses 0.3 in one seed of twenty: a mean of -0.015."""
    return rng.normal(scale=0.3 * MARGIN, size=seeds) - 0.3 * (rng.random(seeds) < 0.05)


def ties(rng, seeds):
    """Return differences of an accuracy over 100 samples, 0 or one sample, with a mean at the margin."""
    return np.round(-MARGIN + rng.choice([-1, 0, 0, 1], size=seeds) * MARGIN, 10)


DRAWN = {
    "normal, at the margin": lambda rng, seeds: rng.normal(-MARGIN, 0.5 * MARGIN, seeds),
    "normal, equal arms": lambda rng, seeds: rng.normal(0, 0.5 * MARGIN, seeds),
    "long lower tail, at the margin": lower_tail,
    "rare collapse, beyond the margin": rare_collapse,
    "ties, at the margin": ties,
}


def simulate(drawn, seeds, comparisons, rng):
    """Return the shares of comparisons that t tests alone and all tests find equivalent, and of false sentences.

    The sentence is false if more runs than its bound differ more than any pair did: counted by 20,000 further runs.
    """
    further = np.sort(np.abs(DRAWN[drawn](rng, 20_000)))
    before = after = false = 0
    for _ in range(comparisons):
        values = DRAWN[drawn](rng, seeds)
        found = equivalence(values.tolist(), MARGIN, rounding=0.01 / math.sqrt(6) if drawn.startswith("ties") else 0.0)
        larger = 1 - np.searchsorted(further, np.abs(values).max(), "right") / len(further)
        before += found.p < found.alpha
        after += found.holds
        false += bool(found.holds and larger > found.unseen)
    return before / comparisons, after / comparisons, false / comparisons


@pytest.fixture
def without_power(monkeypatch):
    """Leave out the power, which takes most of the time and decides nothing."""
    monkeypatch.setattr("mptrain.comparison.statistics.tost_power", lambda *_: 0.0)
    monkeypatch.setattr("mptrain.comparison.statistics.pairs_for_power", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("drawn", DRAWN)
def test_what_is_said_beside_equivalent_is_true_in_95_of_100_comparisons(drawn, seeds, without_power):
    before, after, false = simulate(drawn, seeds, 1_000, np.random.default_rng(seeds))
    print(
        f"\n{drawn}, {seeds} seeds: equivalent {before:.1%} by t tests, {after:.1%} by all; sentence false {false:.1%}"
    )
    assert false <= 0.0715  # 5 % and three standard errors
    assert after <= before
    if drawn == "normal, at the margin":
        assert after <= 0.0715
    if drawn == "normal, equal arms":
        assert after >= 0.9 * before


def test_a_long_lower_tail_is_called_equivalent_less_often_and_what_is_said_is_true(without_power):
    before, after, false = simulate("long lower tail, at the margin", 8, 150, np.random.default_rng(1))
    assert after < before
    assert false <= 0.1
    collapses = simulate("rare collapse, beyond the margin", 5, 100, np.random.default_rng(1))
    assert collapses[1] > 0.5  # no test can see what did not happen
    assert collapses[2] <= 0.1


@pytest.mark.parametrize(("n", "share"), [(1, 0.95), (3, 0.63), (5, 0.45), (8, 0.31), (59, 0.05)])
def test_the_unseen_share_is_that_of_the_exact_binomial_bound(n, share):
    from scipy import stats

    assert unseen_share(n) == pytest.approx(share, abs=0.005)
    assert unseen_share(n) == pytest.approx(stats.beta.ppf(0.95, 1, n))


def test_the_bootstrap_agrees_with_the_t_test_for_normal_values_and_not_for_skewed_ones():
    rng = np.random.default_rng(2)
    normal = rng.normal(-0.5 * MARGIN, MARGIN, 40)
    error = normal.std(ddof=1) / math.sqrt(40)
    assert bootstrap_p(normal, MARGIN) == pytest.approx(tost_p(normal.mean(), error, 39, MARGIN), abs=0.01)
    skewed = [0.0, -0.0004, 0.0002, -0.0003, 0.0001, -0.0002, 0.0003, -0.012]
    assert looks_skewed(skewed)
    found = equivalence(skewed, MARGIN)
    assert found.p < 0.05 < found.p_bootstrap
    assert not found.holds
    mirrored = equivalence([-value for value in skewed], MARGIN)
    assert mirrored.p_bootstrap == pytest.approx(found.p_bootstrap, abs=0.01)


def test_values_that_are_equal_few_or_symmetric_need_no_bootstrap():
    for values in (
        [0.001] * 8,
        [0.0, 0.001],
        [0.0, 0.001, 0.0],
        [-0.001, 0.001, -0.001, 0.001],
        [-0.002, -0.001, 0.0, 0.001, 0.002],
    ):
        assert not looks_skewed(values)
        assert equivalence(values, MARGIN).p_bootstrap is None


def test_a_single_pair_that_differs_a_little_leaves_arms_equivalent():
    found = equivalence([0.0, 0.0, 0.0, 0.0, 0.001], MARGIN)
    assert found.p_bootstrap is not None
    assert found.holds


def test_nearly_equal_values_have_a_p_value():
    for rounding in (0.0, 0.001):
        assert 0 < bootstrap_p([0.0, 0.0, 0.0, 0.0025], MARGIN, rounding) <= 1
