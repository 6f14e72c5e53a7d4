"""Random numbers as pure functions of seed, epoch and sample index, and the assignment of samples to splits.

Nothing here uses the generators of the process. A sample's augmentation is therefore the same in every process, batch
and resumed run. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable
pseudorandom number generators*, OOPSLA 2014): a bijection of 64-bit words whose outputs for 0, 1, 2, ... times an odd
constant pass the usual statistical tests. It is evaluated in wrapping int64 arithmetic, so whole batches are drawn at
once.

The split of a sample depends on names or labels and a seed of its own, not on the seed of the run.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.system.device import in_widest
from mptrain.system.errors import ConfigError

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Return an unsigned 64-bit hash that depends on the order of integers and on every one of their lowest 64 bits."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + _GAMMA & _MASK
        state = (state ^ (state >> 30)) * _MULTIPLIERS[0] & _MASK
        state = (state ^ (state >> 27)) * _MULTIPLIERS[1] & _MASK
        state ^= state >> 31
    return state


def permutation(count: int, *words: int) -> Tensor:
    """Return a random permutation of ``0 .. count-1`` (int64 ``[count]``) that depends on the given integers only."""
    generator = torch.Generator().manual_seed(mix(*words) >> 1)
    return torch.randperm(count, generator=generator)


def sample_order(count: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """Return the sample indices of an epoch, int64 ``[count]``: shuffled by ``(seed, epoch)``, or ascending."""
    return permutation(count, seed, epoch) if shuffle else torch.arange(count)


def uniforms(seed: int, epoch: int, indices: Sequence[int] | Tensor, count: int) -> Tensor:
    """Return uniform random numbers in [0, 1) for each sample, which depend on ``(seed, epoch, index)`` only.

    They are float64 ``[N, count]``; a larger ``count`` does not change the first numbers.
    """
    state = _mixed(keys(seed, epoch, indices)[:, None] + torch.arange(1, count + 1)[None, :] * _signed(_GAMMA))
    return _shifted(state, 11).double() * 2.0**-53


def keys(seed: int, epoch: int, indices: Sequence[int] | Tensor) -> Tensor:
    """Return a 64-bit key per sample from ``(seed, epoch, index)``, int64 ``[N]``, for `normals` on any device."""
    return _mixed(torch.as_tensor(indices, dtype=torch.int64) + _signed(mix(seed, epoch)))


def normals(words: Tensor, count: int) -> Tensor:
    """Return standard normal random numbers for each sample's key, float32 ``[N, count]``, on the device of the keys.

    The method is that of Box and Muller (1958); no number exceeds 6.8 in magnitude. The random bits are the same on all
    devices; logarithm and cosine may round differently.
    """
    places = torch.arange(1, count // 2 + 2, device=words.device)
    drawn = _mixed(words[:, None] + places * _signed(_GAMMA))
    radius = (-2.0 * ((in_widest(_shifted(drawn, 32)) + 0.5) * 2.0**-32).log()).sqrt()
    angle = in_widest(drawn & 0xFFFFFFFF) * (2.0**-31 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count].float()


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _signed(_MULTIPLIERS[0])
    state = (state ^ _shifted(state, 27)) * _signed(_MULTIPLIERS[1])
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Return the logical right shift; torch's operator is an arithmetic shift."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_FIXED = 20180430  # seed of the permutation; changing it changes every split


def stratified_order(targets: Tensor, seed: int = 0) -> Tensor:
    """Return an order of the samples, int64 ``[N]``, in which every prefix has about the overall class proportions.

    A permutation drawn from ``seed`` shuffles the samples. The k-th of the n samples of a class then gets the rank
    (k + 1/2) / n, and the samples are sorted by rank, ties by class.
    """
    shuffled = permutation(len(targets), _FIXED + seed)
    labels = targets[shuffled]
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = counts.cumsum(0) - counts
    within = torch.arange(len(targets)) - starts[labels[by_class]]
    rank = (within.double() + 0.5) / counts[labels[by_class]]
    return shuffled[by_class[torch.argsort(rank, stable=True)]]


def hold_out(targets: Tensor, val_samples: int, train_samples: int | None) -> tuple[Tensor, Tensor]:
    """Return stratified indices of the samples to train on and of those held out for validation.

    The held-out samples do not depend on ``train_samples`` (None for all that remain), and a smaller ``train_samples``
    selects a subset of a larger one. Too few samples raise `ConfigError`.
    """
    train = len(targets) - val_samples
    if train < 1:
        raise ConfigError(
            f"dataset.val_samples={val_samples} would hold out all {len(targets)} training samples",
            f"set dataset.val_samples to at most {max(0, len(targets) - 1)}",
        )
    order = stratified_order(targets)
    return first_samples(order[:train], train_samples), order[train:]


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


def first_samples(order: Tensor, train_samples: int | None) -> Tensor:
    """Return the first ``train_samples`` of an order of indices, all for None; `ConfigError` if there are fewer."""
    if train_samples is None:
        return order
    if train_samples > len(order):
        raise ConfigError(
            f"dataset.train_samples={train_samples}, but the training split has {len(order)} samples",
            f"set dataset.train_samples to at most {len(order)}, or to null for all",
        )
    return order[:train_samples]
