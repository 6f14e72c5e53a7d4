"""Token sequences of different lengths: in one tensor, and in orders that avoid padding (length bucketing)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.workloads.base.random_streams import mix, permutation
from mptrain.workloads.text.subwords import PAD

#: Number of batches whose samples are sorted together: more give less padding, fewer give a more random order.
POOL = 50

_BATCHES = 1  # separates the random stream of the order of batches from that of samples


def bucketed_order(lengths: Tensor, batch_size: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """Return the order of samples in an epoch, int64 ``[N]``, with sequences of similar lengths in each batch.

    Samples are shuffled, cut into pools of `POOL` batches, sorted by length within each pool (equal lengths keep the
    shuffled order) and cut into batches. The order of batches is shuffled too, except that a short batch stays last.
    Without ``shuffle`` the order is shuffled as well, but the same for any seed and epoch: an evaluation shows samples
    of its first batch, which would otherwise be the shortest ones. Batch b consists of the indices at
    ``b * batch_size`` to ``(b + 1) * batch_size - 1``.
    """
    if not shuffle:
        seed = epoch = 0
    shuffled = permutation(len(lengths), seed, epoch)
    pools = [pool[torch.argsort(lengths[pool], stable=True)] for pool in torch.split(shuffled, POOL * batch_size)]
    batches = [batch for pool in pools for batch in torch.split(pool, batch_size)]
    whole = [batch for batch in batches if len(batch) == batch_size]
    rest = [batch for batch in batches if len(batch) < batch_size]
    order = permutation(len(whole), mix(seed, _BATCHES), epoch).tolist()
    return torch.cat([*(whole[position] for position in order), *rest])


class RaggedTokens:
    """Token sequences of different lengths, at least one token each, stored in one tensor without padding."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        self._starts = self.lengths.cumsum(0) - self.lengths

    def padded(self, indices: Tensor) -> Tensor:
        """Return selected sequences as a table, padded with `PAD` at the end, int64 ``[len(indices), longest]``."""
        lengths = self.lengths[indices]
        places = torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        numbers = self._numbers[torch.where(there, self._starts[indices][:, None] + places, 0)].long()
        return numbers.masked_fill(~there, PAD)
