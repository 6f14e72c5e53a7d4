"""Pictures with boxes: how their batches look, splits that are held in memory, and what becomes of boxes in a part of a picture. Reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.independent_samples import IndependentSamples
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


def detection_batch(images: Tensor, boxes: Sequence[Boxes]) -> Batch:
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


class DetectionSplit(IndependentSamples):
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
        """The batch of the pictures with these indices; see `mptrain.workloads.base.dataset.Split.fetch`."""
        return detection_batch(self.images[torch.as_tensor(indices)], [self.boxes[index] for index in indices])


class DetectionDataset(ImageDataset):
    """Pictures with boxes; meets `mptrain.workloads.base.dataset.Dataset`.

    Attributes:
        empty_boxes: How many boxes without an area were left out.
        cut_boxes: How many boxes stick out of their pictures by more than a pixel and are cut off at the edge, as far as
            is known before a picture is decoded.
    """

    empty_boxes = 0
    cut_boxes = 0

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


#: ``stretch`` makes every picture a square by stretching it, as SSD does; ``letterbox`` keeps its shape in the upper
#: left corner and leaves the rest black, as Faster R-CNN's batches do.
FitTo = Literal["stretch", "letterbox"]

Window = tuple[int, int, int, int]

#: Smallest overlap that some object's box must have with a crop; None leaves the picture whole (Liu et al. 2016, section 2.2).
_OVERLAPS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
_TRIES = 20
#: Sides of a crop as shares of the picture's (the authors' program; the paper gives 0.1 to 1 of the area), and their ratio.
_SIDES = (0.3, 1.0)
_RATIOS = (0.5, 2.0)

#: Numbers that a crop takes: which overlap, and four for each try.
CROP_DRAWS = 1 + 4 * _TRIES

#: Boxes thinner than this are gone: what is left of them at the edge of a crop shows nothing.
_THINNEST = 1.0

#: Thinner ones have no area left in FP32, and the logarithm of their size is -inf.
_NOTHING_LEFT = 1e-3


def random_window(width: int, height: int, boxes: Boxes, draws: Sequence[float]) -> Window:
    """A random part of a picture that shows the centre of an object and overlaps an object's box by a drawn share.

    SSD's training crops (Liu et al. 2016, section 2.2): the whole picture, or a part with an overlap (intersection over
    union) of at least .1, .3, .5, .7, .9 or any with some object's box; the whole where 20 tries find none.

    Args:
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        boxes: Of the picture. Without an object the picture stays whole.
        draws: `CROP_DRAWS` numbers in [0, 1).

    Returns:
        Left, upper, right, lower, in whole pixels.
    """
    from torchvision.ops import box_iou

    whole = (0, 0, width, height)
    objects = boxes.corners[boxes.kinds == OBJECT]
    least = _OVERLAPS[int(draws[0] * len(_OVERLAPS))]
    if least is None or not len(objects):
        return whole
    low, most = _SIDES
    for attempt in range(_TRIES):
        wide, high, left, upper = draws[1 + 4 * attempt : 5 + 4 * attempt]
        across, down = (round(side * (low + draw * (most - low))) for side, draw in ((width, wide), (height, high)))
        if not across or not down or not _RATIOS[0] <= across / down <= _RATIOS[1]:
            continue
        left, upper = int(left * (width - across + 1)), int(upper * (height - down + 1))
        window = (left, upper, left + across, upper + down)
        part = torch.tensor(window, dtype=torch.float32)
        shown = _centre_inside(objects, part)
        if shown.any() and bool(box_iou(objects[shown], part[None]).max() >= least):
            return window
    return whole


def _centre_inside(corners: Tensor, window: Tensor) -> Tensor:
    centres = (corners[:, :2] + corners[:, 2:]) / 2
    return ((centres > window[:2]) & (centres < window[2:])).all(1)


def through_window(boxes: Boxes, window: Window, scale: tuple[float, float]) -> Boxes:
    """The boxes whose centre a window shows, cut off at its edges, in the pixels of what it is resized to.

    Args:
        boxes: In pixels of the picture.
        window: Left, upper, right, lower.
        scale: Resized pixels for each of the window's, across and down.
    """
    part = torch.tensor(window, dtype=torch.float32)
    return _cut_off(boxes.select(_centre_inside(boxes.corners, part)), part, scale, _THINNEST)


def resized(boxes: Boxes, width: int, height: int, scale: tuple[float, float]) -> Boxes:
    """All boxes of a whole picture, cut off at its edges, in the pixels of what it is resized to.

    What is measured must not lose objects by being small or half outside, as training may.

    Args:
        boxes: In pixels of the picture, each with an area inside.
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        scale: Resized pixels for each of the picture's, across and down.
    """
    return _cut_off(boxes, torch.tensor((0, 0, width, height), dtype=torch.float32), scale, _NOTHING_LEFT)


def _cut_off(boxes: Boxes, part: Tensor, scale: tuple[float, float], thinnest: float) -> Boxes:
    corners = torch.minimum(torch.maximum(boxes.corners, part[[0, 1, 0, 1]]), part[[2, 3, 2, 3]]) - part[[0, 1, 0, 1]]
    corners = corners * torch.tensor([*scale, *scale])
    return replace(boxes, corners=corners).select(((corners[:, 2:] - corners[:, :2]) >= thinnest).all(1))


def mirrored(boxes: Boxes, width: int) -> Boxes:
    """The boxes of a picture that is mirrored left to right."""
    left, upper, right, lower = boxes.corners.unbind(1)
    return replace(boxes, corners=torch.stack([width - right, upper, width - left, lower], dim=1))
