"""Variation of single images beyond crop and mirroring: what is done to each follows from numbers that it is given.

The pixels are torchvision's work (`torchvision.transforms.v2.functional`); its own transforms draw from the process's
random numbers, so only their tables are used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from mptrain.workloads.images.crop import CROP_DRAWS, erased_box

if TYPE_CHECKING:
    from torch import Tensor

#: False for none, True for crop and mirroring, else these and a policy.
Augment: TypeAlias = bool | Literal["randaugment", "trivial_augment"]

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
#: Strengths that a policy chooses from, weakest to strongest.
LEVELS = 31
#: Numbers that one operation takes: which, how strong, in which direction.
DRAWS_EACH = 3


@dataclass(frozen=True)
class Policy:
    """Operations drawn from the same fourteen, with strengths from 0 to the largest of each.

    Attributes:
        operations: How many are done, one after the other.
        level: The strength of all, from 0 to 30; None draws it.
        shear: Largest shear, as the tangent of its angle.
        shift: Largest shift in pixels.
        relative_shift: Largest shift as a share of the side instead, where it is not 0.
        angle: Largest rotation in degrees.
        colour: Largest change of brightness, saturation, contrast and sharpness from the factor 1.
        bits: How many of the eight bits are cut at most.
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
        """How many numbers an image takes."""
        return DRAWS_EACH * self.operations

    def apply(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """A varied image.

        Args:
            image: uint8 ``[C, H, W]``.
            draws: As many numbers in [0, 1) as `draws` says.
        """
        for number in range(self.operations):
            which, strength, direction = draws[DRAWS_EACH * number : DRAWS_EACH * (number + 1)]
            level = int(strength * LEVELS) if self.level is None else self.level
            name = OPERATIONS[int(which * len(OPERATIONS))]
            image = self.operate(image, name, level / (LEVELS - 1), -1.0 if direction < 0.5 else 1.0)
        return image

    def operate(self, image: Tensor, name: str, strength: float, sign: float) -> Tensor:
        """One of `OPERATIONS`.

        Args:
            image: uint8 ``[C, H, W]``.
            name: Which.
            strength: From 0 to 1.
            sign: 1 or -1, for those that go in two directions.
        """
        from torchvision.transforms.v2 import functional as F

        match name:
            case "shear_x" | "shear_y":
                angle = math.degrees(math.atan(sign * strength * self.shear))
                shear = [angle, 0.0] if name == "shear_x" else [0.0, angle]
                moved = F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=shear, center=[0, 0])
            case "translate_x" | "translate_y":
                across = name == "translate_x"
                side = image.shape[-1] if across else image.shape[-2]
                far = int(sign * strength * (self.relative_shift * side or self.shift))
                shift = [far, 0] if across else [0, far]
                moved = F.affine(image, angle=0.0, translate=shift, scale=1.0, shear=[0.0, 0.0])
            case "rotate":
                moved = F.rotate(image, angle=sign * strength * self.angle)
            case "brightness" | "saturation" | "contrast" | "sharpness":
                adjust = getattr(F, f"adjust_{name}")
                moved = adjust(image, 1.0 + sign * strength * self.colour)
            case "posterize":
                moved = F.posterize(image, bits=round(8 - strength * self.bits))
            case "solarize":
                moved = F.solarize(image, threshold=255.0 * (1.0 - strength))
            case "autocontrast":
                moved = F.autocontrast(image)
            case "equalize":
                moved = F.equalize(image)
            case _:
                moved = image
        result: Tensor = moved
        return result


#: RandAugment (Cubuk et al. 2020) and TrivialAugment (Müller and Hutter 2021, wide space), with torchvision's numbers.
POLICIES: dict[str, Policy] = {
    "randaugment": Policy(2, 9, shear=0.3, shift=0.0, relative_shift=150 / 331, angle=30.0, colour=0.9, bits=4),
    "trivial_augment": Policy(1, None, shear=0.99, shift=32.0, relative_shift=0.0, angle=135.0, colour=0.99, bits=6),
}

#: Numbers that erasing takes: whether, and what a rectangle takes.
ERASING_DRAWS = 1 + CROP_DRAWS


@dataclass(frozen=True)
class Variation:
    """What is done to a training image behind cropping and mirroring.

    Attributes:
        policy: Operations on its pixels; None for none.
        erasing: Probability that a rectangle of it is erased.
        colour: What is put there, for each channel: the mean of the data, which the network sees as 0.
    """

    policy: Policy | None
    erasing: float
    colour: tuple[int, ...]

    @property
    def draws(self) -> int:
        """How many numbers an image takes."""
        return (self.policy.draws if self.policy else 0) + (ERASING_DRAWS if self.erasing > 0 else 0)

    def apply(self, image: Tensor, draws: Sequence[float]) -> Tensor:
        """A varied image.

        Args:
            image: uint8 ``[C, H, W]``.
            draws: As many numbers in [0, 1) as `draws` says.
        """
        if self.policy is not None:
            image = self.policy.apply(image, draws)
            draws = draws[self.policy.draws :]
        return erase(image, self.erasing, self.colour, draws) if self.erasing > 0 else image


def variation(augment: Augment, erasing: float, colour: tuple[int, ...]) -> Variation | None:
    """What a user's choices mean; None where training images are left as they are."""
    if augment is False:
        return None
    return Variation(POLICIES[augment] if isinstance(augment, str) else None, erasing, colour)


def erase(image: Tensor, probability: float, colour: Sequence[int], draws: Sequence[float]) -> Tensor:
    """Random erasing (Zhong et al. 2020) of a rectangle, with torchvision's numbers: 2 to 33 % of the area.

    Args:
        image: uint8 ``[C, H, W]``.
        probability: Of erasing anything.
        colour: What is put there, for each channel; the mean of the data is 0 to the network.
        draws: `ERASING_DRAWS` numbers in [0, 1).
    """
    if draws[0] >= probability:
        return image
    height, width = image.shape[-2:]
    box = erased_box(width, height, draws[1:])
    if box is None:
        return image
    from torchvision.transforms.v2 import functional as F

    left, upper, right, lower = (int(edge) for edge in box)
    value = image.new_tensor(list(colour)).view(-1, 1, 1)
    result: Tensor = F.erase(image, upper, left, lower - upper, right - left, value)
    return result
