"""Division of a data set's samples into splits. It depends on the labels only, never on the seed of the run."""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.errors import ConfigError
from mptrain.workloads.base.random_streams import permutation

_FIXED = 20180430  # seed of the permutation; changing it changes every split


def stratified_order(targets: Tensor) -> Tensor:
    """Return an order of the samples in which every prefix has about the overall class proportions.

    A fixed permutation shuffles the samples. The k-th of the n samples of a class then gets the rank (k + 1/2) / n, and
    the samples are sorted by rank, ties by class.

    Args:
        targets: Class indices, int64 ``[N]``.

    Returns:
        Sample indices, int64 ``[N]``.
    """
    shuffled = permutation(len(targets), _FIXED)
    labels = targets[shuffled]
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    within = torch.arange(len(targets)) - starts[labels[by_class]]
    rank = (within.double() + 0.5) / counts[labels[by_class]]
    return shuffled[by_class[torch.argsort(rank, stable=True)]]


def hold_out(targets: Tensor, val_samples: int, train_samples: int | None) -> tuple[Tensor, Tensor]:
    """Divide the samples of a data set into a part to train on and a part held out for validation.

    Args:
        targets: Class indices of all samples, int64 ``[N]``.
        val_samples: Number of samples to hold out; may be 0.
        train_samples: Number of the remaining samples to train on; None for all.

    Returns:
        Indices of the training samples and of the held-out samples, both stratified by class. The held-out samples do
        not depend on ``train_samples``, and a smaller ``train_samples`` selects a subset of a larger one.

    Raises:
        ConfigError: There are too few samples.
    """
    if val_samples >= len(targets):
        raise ConfigError(
            f"dataset.val_samples={val_samples} would hold out all {len(targets)} training samples",
            f"set dataset.val_samples to at most {len(targets) - 1}",
        )
    order = stratified_order(targets)
    train = len(targets) - val_samples
    return first_samples(order[:train], train_samples), order[train:]


def first_samples(order: Tensor, train_samples: int | None) -> Tensor:
    """Return the sample indices to train on: the first ``train_samples`` of an order, or all of them for None.

    Args:
        order: Indices of the available training samples, int64 ``[N]``.
        train_samples: Number of samples that the user's option ``dataset.train_samples`` requests.

    Raises:
        ConfigError: There are fewer samples than requested.
    """
    if train_samples is None:
        return order
    if train_samples > len(order):
        raise ConfigError(
            f"dataset.train_samples={train_samples}, but the training split has {len(order)} samples",
            f"set dataset.train_samples to at most {len(order)}, or to null for all",
        )
    return order[:train_samples]
