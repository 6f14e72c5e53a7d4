"""Detection data set without a download: one to three handwritten digits on a black canvas, with exact boxes.

The digits are those of scikit-learn with the splits of `mptrain.workloads.images.datasets.digits`, so training canvases
contain only training digits. A canvas depends on its number only, not on the seed of the run or the number of canvases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.system.errors import ConfigError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.base.random_streams import uniforms
from mptrain.workloads.base.splits import hold_out, stratified_order
from mptrain.workloads.detection.boxes import OBJECT, Boxes, DetectionDataset, DetectionSplit
from mptrain.workloads.images.datasets.digits import TEST_SAMPLES, digits_path, read_digits
from mptrain.workloads.images.image_dataset import Channels

#: Digits held out for validation canvases, as many as `load_digits` holds out by default.
_VAL_DIGITS = 200

#: Mean and standard deviation of the pixels of 1,000 canvases of 64x64, as a fraction of white.
MEAN, STD = 0.0733, 0.2061

#: Sides of the squares to which digits are enlarged, as fractions of the canvas's side. A digit fills the height of
#: its square and about half of the width.
_SHARES = (0.22, 0.28, 0.34, 0.40, 0.46)

_MOST = 3  # largest number of digits on a canvas
_TRIES = 12  # positions tried for a digit; it is left out if it would overlap another digit at all of them
_DRAWS = 2 + 2 * _TRIES  # random numbers for one digit: index, size and positions
_SMALLEST = 32  # smallest side of a canvas in pixels; below, digits of 8 pixels would shrink
_SEED = 1998  # seed of the canvases; changing it changes all of them
_INK = 32  # smallest grey value of a digit's pixels; lower values are the soft edge from the enlargement


@dataclass(kw_only=True, eq=False)
class DigitScenes(DetectionDataset):
    """Detection data set of synthetic pictures (canvases), each with one to three handwritten digits from scikit-learn.

    The side of a canvas is ``image_size``, 64 pixels for None; less than 32 raises `ConfigError`. The network's input
    has 1 channel, also for None, or 3 that repeat the grey one. ``workers`` is not used.
    """

    image_size: PositiveInt | None = None
    channels: Channels | None = None
    train_samples: PositiveInt = 3000
    val_samples: NonNegativeInt = 200
    test_samples: NonNegativeInt = 400
    workers: NonNegativeInt = 0

    name, class_names = "digit_scenes", tuple("0123456789")

    def __post_init__(self) -> None:
        side = self.image_size or 64
        if side < _SMALLEST:
            raise ConfigError(
                f"dataset.image_size={side}: digits of 8 pixels need a canvas of {_SMALLEST} or more",
                f"set dataset.image_size={_SMALLEST} or more",
            )
        digits, targets = read_digits(digits_path())
        sizes = {"train": None, "val": _VAL_DIGITS, "test": TEST_SAMPLES}
        train, val, test = hold_out(stratified_order(targets), sizes).values()

        def draw(number: int, count: int, part: Tensor) -> DetectionSplit:
            return draw_scenes(digits[part], targets[part], side, count, number)

        self.train = draw(0, self.train_samples, train)
        self.val = draw(1, self.val_samples, val) if self.val_samples else None
        self.test = draw(2, self.test_samples, test) if self.test_samples else None
        self.preparation = Preparation(mean=(MEAN,), std=(STD,), image_size=side, channels=self.channels or 1)


#: Name of the data set in configurations.
load_digit_scenes = DigitScenes


def draw_scenes(digits: Tensor, targets: Tensor, side: int, count: int, part: int) -> DetectionSplit:
    """Draw canvases with one to three digits, uint8 ``[D, 1, 8, 8]``, at random places and sizes, without overlap."""
    stamps = [_enlarged(digits, round(side * share)) for share in _SHARES]
    images = torch.zeros(count, 1, side, side, dtype=torch.uint8)
    draws = uniforms(_SEED, part, range(count), 1 + _MOST * _DRAWS).tolist()
    boxes = []
    for canvas, numbers in zip(images[:, 0], draws, strict=True):
        wanted = 1 + int(numbers[0] * _MOST)
        corners: list[tuple[int, int, int, int]] = []
        labels: list[int] = []
        for index in range(wanted):
            which, size, *places = numbers[1 + index * _DRAWS : 1 + (index + 1) * _DRAWS]
            digit = int(which * len(digits))
            square, (left, upper, right, lower) = stamps[int(size * len(stamps))]
            ink = square[digit, upper[digit] : lower[digit], left[digit] : right[digit]]
            box = _free_place(ink.shape[0], ink.shape[1], side, places, corners)
            if box is None:
                continue
            x, y, across, down = box
            canvas[y:down, x:across] = ink
            corners.append(box)
            labels.append(int(targets[digit]))
        boxes.append(
            Boxes(
                torch.tensor(corners, dtype=torch.float32),
                torch.tensor(labels, dtype=torch.int64),
                torch.full((len(labels),), OBJECT),
            )
        )
    return DetectionSplit(images, boxes)


def _enlarged(digits: Tensor, side: int) -> tuple[Tensor, tuple[list[int], ...]]:
    """Return digits as squares, uint8 ``[D, side, side]``, and the left, upper, right and lower edges of their ink."""
    squares = (
        F.interpolate(digits.float(), size=(side, side), mode="bilinear", align_corners=False)[:, 0].round().byte()
    )
    inked = squares >= _INK
    columns, rows = inked.any(1).int(), inked.any(2).int()
    # argmax returns the first of equal values, so the flipped tensor gives the last.
    left, upper = columns.argmax(1), rows.argmax(1)
    right, lower = side - columns.flip(1).argmax(1), side - rows.flip(1).argmax(1)
    return squares, tuple(edge.tolist() for edge in (left, upper, right, lower))


def _free_place(
    height: int, width: int, side: int, places: list[float], taken: list[tuple[int, int, int, int]]
) -> tuple[int, int, int, int] | None:
    """Return the first candidate position without overlap with other boxes: left, upper, right, lower."""
    for across, down in zip(places[::2], places[1::2], strict=True):
        x, y = int(across * (side - width + 1)), int(down * (side - height + 1))
        if all(x >= right or x + width <= left or y >= low or y + height <= up for left, up, right, low in taken):
            return (x, y, x + width, y + height)
    return None
