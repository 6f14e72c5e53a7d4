"""Pictures to enhance, in their own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, pixels_of, read_picture


class NewPhotos(NewInputs):
    """Picture files, one by one because of their sizes; they are inputs of the network as they are."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE
    batch_size = 1

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, facts)
        if facts["in_channels"] not in get_args(Channels):
            raise ValueError(f"pictures have {facts['in_channels']} channels")
        self._channels = cast("Channels", facts["in_channels"])

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return a picture, uint8 ``[C, H, W]``."""
        return pixels_of(read_picture(given, self._channels, faults))

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return one picture, uint8 ``[1, C, H, W]``."""
        return Batch(torch.stack(list(samples)), torch.zeros(len(samples)))

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        batch = batch.to(device)
        return Batch((batch.inputs.float() / 255).contiguous(memory_format=memory_format), batch.targets)
