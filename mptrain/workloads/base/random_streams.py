"""Random numbers as pure functions of seed, epoch and sample index.

Nothing here uses the generators of the process. A sample's augmentation is therefore the same in every process, batch
and resumed run. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, *Fast splittable
pseudorandom number generators*, OOPSLA 2014): a bijection of 64-bit words whose outputs for 0, 1, 2, ... times an odd
constant pass the usual statistical tests. It is evaluated in wrapping int64 arithmetic, so whole batches are drawn at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.system.device import in_widest

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
    # 53 bits, all of which FP64 represents: a word of 64 bits could round up to 1.
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
    # Half a step above 0, whose logarithm is -inf.
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
