"""Which part of a picture the network sees. Arithmetic on boxes only: no pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[float, float, float, float]

_TRIES = 10
#: Numbers that a random box takes: four for each try.
CROP_DRAWS = 4 * _TRIES

_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_CENTRE = 224 / 256
_ERASED_AREA = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)


def random_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """A random part of a picture: 8 to 100 % of its area, aspect ratio 3:4 to 4:3.

    "Inception-style" training crops (Szegedy et al., *Going deeper with convolutions*, CVPR 2015, section 6)
    with the numbers and the fallback of torchvision's ``RandomResizedCrop``: ten tries, else the largest part
    at the centre with an allowed ratio.

    Args:
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        draws: 40 numbers in [0, 1).

    Returns:
        Left, upper, right, lower, in whole pixels.
    """
    found = _tried(width, height, draws, _AREA, _RATIO)
    if found is not None:
        return found
    across = min(width, round(height * _RATIO[1]))
    down = min(height, round(width / _RATIO[0]))
    left, upper = (width - across) // 2, (height - down) // 2
    return (left, upper, left + across, upper + down)


def erased_box(width: int, height: int, draws: Sequence[float]) -> Box | None:
    """A random rectangle of 2 to 33 % of a picture's area, aspect ratio 0.3 to 3.3.

    The numbers of torchvision's ``RandomErasing`` (Zhong et al., *Random erasing data augmentation*, AAAI 2020).

    Args:
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        draws: 40 numbers in [0, 1).

    Returns:
        Left, upper, right, lower, in whole pixels; None if none of ten tries fits into the picture.
    """
    return _tried(width, height, draws, _ERASED_AREA, _ERASED_RATIO)


def centre_box(width: int, height: int) -> Box:
    """The square at the centre, 224/256 of the shorter side: ImageNet's usual evaluation crop.

    Resizing this box to 224 pixels is resizing the shorter side to 256 and cutting 224 out of the centre.
    """
    side = min(width, height) * _CENTRE
    left, upper = (width - side) / 2, (height - side) / 2
    return (left, upper, left + side, upper + side)


def _tried(
    width: int, height: int, draws: Sequence[float], areas: tuple[float, float], ratios: tuple[float, float]
) -> Box | None:
    low, high = math.log(ratios[0]), math.log(ratios[1])
    for attempt in range(_TRIES):
        area_draw, ratio_draw, left_draw, upper_draw = draws[4 * attempt : 4 * attempt + 4]
        area = width * height * (areas[0] + area_draw * (areas[1] - areas[0]))
        ratio = math.exp(low + ratio_draw * (high - low))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int(left_draw * (width - across + 1))
            upper = int(upper_draw * (height - down + 1))
            return (left, upper, left + across, upper + down)
    return None
