"""Token sequences of different lengths in one tensor, and padded tables of some of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mptrain.workloads.text.subwords import PAD


class RaggedTokens:
    """Token sequences of different lengths, at least one token each, stored in one tensor without padding."""

    def __init__(self, rows: Sequence[Sequence[int]], padding: int = PAD) -> None:
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._padding = padding
        self._numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        self._starts = self.lengths.cumsum(0) - self.lengths

    def padded(self, indices: Tensor) -> Tensor:
        """Return selected sequences as a table, padded at the end, int64 ``[len(indices), longest]``."""
        lengths = self.lengths[indices]
        places = torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        numbers = self._numbers[torch.where(there, self._starts[indices][:, None] + places, 0)].long()
        return numbers.masked_fill(~there, self._padding)
