"""Pictures with boxes: how their batches look, and splits of them that are held in memory. Reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.independent import IndependentSamples
from mptrain.workloads.images.image_dataset import ImageDataset

#: What a box stands for: an object to be found; one that may be found or not (Pascal VOC's *difficult*); a region with
#: any number of objects, each of which may be found or not (COCO's *crowd*). Nothing is trained on the last two.
OBJECT, DIFFICULT, CROWD = 0, 1, 2

#: The label of places that hold no box.
NOTHING = -1


@dataclass(frozen=True)
class Boxes:
    """The boxes of one picture, perhaps none.

    Attributes:
        corners: Left, upper, right, lower in pixels, float32 ``[M, 4]``.
        labels: Class indices, int64 ``[M]``.
        kinds: `OBJECT`, `DIFFICULT` or `CROWD`, int64 ``[M]``.
    """

    corners: Tensor
    labels: Tensor
    kinds: Tensor

    def select(self, chosen: Tensor) -> Boxes:
        """Those that a mask or indices name."""
        return Boxes(self.corners[chosen], self.labels[chosen], self.kinds[chosen])


def boxed_batch(images: Tensor, boxes: Sequence[Boxes]) -> Batch:
    """A batch of pictures with as many places for boxes as the fullest of them needs, and at least one.

    Args:
        images: uint8 ``[N, C, H, W]``.
        boxes: Of each picture, in its pixels.

    Returns:
        Targets are the boxes, float32 ``[N, M, 4]``, empty places zero; ``labels`` int64 ``[N, M]``, `NOTHING` in empty places;
        ``kinds`` int64 ``[N, M]``.
    """
    corners = pad_sequence([one.corners for one in boxes], batch_first=True)
    labels = pad_sequence([one.labels for one in boxes], batch_first=True, padding_value=NOTHING)
    kinds = pad_sequence([one.kinds for one in boxes], batch_first=True)
    if corners.shape[1] == 0:
        corners = corners.new_zeros(len(boxes), 1, 4)
        labels = labels.new_full((len(boxes), 1), NOTHING)
        kinds = kinds.new_zeros(len(boxes), 1)
    return Batch(images, corners, more={"labels": labels, "kinds": kinds})


class BoxedSplit(IndependentSamples):
    """Pictures with boxes in memory.

    Args:
        images: uint8 ``[N, C, H, W]``.
        boxes: Of each, in its pixels.

    Raises:
        DataError: There is no picture, or not one of them has a box.
    """

    in_memory = True

    def __init__(self, images: Tensor, boxes: Sequence[Boxes]) -> None:
        if not any(len(one.labels) for one in boxes):
            raise DataError(f"none of {len(boxes)} pictures has a box", "there is nothing to learn or to find in them")
        super().__init__(Faults())
        self.images = images
        self.boxes = tuple(boxes)

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The batch of the pictures with these indices; see `mptrain.workloads.base.source.Split.fetch`."""
        return boxed_batch(self.images[torch.as_tensor(indices)], [self.boxes[index] for index in indices])


@dataclass
class BoxedDataset(ImageDataset):
    """Pictures with boxes; meets `mptrain.workloads.base.source.Dataset`.

    Attributes:
        empty_boxes: How many boxes without an area were left out.
        cut_boxes: How many boxes stick out of their pictures by more than a pixel and are cut off at the edge, as far as
            is known before a picture is decoded.
    """

    empty_boxes: int = 0
    cut_boxes: int = 0

    def facts(self) -> dict[str, Any]:
        """``boxes``, the unit of their coordinates: ``pixels`` of the network's input; and those of images with classes, of which one will do."""
        classes = {"num_classes": len(self.class_names), "class_names": self.class_names}
        return {**classes, **super().facts(), "boxes": "pixels"}

    def describe(self) -> str:
        """Channels, height and width, and boxes left out or cut off, where any were: ``3x300x300, 2 empty boxes left out``."""
        told = f", {_boxes(self.empty_boxes, 'empty ')} left out" if self.empty_boxes else ""
        told += f", {_boxes(self.cut_boxes)} cut off at the edge" if self.cut_boxes else ""
        return super().describe() + told


def _boxes(count: int, kind: str = "") -> str:
    return f"{count:,} {kind}box{'es' * (count != 1)}"
