"""Base class of splits whose samples do not depend on each other."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from mptrain.errors import DataError
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.base.survey import Survey

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.dataset import Split
    from mptrain.workloads.base.faulty_samples import Faults
    from mptrain.workloads.base.survey import FileFacts


class IndependentSamples(ABC):
    """Base class for `mptrain.workloads.base.dataset.Split`; subclasses add a length, `fetch` and ``in_memory``.

    Args:
        faults: Unusable samples found so far, and how to treat them.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def skipped(self) -> int:
        """Number of unusable samples, or of files with samples, that were left out so far."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the indices of one epoch; see `mptrain.workloads.base.dataset.Split.order`."""
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    @property
    def files(self) -> int:
        """Number of files that are read on demand, when a batch needs them."""
        return 0 if cast("Split", self).in_memory else len(self)

    def read(self, number: int) -> FileFacts | None:
        """Read one of the `files` and record in ``faults`` if it is unusable.

        Returns:
            Facts of a usable file; None if a split has none to tell.
        """
        with contextlib.suppress(DataError):  # a batch without a usable sample
            cast("Split", self).fetch([number], 0, 0)
        return None

    def survey(self) -> Survey:
        """Return counts and lengths of the samples; see `mptrain.workloads.base.dataset.Split.survey`."""
        return Survey()
