"""Random augmentation of training images: crops, shifts, pixel operations and erasing.

Every augmentation is a function of random numbers passed as arguments or derived from the sample index. torchvision's
own transforms draw from the process's generators, so only their constants and functions are used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mptrain.workloads.base.random_streams import uniforms

Box = tuple[float, float, float, float]

_TRIES = 10
#: Random numbers that a random box takes: four per try.
CROP_DRAWS = 4 * _TRIES

_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
#: Side of the centre crop for evaluation, as a share of the shorter side of the picture.
CENTRE = 224 / 256
_ERASED_AREA = (0.02, 0.33)
_ERASED_RATIO = (0.3, 3.3)


def random_box(width: int, height: int, draws: Sequence[float]) -> Box:
    """Return a random crop box of a training image: 8 to 100 % of its area, aspect ratio 3:4 to 4:3.

    These are "Inception-style" training crops (Szegedy et al., *Going deeper with convolutions*, CVPR 2015, section 6)
    with the constants and the fallback of torchvision's ``RandomResizedCrop``: after ten failed tries, the largest
    centre crop with an allowed ratio. It is left, upper, right, lower in whole pixels; ``draws`` are 40, in [0, 1).
    """
    box = _tried(width, height, draws, _AREA, _RATIO)
    if box is not None:
        return box
    across = min(width, round(height * _RATIO[1]))
    down = min(height, round(width / _RATIO[0]))
    left, upper = (width - across) // 2, (height - down) // 2
    return (left, upper, left + across, upper + down)


def erased_box(width: int, height: int, draws: Sequence[float]) -> Box | None:
    """Return a random rectangle to erase from a training image: 2 to 33 % of its area, aspect ratio 0.3 to 3.3.

    The constants are those of torchvision's ``RandomErasing`` (Zhong et al., *Random erasing data augmentation*, AAAI
    2020). The result is in whole pixels, None if none of ten tries fits; ``draws`` are 40 numbers in [0, 1).
    """
    return _tried(width, height, draws, _ERASED_AREA, _ERASED_RATIO)


def centre_box(width: int, height: int, centre: float) -> Box:
    """Return the crop box for evaluation: the centre square with a share of the picture's shorter side, in pixels.

    Resizing the box of 224/256 to 224 pixels is equivalent to resizing the shorter side to 256 and cropping the centre
    224, as usual for ImageNet. Edges may be fractions of pixels.
    """
    side = min(width, height) * centre
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


@dataclass(frozen=True)
class Shifting:
    """Augmentation of a batch on the host: random shift by whole pixels with zero padding, and random horizontal flip.

    A shift of up to four ``pixels`` along both axes is usual for CIFAR (He et al., *Deep residual learning*, CVPR 2016,
    section 4.2). With ``flip``, each image is flipped with probability 1/2.
    """

    pixels: int
    flip: bool

    def apply(self, images: Tensor, indices: Sequence[int], epoch: int, seed: int) -> Tensor:
        """Return shifted and flipped copies of uint8 or float ``[N, C, H, W]``, random by (seed, epoch, index)."""
        samples, _, height, width = images.shape
        draws = uniforms(seed, epoch, indices, 3)
        offsets = (draws[:, :2] * (2 * self.pixels + 1)).long()
        rows = torch.arange(height) + offsets[:, :1]
        columns = torch.arange(width).expand(samples, width)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        columns = columns + offsets[:, 1:2]
        padded = pad(images, (self.pixels,) * 4)
        numbers = torch.arange(samples)[:, None, None]
        picked = padded.permute(0, 2, 3, 1)[numbers, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous()


#: False for no augmentation, True for crop and horizontal flip, a name for these and the policy of that name.
Augment: TypeAlias = bool | Literal["randaugment", "trivial_augment"]

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
#: Number of strengths of an operation, weakest to strongest.
LEVELS = 31
#: Random numbers that one operation takes: operation, strength and direction.
DRAWS_EACH = 3


@dataclass(frozen=True)
class PixelPolicy:
    """Augmentation policy such as RandAugment: random `OPERATIONS` on an image, with strengths from 0 to given maxima.

    Attributes:
        level: Strength of all operations, from 0 to 30; None draws it for each operation.
        shear: Largest shear, as the tangent of its angle.
        shift: Largest shift in pixels.
        relative_shift: Largest shift as a fraction of the side; replaces ``shift`` unless it is 0.
        angle: Largest rotation in degrees.
        colour: Largest deviation of brightness, saturation, contrast and sharpness from the factor 1.
        bits: Largest number of the eight bits that posterising removes.
    """

    operations: int
    level: int | None
    shear: float
    shift: float
    relative_shift: float
    angle: float
    colour: float
    bits: int

    @property
    def draws(self) -> int:
        """Number of random numbers that `apply` takes per image."""
        return DRAWS_EACH * self.operations

    def apply(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """Return an image, uint8 ``[C, H, W]``, after operations drawn by `draws` random numbers in [0, 1)."""
        for number in range(self.operations):
            which, strength, direction = draws[DRAWS_EACH * number : DRAWS_EACH * (number + 1)]
            level = int(strength * LEVELS) if self.level is None else self.level
            name = OPERATIONS[int(which * len(OPERATIONS))]
            image = self.operate(image, name, level / (LEVELS - 1), -1.0 if direction < 0.5 else 1.0)
        return image

    def operate(self, image: Tensor, name: str, strength: float, sign: float) -> Tensor:
        """Return an image, uint8 ``[C, H, W]``, after an operation with strength 0 to 1 and a direction of 1 or -1."""
        from torchvision.transforms.v2 import functional as F

        arguments: dict[str, Any] = {}
        match name:
            case "identity":
                return image
            case "shear_x" | "shear_y":
                angle = math.degrees(math.atan(sign * strength * self.shear))
                shear = [angle, 0.0] if name == "shear_x" else [0.0, angle]
                arguments = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": shear, "center": [0, 0]}
            case "translate_x" | "translate_y":
                side = image.shape[-1] if name == "translate_x" else image.shape[-2]
                far = int(sign * strength * (self.relative_shift * side or self.shift))
                shift = [far, 0] if name == "translate_x" else [0, far]
                arguments = {"angle": 0.0, "translate": shift, "scale": 1.0, "shear": [0.0, 0.0]}
            case "rotate":
                arguments = {"angle": sign * strength * self.angle}
            case "brightness" | "saturation" | "contrast" | "sharpness":
                arguments = {f"{name}_factor": 1.0 + sign * strength * self.colour}
            case "posterize":
                arguments = {"bits": round(8 - strength * self.bits)}
            case "solarize":
                arguments = {"threshold": 255.0 * (1.0 - strength)}
        function = (
            "affine" if name[-2:] in ("_x", "_y") else f"adjust_{name}" if f"{name}_factor" in arguments else name
        )
        moved: Tensor = getattr(F, function)(image, **arguments)
        return moved


#: RandAugment (Cubuk et al. 2020) and TrivialAugment (Müller and Hutter 2021, wide space) with torchvision's constants.
POLICIES: dict[str, PixelPolicy] = {
    "randaugment": PixelPolicy(2, 9, shear=0.3, shift=0.0, relative_shift=150 / 331, angle=30.0, colour=0.9, bits=4),
    "trivial_augment": PixelPolicy(
        1, None, shear=0.99, shift=32.0, relative_shift=0.0, angle=135.0, colour=0.99, bits=6
    ),
}

#: Random numbers that erasing takes: one for whether to erase, the rest for the rectangle.
ERASING_DRAWS = 1 + CROP_DRAWS


@dataclass(frozen=True)
class Variation:
    """Augmentation of a training image after cropping and flipping: an optional policy, then random erasing.

    ``erasing`` is the probability that a rectangle is erased, and ``colour`` the value of its pixels in each channel, 0
    to 255: the mean of the data, which is 0 after normalisation.
    """

    policy: PixelPolicy | None
    erasing: float
    colour: tuple[int, ...]

    @property
    def draws(self) -> int:
        """Number of random numbers that `apply` takes per image."""
        return (self.policy.draws if self.policy else 0) + (ERASING_DRAWS if self.erasing > 0 else 0)

    def apply(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """Return an image, uint8 ``[C, H, W]``, after policy and erasing by `draws` random numbers in [0, 1)."""
        if self.policy is not None:
            image = self.policy.apply(image, draws)
            draws = draws[self.policy.draws :]
        return self._erase(image, draws) if self.erasing > 0 else image

    def _erase(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        height, width = image.shape[-2:]
        if draws[0] >= self.erasing or (box := erased_box(width, height, draws[1:])) is None:
            return image
        left, upper, right, lower = (int(edge) for edge in box)
        image = image.clone()
        image[:, upper:lower, left:right] = image.new_tensor(self.colour).view(-1, 1, 1)
        return image


def variation(augment: Augment, erasing: float, colour: tuple[int, ...]) -> Variation | None:
    """Return the augmentation after cropping and flipping by the user's options; None if ``augment`` is False."""
    if augment is False:
        return None
    return Variation(POLICIES[augment] if isinstance(augment, str) else None, erasing, colour)
