"""How far apart two sets of pictures are, by what a classifier sees in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def frechet_distance(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """The squared Fréchet distance of two Gaussians that have the means and covariances of two samples.

    ``|m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2))`` (Dowson and Landau 1982), with which Heusel et al. 2017
    (section 2) score generators on features of Inception. With ``C1 = A'A`` and ``C2 = B'B``, A and B the centred samples
    over ``sqrt(n - 1)``, the eigenvalues of ``C1 C2`` are the squared singular values of ``A B'``, so the last trace is
    the sum of these. No root of a matrix is taken, so covariances without full rank, which fewer samples than features
    have, need no special care.

    The distance of finite samples is too large, the more so the fewer there are: compare only equal numbers.

    Args:
        one: Features ``[N, D]``, at least two samples.
        other: Features ``[M, D]``, likewise.

    Returns:
        The distance, at least 0, computed in float64; NaN where a feature is not finite.
    """
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("nan")
    mean, root = _gaussian(one.astype(np.float64))
    other_mean, other_root = _gaussian(other.astype(np.float64))
    common = np.linalg.svd(root @ other_root.T, compute_uv=False).sum()
    spread = (root**2).sum() + (other_root**2).sum() - 2.0 * common
    return float(max(((mean - other_mean) ** 2).sum() + spread, 0.0))


def _gaussian(samples: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean ``[D]``, and a matrix ``R`` with ``R'R`` the covariance, of at most D rows."""
    mean = samples.mean(0)
    root = (samples - mean) / np.sqrt(len(samples) - 1)
    if len(root) > root.shape[1]:
        root = np.linalg.qr(root, mode="r")
    return mean, root
