"""Pictures to classify: decoded and cropped as the picture files of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.preparation import MOST_PIXELS, Preparation
from mptrain.workloads.images.datasets.image_folder import Decoding, decode
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE


class NewPictures(NewInputs):
    """Picture files as squares of the size in which the run's data set stores its images."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, {**facts, "class_names": tuple(map(str, card["labels"]))})
        self.preparation = Preparation.from_card(card["preparation"])
        self._side = int(card.get("stored_size", self.preparation.image_size))
        self._decoding = card.get("decode", "full")
        if not 0 < self._side <= MOST_PIXELS or self._decoding not in get_args(Decoding):
            raise ValueError(f"pictures are decoded to {self._side} pixels, {self._decoding}")

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return a picture, uint8 ``[C, side, side]``, with as many channels as the run's stored images."""
        preparation = self.preparation
        channels = cast("Channels", len(preparation.mean))
        return decode(given, self._side, channels, None, faults, self._decoding, preparation.centre)

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return pictures, ``[N, C, side, side]``, in the range of the run's stored images."""
        images, white = torch.stack(list(samples)), self.preparation.full_range
        return Batch(
            images if white == 255.0 else images * (white / 255.0), torch.zeros(len(images), dtype=torch.int64)
        )

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.preparation.apply(batch, device, memory_format)
