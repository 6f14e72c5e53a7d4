"""Pictures in which to find objects: resized as those of an evaluation are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.detection.boxes import FitTo
from mptrain.workloads.detection.detection_images import fitted
from mptrain.workloads.images.image_dataset import Channels
from mptrain.workloads.images.picture_files import EXTENSIONS, UNDECODABLE, read_picture


class NewScenes(NewInputs):
    """Picture files as squares, with the factors by which they were resized."""

    suffixes = EXTENSIONS
    unreadable = UNDECODABLE

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        super().__init__(card, {**facts, "class_names": tuple(map(str, card["labels"]))})
        self.preparation = Preparation.from_card(card["preparation"])

    def read(self, given: str, faults: Faults) -> tuple[Tensor, tuple[float, float]]:
        """Return a picture, uint8 ``[C, side, side]``, and the factors of its width and height."""
        preparation = self.preparation
        picture = read_picture(given, cast("Channels", len(preparation.mean)), faults)
        fit = cast("FitTo", preparation.fit or "stretch")
        return fitted(picture, preparation.image_size, fit, (0, 0, *picture.size))

    def collate(self, samples: Sequence[tuple[Tensor, tuple[float, float]]]) -> Batch:
        """Return pictures, uint8 ``[N, C, side, side]``, and ``scale`` of width and height, float32 ``[N, 2]``."""
        images, scales = zip(*samples, strict=True)
        return Batch(torch.stack(images), torch.zeros(len(images)), extras={"scale": torch.tensor(scales)})

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        return self.preparation.apply(batch, device, memory_format)
