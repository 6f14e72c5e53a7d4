"""Conversion of stored images to network inputs in float32 on the device, without synchronising."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.workloads.base.batch import Batch

#: Largest side of a network's input in pixels that a description of data may ask for.
MOST_PIXELS = 1 << 14

# Luminance weights of ITU-R BT.601, which JPEG, PIL and torchvision use.
LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Preparation:
    """Conversion of stored images to network inputs: normalisation, resizing, and the number of channels.

    Attributes:
        mean: Subtrahend of each stored channel, usually its mean in training data, as a fraction of the full range.
        std: Divisor of each stored channel, usually its standard deviation in training data, as such a fraction.
        image_size: Side of the network's square input in pixels; other sizes are resampled bilinearly.
        channels: 1 or 3: a grey image is repeated, a colour image is reduced to its luminance.
        full_range: Stored value that represents 1: 255 for uint8.
        fit: Way in which evaluation makes squares of ``image_size`` of picture files, with Pillow, before `apply`:
            ``crop`` the centre, ``stretch``, or ``letterbox``. None if the stored images come from no file.
        centre: Side of the centre crop as a share of the picture's shorter side.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int
    full_range: float = 255.0
    fit: Literal["crop", "stretch", "letterbox"] | None = None
    centre: float = 1.0
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Preparation:
        """Return the preparation that a `card` describes; raise KeyError, TypeError or ValueError if none."""
        resize = card["resize"]
        preparation = cls(
            mean=tuple(map(float, card["mean"])),
            std=tuple(map(float, card["std"])),
            image_size=int(resize["side"]),
            channels=int(card["channels"]),
            full_range=float(card["divide_by"]),
            fit=resize.get("fit"),
            centre=float(resize.get("centre", 1.0)),
        )
        if not (
            len(preparation.mean) == len(preparation.std) in (1, 3)
            and all(map(math.isfinite, (*preparation.mean, *preparation.std, preparation.full_range)))
            and min(*preparation.std, preparation.full_range, preparation.centre) > 0
            and preparation.channels in (1, 3)
            and 0 < preparation.image_size <= MOST_PIXELS
            and preparation.fit in (None, "crop", "stretch", "letterbox")
        ):
            raise ValueError("no preparation has these numbers")
        return preparation

    def apply(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Return the batch on the device with inputs ``(stored / full_range - mean) / std``, resized, in float32.

        Stored images are uint8 or floating-point ``[N, C, H, W]``. The luminance of a colour image is normalised by the
        luminance of the means and of the standard deviations; the latter is exact for fully correlated channels.
        """
        batch = batch.to(device)
        images = batch.inputs
        if images.dtype != torch.uint8:
            images = images.float()
        if images.shape[-2:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            images = F.interpolate(images.float(), size=size, mode="bilinear", align_corners=False, antialias=False)
        images = self._normalised(images).contiguous(memory_format=memory_format)
        return replace(batch, inputs=images)

    def card(self) -> dict[str, Any]:
        """Return the constants of the conversion by operation, in the order of the operations, as JSON values.

        Picture files are resized by Pillow, which antialiases, stored images by `torch.nn.functional.interpolate`.
        """
        resize: dict[str, Any] = {"side": self.image_size, "mode": "bilinear", "antialias": self.fit is not None}
        if self.fit is None:
            resize["align_corners"] = False
        else:
            resize |= {"library": "Pillow", "fit": self.fit} | ({"centre": self.centre} if self.fit == "crop" else {})
        grey = {"luminance": list(LUMINANCE)} if len(self.mean) == 3 and self.channels == 1 else {}
        return {
            "resize": resize,
            "divide_by": self.full_range,
            **grey,
            "mean": list(self.mean),
            "std": list(self.std),
            "channels": self.channels,
        }

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = self.mean, self.std
        if len(mean) == 3 and self.channels == 1:
            images = grey(images.float())
            mean, std = (luminance_of(mean),), (luminance_of(std),)
        scale, shift = self._constants(mean, std, images.device).unbind()
        # uint8 times float32 promotes to float32, so one kernel reads bytes and writes the products.
        return (images * scale).add_(shift).expand(-1, self.channels, -1, -1)

    def _constants(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
        """Return the scale and the shift of stored values, float32 ``[2, 1, C, 1, 1]``, cached on each device."""
        if device not in self._tables:
            scales = [1.0 / (self.full_range * deviation) for deviation in std]
            shifts = [-average / deviation for average, deviation in zip(mean, std, strict=True)]
            table = torch.tensor([scales, shifts], dtype=torch.float32).view(2, 1, -1, 1, 1)
            self._tables[device] = table.to(device, non_blocking=True)
        return self._tables[device]


def grey(images: Tensor) -> Tensor:
    """Return the luminance of RGB images, floating-point ``[N, 3, H, W]``, as ``[N, 1, H, W]``."""
    red, green, blue = images.unbind(1)
    return (red * LUMINANCE[0] + green * LUMINANCE[1] + blue * LUMINANCE[2]).unsqueeze(1)


def luminance_of(values: tuple[float, ...]) -> float:
    """Return the luminance of red, green and blue values, with the ITU-R BT.601 weights that decoding to grey uses."""
    return sum(weight * value for weight, value in zip(LUMINANCE, values, strict=True))
