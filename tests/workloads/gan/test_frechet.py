from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import sqrtm

from mptrain.workloads.gan.task import frechet_distance


def drawn(samples, features, seed=0, spread=1.0):
    draws = np.random.default_rng(seed)
    return draws.normal(size=(samples, features)) @ draws.normal(size=(features, features)) * spread


def by_the_formula(one, other):
    covariances = [np.atleast_2d(np.cov(samples.T)) for samples in (one, other)]
    root = sqrtm(covariances[0] @ covariances[1])
    return ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(sum(covariances) - 2 * root.real)


@pytest.mark.parametrize(("samples", "features"), [(200, 1), (200, 7), (50, 30)])
def test_it_is_the_formula_with_the_root_of_a_matrix(samples, features):
    one, other = drawn(samples, features), drawn(samples + 13, features, seed=1, spread=1.5) + 0.3
    assert frechet_distance(one, other) == pytest.approx(by_the_formula(one, other), rel=1e-8)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-12)


def test_in_one_dimension_it_is_by_mean_and_deviation():
    one, other = np.array([[1.0], [3.0], [5.0]]), np.array([[0.0], [4.0]])
    expected = (3.0 - 2.0) ** 2 + (2.0 - math.sqrt(8.0)) ** 2
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("samples", "features"), [(5, 40), (40, 5), (2, 3)])
def test_a_set_has_no_distance_from_itself_and_a_shift_has(samples, features):
    one = drawn(samples, features)
    scale = (one**2).sum()
    assert frechet_distance(one, one[::-1]) == pytest.approx(0.0, abs=1e-12 * scale)
    assert frechet_distance(one, one + 2.0) == pytest.approx(4.0 * features, rel=1e-9, abs=1e-12 * scale)


def test_without_full_rank_it_is_that_of_the_subspace():
    one, other = drawn(100, 3), drawn(100, 3, seed=1)
    inside = np.linalg.qr(np.random.default_rng(2).normal(size=(20, 3)))[0].T
    assert frechet_distance(one @ inside, other @ inside) == pytest.approx(frechet_distance(one, other), rel=1e-9)


def test_a_constant_feature_and_float32_samples_are_no_trouble():
    one = np.concatenate([drawn(30, 2), np.ones((30, 1))], 1)
    other = np.concatenate([drawn(30, 2, seed=1), np.ones((30, 1))], 1)
    expected = frechet_distance(one[:, :2], other[:, :2])
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(one.astype(np.float32), other.astype(np.float32)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_feature_that_is_no_number_has_no_distance(value):
    one = drawn(10, 2)
    one[3, 1] = value
    assert math.isnan(frechet_distance(one, drawn(10, 2)))
