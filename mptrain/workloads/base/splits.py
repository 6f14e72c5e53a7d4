"""Splits of a data set: which samples are held out of training, by one of two rules, both with a seed of their own.

An order that is the same in every run, at random or stratified by class, is cut into consecutive parts (`hold_out`); or
the name of each sample decides (`hold_out_by_name`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.random_streams import permutation

#: Seed of the orders from which samples are held out; changing it changes every split.
SPLIT_SEED = 20180430


_Samples = TypeVar("_Samples", Tensor, list[Any])


def stratified_order(targets: Tensor, seed: int = 0) -> Tensor:
    """Return an order of the samples, int64 ``[N]``, in which every prefix has about the overall class proportions.

    A permutation drawn from ``seed`` shuffles the samples. The k-th of the n samples of a class then gets the rank
    (k + 1/2) / n, and the samples are sorted by rank, ties by class.
    """
    shuffled = permutation(len(targets), SPLIT_SEED + seed)
    labels = targets[shuffled]
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    within = torch.arange(len(targets)) - starts[labels[by_class]]
    rank = (within.double() + 0.5) / counts[labels[by_class]]
    return shuffled[by_class[torch.argsort(rank, stable=True)]]


def share_sizes(shares: Mapping[str, float], count: int, ends: Iterable[int] | None = None) -> dict[str, int]:
    """Return the number of samples that each part gets by its share of ``count``: rounded, at least one, or 0 for 0.

    ``ends`` are the positions in the order at which a part may end, for samples that stay together in groups: a part
    then reaches to the first of them from its share on. None permits all positions.
    """
    positions = iter(range(1, count + 1) if ends is None else ends)
    sizes: dict[str, int] = {}
    begin = 0
    for part, share in shares.items():
        wanted = begin + max(1, round(share * count))
        end = next((position for position in positions if position >= wanted), count) if share else begin
        sizes[part], begin = end - begin, end
    return sizes


def hold_out(
    order: Tensor, sizes: Mapping[str, int | None], samples: str = "samples", key: str = "share"
) -> dict[str, Tensor]:
    """Cut an order of samples into parts that follow one another as in ``sizes``; those of size 0 are left out.

    ``train`` gets what the others leave, but not more than its own size, None for all of it. So the held-out samples do
    not depend on it, and a smaller one selects a subset of a larger one. Too few samples raise `ConfigError`, which
    calls them ``samples``, and the options by their ending, such as ``dataset.val_share``.
    """
    held = {part: size or 0 for part, size in sizes.items() if part != "train"}
    rest = len(order) - sum(held.values())
    if rest < 1:
        counts = " and ".join(f"{size} for {part}" for part, size in held.items())
        options = " or ".join(f"dataset.{part}_{key}" for part in held)
        raise ConfigError(
            f"holding out {counts} leaves none of {len(order)} {samples} to train on",
            f"choose a smaller {options} (0 for no such part), or add data",
        )
    cut = zip(sizes, order.split([held.get(part, rest) for part in sizes]), strict=True)
    parts = {part: indices for part, indices in cut if len(indices)}
    return {**parts, "train": first_samples(parts["train"], sizes["train"])}


def hold_out_by_name(
    names: Sequence[str], targets: Tensor, val: float, test: float, seed: int = 0
) -> tuple[Tensor, ...]:
    """Divide samples so that the split of each one depends on its own name and the seed, not on the other samples.

    A hash, salted with the seed, places each of the distinct names in [0, 1). The first ``val`` of this range is held
    out for validation (from 1 on, ``val`` is the number of samples that come first), the last ``test`` for testing. So
    a class of n samples has its shares on average, with a standard deviation of ``sqrt(n * share * (1 - share))``
    samples. There are two exceptions, in which the other samples count: a part gets at least one sample, and each class
    keeps the sample that is the last to be held out. The result is ascending int64 indices.
    """
    if not val and not test:
        return torch.arange(len(names)), torch.arange(0), torch.arange(0)
    salt = seed.to_bytes(16, "big")
    # Names of files need not be UTF-8; fsencode gives back their bytes.
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8, salt=salt).digest() for name in names]
    positions = torch.tensor(
        [(int.from_bytes(digest, "big") >> 11) * 2.0**-53 for digest in hashes], dtype=torch.float64
    )
    ascending = [*positions.sort().values.tolist(), 1.0]
    below = ascending[min(int(val), len(names))] if val >= 1 else max(val, ascending[1]) if val else 0.0
    above = min(1.0 - test, ascending[-2]) if test else 1.0
    beyond = torch.maximum(below - positions, positions - above)  # how far outside of the range that is trained on
    least = torch.full((int(targets.max()) + 1,), 2.0, dtype=torch.float64)
    kept = beyond == least.scatter_reduce(0, targets, beyond, "amin")[targets]
    held_val, held_test = (positions < below) & ~kept, (positions >= above) & ~kept
    held_test &= ~held_val
    return tuple(part.nonzero().flatten() for part in (~(held_val | held_test), held_val, held_test))


def first_samples(samples: _Samples, train_samples: int | None) -> _Samples:
    """Return the first ``train_samples`` of samples or indices, all for None; `ConfigError` if there are fewer."""
    if train_samples is not None and train_samples > len(samples):
        raise ConfigError(
            f"dataset.train_samples={train_samples}, but the training split has {len(samples)} samples",
            f"set dataset.train_samples to at most {len(samples)}, or to null for all",
        )
    return samples[:train_samples]


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """Options of data sets from which shares are held out.

    Attributes:
        val_share: Share of the samples held out for validation, if no file is for validation; likewise ``test_share``.
        train_samples: Number of samples to train on; None trains on all.
    """

    val_share: BelowOneOrZero = 0.1
    test_share: BelowOneOrZero = 0.1
    train_samples: PositiveInt | None = None

    def shares(self, given: Container[str] = ()) -> dict[str, float]:
        """Return the shares of validation and test; those of parts that are ``given`` are 0."""
        shares = {"val": self.val_share, "test": self.test_share}
        return {part: 0.0 if part in given else share for part, share in shares.items()}
