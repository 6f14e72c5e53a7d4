"""Bounding boxes of pictures: batches, in-memory splits, and boxes under cropping and resizing. Must not read files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.workloads.base.batch import Batch, padded
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import IndependentSamples, Survey, class_facts
from mptrain.workloads.images.image_dataset import ImageDataset

#: Kinds of boxes: an object to detect; an object whose detection is optional (Pascal VOC's *difficult*); a region with
#: any number of objects whose detection is optional (COCO's *crowd*). The last two are not used in training.
OBJECT, DIFFICULT, CROWD = 0, 1, 2

#: Label of padding, which is not a box.
NOTHING = -1


@dataclass(frozen=True)
class Boxes:
    """Bounding boxes of the objects in one picture; there may be none.

    Attributes:
        corners: Left, upper, right, lower edge of each box in pixels, float32 ``[M, 4]``.
        labels: Class indices of the boxes, int64 ``[M]``.
        kinds: Role of each box in training and evaluation: `OBJECT`, `DIFFICULT` or `CROWD`, int64 ``[M]``.
    """

    corners: Tensor
    labels: Tensor
    kinds: Tensor

    def select(self, chosen: Tensor) -> Boxes:
        """Return the boxes that a bool mask ``[M]`` or int64 indices select."""
        return Boxes(self.corners[chosen], self.labels[chosen], self.kinds[chosen])


def detection_batch(images: Tensor, boxes: Sequence[Boxes]) -> Batch:
    """Build a batch of pictures, uint8 ``[N, C, H, W]``, and their boxes, padded to the largest number M, at least one.

    The targets are the boxes in pixels, float32 ``[N, M, 4]``, padded with zeros. ``extras`` contains ``labels``, int64
    ``[N, M]``, padded with `NOTHING`, and ``kinds``, int64 ``[N, M]``.
    """
    labels = padded([annotation.labels for annotation in boxes], NOTHING)
    kinds = padded([annotation.kinds for annotation in boxes])
    return Batch(
        images, padded([annotation.corners for annotation in boxes]), extras={"labels": labels, "kinds": kinds}
    )


class DetectionSplit(IndependentSamples):
    """Split of pictures, uint8 ``[N, C, H, W]``, and their boxes in memory; `DataError` if there are no boxes."""

    in_memory = True

    def __init__(self, images: Tensor, boxes: Sequence[Boxes]) -> None:
        if not any(len(annotation.labels) for annotation in boxes):
            raise DataError(f"none of {len(boxes)} pictures has a box", "use pictures with at least one box")
        super().__init__(Faults())
        self.images = images
        self.boxes = tuple(boxes)

    def __len__(self) -> int:
        return len(self.images)

    @override
    def survey(self) -> Survey:
        return survey_of_boxes(self.boxes)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the pictures with these indices and their boxes as a `detection_batch`."""
        return detection_batch(self.images[torch.as_tensor(indices)], [self.boxes[index] for index in indices])


def survey_of_boxes(boxes: Sequence[Boxes]) -> Survey:
    """Return the number of boxes of each picture and the class of each box."""
    counts = torch.tensor([len(annotation.labels) for annotation in boxes])
    labels = torch.cat([annotation.labels for annotation in boxes])
    return Survey(labels, {"boxes": len(labels)}, {"boxes of a picture": counts})


class DetectionDataset(ImageDataset):
    """Base class of data sets of pictures with boxes.

    ``empty_boxes`` have no area and are left out. ``cut_boxes`` exceed their pictures by more than a pixel and are
    clipped at the edge; they are counted as far as they are known before decoding.
    """

    inputs = "scenes"
    empty_boxes = 0
    cut_boxes = 0

    @override
    def facts(self) -> dict[str, Any]:
        """Return facts of images and any number of classes, and ``boxes``: in ``pixels`` of the network's input."""
        return {**class_facts(self.class_names), **super().facts(), "boxes": "pixels"}

    @override
    def describe(self) -> str:
        """Return a line such as ``3x300x300, 2 empty boxes left out``."""
        remarks = f", {_boxes(self.empty_boxes, 'empty ')} left out" if self.empty_boxes else ""
        remarks += f", {_boxes(self.cut_boxes)} clipped at the edge" if self.cut_boxes else ""
        return super().describe() + remarks


def _boxes(count: int, kind: str = "") -> str:
    return f"{count:,} {kind}box{'es' * (count != 1)}"


#: ``stretch`` resizes every picture to a square, as SSD does; ``letterbox`` keeps the aspect ratio in the upper left
#: corner and leaves the rest black, as in the batches of Faster R-CNN.
FitTo = Literal["stretch", "letterbox"]

Window = tuple[int, int, int, int]

#: Minimum overlap of a crop with the box of at least one object; None keeps the whole picture (Liu et al. 2016, section
#: 2.2).
_OVERLAPS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
_TRIES = 20
#: Range of a crop's sides as fractions of the picture's (from the authors' code; the paper gives 0.1 to 1 of the area),
#: and range of the aspect ratio.
_SIDES = (0.3, 1.0)
_RATIOS = (0.5, 2.0)

#: Random numbers that a crop takes: one for the overlap, and four per try.
CROP_DRAWS = 1 + 4 * _TRIES

#: Thinner boxes are dropped in training, because the remainder at the edge of a crop shows no object. In pixels.
_THINNEST = 1.0

#: Thinner boxes have no area in FP32, and the logarithm of their size is -inf. In pixels.
_NOTHING_LEFT = 1e-3


def random_window(width: int, height: int, boxes: Boxes, draws: Sequence[float]) -> Window:
    """Return a random crop window of a training picture that has a random minimum overlap with an object.

    The window also contains the centre of the object. These are SSD's training crops (Liu et al. 2016, section 2.2):
    the whole picture, or a window with an overlap (intersection over union) of at least .1, .3, .5, .7, .9, or any,
    with the box of an object. Without an object, or if 20 tries fail, the window is the whole picture. It is left,
    upper, right, lower in whole pixels; ``draws`` are `CROP_DRAWS` numbers in [0, 1).
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
    """Convert the boxes of a training picture to those of its resized crop, in pixels of the result.

    Boxes whose centre is outside of the crop are left out, the others are clipped at its edges. Boxes thinner than one
    pixel after resizing are left out too.
    """
    part = torch.tensor(window, dtype=torch.float32)
    return _cut_off(boxes.select(_centre_inside(boxes.corners, part)), part, scale, _THINNEST)


def resized(boxes: Boxes, width: int, height: int, scale: tuple[float, float]) -> Boxes:
    """Convert the boxes of a whole picture to those of the resized picture, for evaluation, clipped at its edges.

    Unlike training, evaluation must not lose objects that are small or partly outside; each box needs an area inside.
    """
    return _cut_off(boxes, torch.tensor((0, 0, width, height), dtype=torch.float32), scale, _NOTHING_LEFT)


def _cut_off(boxes: Boxes, part: Tensor, scale: tuple[float, float], thinnest: float) -> Boxes:
    corners = torch.minimum(torch.maximum(boxes.corners, part[[0, 1, 0, 1]]), part[[2, 3, 2, 3]]) - part[[0, 1, 0, 1]]
    corners = corners * torch.tensor([*scale, *scale])
    return replace(boxes, corners=corners).select(((corners[:, 2:] - corners[:, :2]) >= thinnest).all(1))


def mirrored(boxes: Boxes, width: int) -> Boxes:
    """Return the boxes of a picture of some width in pixels after a horizontal flip of the picture."""
    left, upper, right, lower = boxes.corners.unbind(1)
    return replace(boxes, corners=torch.stack([width - right, upper, width - left, lower], dim=1))
