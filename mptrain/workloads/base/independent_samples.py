"""Base class of data set splits whose samples do not depend on each other, so that they may come in any order."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from mptrain.system.errors import DataError
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.base.survey import Survey

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.dataset import Split
    from mptrain.workloads.base.faulty_samples import Faults
    from mptrain.workloads.base.survey import FileFacts


class IndependentSamples(ABC):
    """Base class of a split of independent samples; subclasses add ``__len__``, ``fetch`` and ``in_memory``."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def skipped(self) -> int:
        """Number of unusable samples, or of files with samples, that this split left out so far."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the sample indices of one epoch, int64 ``[len(self)]``: shuffled by (seed, epoch), or ascending."""
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    @property
    def files(self) -> int:
        """Number of files that this split reads only when a batch needs them: one per sample; 0 if it is in memory."""
        return 0 if cast("Split", self).in_memory else len(self)

    def read(self, number: int) -> FileFacts | None:
        """Check a sample's file before training: record a fault in ``faults``, or return facts, if there are any."""
        with contextlib.suppress(DataError):  # a batch without a usable sample
            cast("Split", self).fetch([number], 0, 0)
        return None

    def survey(self) -> Survey:
        """Return counts and lengths of the samples, here none."""
        return Survey()

    def digests(self) -> list[bytes]:
        """Return a digest of each stored sample, here none."""
        return []
