"""Pairs of sentences as samples: token numbers of two languages, padded to the longest of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.text.buckets import bucketed_order
from mptrain.workloads.text.subwords import PAD


class Ragged:
    """Rows of token numbers of different lengths, one behind the other in one tensor.

    Args:
        rows: Each with at least one number.

    Attributes:
        lengths: Of each row, int64 ``[N]``.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        self._starts = self.lengths.cumsum(0) - self.lengths

    def padded(self, indices: Tensor) -> Tensor:
        """Some rows, with `PAD` behind the shorter ones; int64 ``[len(indices), longest]``."""
        lengths = self.lengths[indices]
        places = torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        numbers = self._numbers[torch.where(there, self._starts[indices][:, None] + places, 0)].long()
        return numbers.masked_fill(~there, PAD)


class PairSplit:
    """One part of a set of sentence pairs. Batches hold pairs of similar length.

    Args:
        sources: Token numbers of each sentence, with an end.
        targets: Of its translation, with an end; these ends are terms of the loss.
        batch_size: Of the run.
        faults: What was wrong with lines of the files.
        left_out: How many pairs were too long.
    """

    in_memory = True

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        batch_size: int,
        *,
        faults: Faults | None = None,
        left_out: int = 0,
    ) -> None:
        self.sources, self.targets = Ragged(sources), Ragged(targets)
        self.batch_size = batch_size
        self.faults = faults or Faults()
        self.left_out = left_out

    def __len__(self) -> int:
        return len(self.sources.lengths)

    @property
    def skipped(self) -> int:
        """How many pairs were left out: lines that could not be used, and pairs that were too long."""
        return len(self.faults.found) + self.left_out

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Batches of similar length; see `mptrain.workloads.base.source.Split.order`."""
        lengths = self.sources.lengths + self.targets.lengths
        return bucketed_order(lengths, self.batch_size, seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The pairs with these indices.

        Returns:
            ``inputs`` int64 ``[N, S]`` and ``targets`` int64 ``[N, T]``, padded behind; ``source_lengths`` int64 ``[N]``. A
            sample has as many terms as its target has tokens.
        """
        picked = torch.as_tensor(indices, dtype=torch.int64)
        counts = tuple(self.targets.lengths[picked].tolist())
        more = {"source_lengths": self.sources.lengths[picked]}
        return Batch(self.sources.padded(picked), self.targets.padded(picked), counts, more)
