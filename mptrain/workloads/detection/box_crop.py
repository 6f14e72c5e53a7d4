"""Which part of a picture with boxes the network sees, and what becomes of the boxes. Arithmetic only: no pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from mptrain.workloads.detection.detection_batch import OBJECT, Boxes

#: ``stretch`` makes every picture a square by stretching it, as SSD does; ``letterbox`` keeps its shape in the upper
#: left corner and leaves the rest black, as Faster R-CNN's batches do.
FitTo = Literal["stretch", "letterbox"]

Window = tuple[int, int, int, int]

#: Smallest overlap that some object's box must have with a crop; None leaves the picture whole (Liu et al. 2016, section 2.2).
_OVERLAPS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
_TRIES = 20
_SIDES = (
    0.3,
    1.0,
)  # of a crop, as shares of the picture's (the authors' program; the paper gives 0.1 to 1 of the area)
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
    for attempt in range(_TRIES):
        window = _tried(width, height, draws[1 + 4 * attempt : 5 + 4 * attempt])
        if window is None:
            continue
        part = torch.tensor(window, dtype=torch.float32)
        shown = _centre_inside(objects, part)
        if shown.any() and bool(box_iou(objects[shown], part[None]).max() >= least):
            return window
    return whole


def _tried(width: int, height: int, draws: Sequence[float]) -> Window | None:
    low, high = _SIDES
    across, down = (
        round(side * (low + draw * (high - low))) for side, draw in zip((width, height), draws, strict=False)
    )
    if not across or not down or not _RATIOS[0] <= across / down <= _RATIOS[1]:
        return None
    left, upper = int(draws[2] * (width - across + 1)), int(draws[3] * (height - down + 1))
    return (left, upper, left + across, upper + down)


def _centre_inside(corners: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
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


def _cut_off(boxes: Boxes, part: torch.Tensor, scale: tuple[float, float], thinnest: float) -> Boxes:
    corners = torch.minimum(torch.maximum(boxes.corners, part[[0, 1, 0, 1]]), part[[2, 3, 2, 3]]) - part[[0, 1, 0, 1]]
    corners = corners * torch.tensor([*scale, *scale])
    return replace(boxes, corners=corners).select(((corners[:, 2:] - corners[:, :2]) >= thinnest).all(1))


def mirrored(boxes: Boxes, width: int) -> Boxes:
    """The boxes of a picture that is mirrored left to right."""
    left, upper, right, lower = boxes.corners.unbind(1)
    return replace(boxes, corners=torch.stack([width - right, upper, width - left, lower], dim=1))
