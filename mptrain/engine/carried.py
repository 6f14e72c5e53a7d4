"""State that a run carries from batch to batch in buffers, where its rows belong to several ranks.

Each rank trains on its rows of every batch, and so changes its rows of such a buffer and no others. The whole is
therefore what each rank has changed since all had the same. The last batch of an epoch may be smaller, so that rows of
a rank are those of a later one there; so the whole is asked for at the end of every epoch, where the later rank's count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mptrain.engine.job import Parts


class Carried:
    """The carried buffers of a run.

    Args:
        parts: The run; all ranks have the same buffers.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """All ranks have the same buffers now."""
        alone = self._parts.comm.world_size == 1
        self._base = {} if alone else {name: buffer.clone() for name, buffer in self._parts.carried().items()}

    def whole(self) -> dict[str, Tensor]:
        """The buffers with the rows of all ranks, which must all ask, and have them from then on.

        Asked where a checkpoint is taken and where an epoch ends, outside of steps: the device is waited for.
        """
        buffers = self._parts.carried()
        if not self._base:
            return buffers
        changes: dict[str, Tensor] = {}
        for name, buffer in buffers.items():
            if not torch.equal(buffer, self._base[name]):
                changes[name] = buffer.cpu()
        base = {name: buffer.cpu() for name, buffer in self._base.items()}
        merged = {name: buffer.clone() for name, buffer in base.items()}
        for theirs in self._parts.comm.all_gather_object(changes):
            for name, buffer in theirs.items():
                merged[name] = torch.where(buffer != base[name], buffer, merged[name])
        for name, buffer in buffers.items():
            buffer.copy_(merged[name])
        self.begin()
        return buffers
