"""Which samples belong to which split. Fixed by the labels alone: never by the run's seed."""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.errors import ConfigError
from mptrain.workloads.base.random_streams import permutation

_FIXED = 20180430  # names the one permutation in use; changing it changes every split


def stratified_order(targets: Tensor) -> Tensor:
    """An order of the samples of which every prefix holds the classes in about their overall proportions.

    Samples are permuted by a fixed permutation; the k-th of a class of n gets the rank (k + 1/2) / n; ranks
    are sorted, equal ones by class.

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
    comm = (within.double() + 0.5) / counts[labels[by_class]]
    return shuffled[by_class[torch.argsort(comm, stable=True)]]


def hold_out(targets: Tensor, val_samples: int, train_samples: int | None) -> tuple[Tensor, Tensor]:
    """Divide training samples into those trained on and those held out for validation.

    Args:
        targets: Class indices of all, int64 ``[N]``.
        val_samples: How many to hold out; 0 holds out none.
        train_samples: Train on so many of the rest; None trains on all.

    Returns:
        Indices trained on and indices held out, both stratified. Which are held out does not depend on
        ``train_samples``, and a smaller ``train_samples`` takes a subset of a larger one.

    Raises:
        ConfigError: There are not that many samples.
    """
    if val_samples >= len(targets):
        raise ConfigError(
            f"dataset.val_samples={val_samples} would hold out every one of {len(targets)} training samples",
            f"at most {len(targets) - 1} can be held out",
        )
    order = stratified_order(targets)
    train = len(targets) - val_samples
    return first_samples(order[:train], train_samples), order[train:]


def first_samples(order: Tensor, train_samples: int | None) -> Tensor:
    """The first ``train_samples`` of an order; all of it for None.

    Raises:
        ConfigError: There are not that many.
    """
    if train_samples is None:
        return order
    if train_samples > len(order):
        raise ConfigError(
            f"dataset.train_samples={train_samples}, but the training split has {len(order)} samples",
            f"choose at most {len(order)}, or null for all",
        )
    return order[:train_samples]
