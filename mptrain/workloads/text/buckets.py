"""Orders in which batches hold samples of similar length, so that little of them is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.workloads.base.random_streams import mix, permutation

#: Batches whose samples are sorted together: more leave less padding, fewer leave more of the order to chance.
POOL = 50

_BATCHES = 1  # tells the draw of the batches' order from that of the samples


def bucketed_order(lengths: Tensor, batch_size: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """The order of an epoch whose consecutive batches hold samples of about the same length.

    Samples are shuffled, cut into pools of `POOL` batches, sorted by length within each (equal lengths stay in the
    shuffled order) and cut into batches, whose order is shuffled too. The short batch, where there is one, stays the
    last. The second epoch has other batches than the first.

    Args:
        lengths: Of every sample, int64 ``[N]``.
        batch_size: Samples of a batch.
        seed: The run's seed.
        epoch: Completed passes over the training data.
        shuffle: False gives the same order whatever the seed and the epoch. It is drawn as well: what an evaluation shows is
            from its first batch, which would hold the shortest samples of all.

    Returns:
        Sample indices, int64 ``[N]``, a permutation.
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
