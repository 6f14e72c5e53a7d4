"""From host bytes to the network's input: all in float32, on the device, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mptrain.dataset.batch import Batch

# ITU-R BT.601: what "grey" means to JPEG, PIL and torchvision.
LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Preparation:
    """What turns stored images into network inputs.

    Attributes:
        mean: Of each stored channel over the training split, as a fraction of the full range.
        std: Standard deviation, likewise.
        image_size: Side of the network's input in pixels; other sizes are resampled bilinearly.
        channels: Channels of the network's input, 1 or 3: a grey image is repeated, a colour image becomes
            its luminance.
        full_range: The stored value that stands for 1: 255 for uint8.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    channels: int
    full_range: float = 255.0

    def apply(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """The batch on the device: inputs ``(stored / full_range - mean) / std``, resized, in float32.

        The luminance of a colour image is normalised by the luminance of the means and of the standard
        deviations; the latter is exact where the channels vary together.
        """
        batch = batch.to(device)
        images = batch.inputs.float()
        if images.shape[-2:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            images = F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=False)
        images = self._normalised(images).contiguous(memory_format=memory_format)
        return replace(batch, inputs=images)

    def card(self) -> dict[str, Any]:
        """What is done, in the order in which it is done; JSON values."""
        return {
            "resize": {"side": self.image_size, "mode": "bilinear", "align_corners": False, "antialias": False},
            "divide_by": self.full_range,
            "mean": list(self.mean),
            "std": list(self.std),
            "channels": self.channels,
        }

    def _normalised(self, images: Tensor) -> Tensor:
        # The constants stay Python numbers: as tensors they would be copied to the device at every step.
        mean, std = self.mean, self.std
        if len(mean) == 3 and self.channels == 1:
            red, green, blue = images.unbind(1)
            images = (red * LUMINANCE[0] + green * LUMINANCE[1] + blue * LUMINANCE[2]).unsqueeze(1)
            mean, std = (luminance_of(mean),), (luminance_of(std),)
        scales = [1.0 / (self.full_range * deviation) for deviation in std]
        shifts = [-average / deviation for average, deviation in zip(mean, std, strict=True)]
        if len(set(zip(scales, shifts, strict=True))) == 1:
            images = images * scales[0] + shifts[0]
        else:
            images = images.clone()
            for channel, (scale, shift) in enumerate(zip(scales, shifts, strict=True)):
                images[:, channel].mul_(scale).add_(shift)
        return images.expand(-1, self.channels, -1, -1)


def luminance_of(values: tuple[float, ...]) -> float:
    """Of a value for each of red, green and blue, that of the grey which pictures are decoded to."""
    return sum(weight * value for weight, value in zip(LUMINANCE, values, strict=True))
