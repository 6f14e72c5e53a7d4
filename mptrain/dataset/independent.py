"""What splits have in common whose samples stand for themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from mptrain.dataset.draws import sample_order

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.dataset.faults import Faults


class IndependentSamples(ABC):
    """The better part of `mptrain.dataset.source.Split`; deriving classes have a length, `fetch` and ``in_memory``.

    Args:
        faults: What was wrong with samples, and what is done about it.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @property
    def skipped(self) -> int:
        """How many samples, or files of such, were left out so far because they could not be used."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Indices of one epoch; see `mptrain.dataset.source.Split.order`."""
        return sample_order(len(self), seed, epoch, shuffle=shuffle)
