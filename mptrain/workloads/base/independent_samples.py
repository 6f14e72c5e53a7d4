"""What splits have in common whose samples stand for themselves."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from mptrain.errors import DataError
from mptrain.workloads.base.random_streams import sample_order

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.dataset import Split
    from mptrain.workloads.base.faulty_samples import Faults


class IndependentSamples(ABC):
    """The better part of `mptrain.workloads.base.dataset.Split`; deriving classes have a length, `fetch` and ``in_memory``.

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
        """Indices of one epoch; see `mptrain.workloads.base.dataset.Split.order`."""
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    @property
    def files(self) -> int:
        """The number of files that are read only when a batch asks for them."""
        return 0 if cast("Split", self).in_memory else len(self)

    def read(self, number: int) -> None:
        """Read one of `files` and let ``faults`` know what is wrong with it."""
        with contextlib.suppress(DataError):  # a batch without a sample
            cast("Split", self).fetch([number], 0, 0)
