"""EDSR (Lim et al. 2017): residual blocks without normalisation at low resolution, then pixels out of channels.

Only the network; what is low and what is high resolution, and how they are compared, is in the data and the task.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.fields import PositiveFloat, PositiveInt

Upscale = Literal[1, 2, 3, 4, 8]

_NEARLY_NOTHING = 1e-3


class Enlarged(nn.Module):
    """Bicubic enlargement with the usual coefficient of -0.5, in at least FP32.

    torch has this kernel in no half precision, and a picture rounded to it would differ from its target by up to 0.0002
    whatever a network adds.

    Args:
        upscale: How many times larger; 1 leaves pictures as they are.
    """

    def __init__(self, upscale: int) -> None:
        super().__init__()
        self.upscale = upscale

    def forward(self, pictures: Tensor) -> Tensor:
        """From ``[N, C, H, W]`` to ``[N, C, upscale * H, upscale * W]``."""
        wide = pictures if pictures.element_size() >= 4 else pictures.float()
        if self.upscale == 1:
            return wide
        return F.interpolate(wide, scale_factor=self.upscale, mode="bicubic", antialias=True)


class _Block(nn.Module):
    """``x + scale * conv(relu(conv(x)))``."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(width, width), nn.ReLU(), _convolution(width, width))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.body(x)
        return x + change * self.scale


class EDSR(nn.Module):
    """From pictures ``[N, C, H, W]`` of 0 to 1 to pictures ``[N, C, upscale * H, upscale * W]``, not clamped.

    The networks of Lim et al., section 3 and table 1: 16 blocks of 64, or 32 of 256 with a residual scale of 0.1.

    Args:
        in_channels: C.
        upscale: How many times larger the output is; 1 restores at the same size.
        blocks: Residual blocks.
        width: Channels inside.
        residual_scale: What each block's change is multiplied by; a small one keeps wide networks from diverging.
        interpolated: Add the bicubic enlargement of the input to the output, so that only what that misses has to be learnt, as
            VDSR does (Kim et al. 2016); not in the paper. A network that begins there shows in minutes what it learns.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        upscale: Upscale = 1,
        blocks: PositiveInt = 16,
        width: PositiveInt = 64,
        residual_scale: PositiveFloat = 1.0,
        interpolated: bool = False,
    ) -> None:
        super().__init__()
        self.enlarged = Enlarged(upscale) if interpolated else None
        self.head = _convolution(in_channels, width)
        residual = [_Block(width, residual_scale) for _ in range(blocks)]
        self.body = nn.Sequential(*residual, _convolution(width, width))
        last = _convolution(width, in_channels)
        if interpolated:  # it begins as nearly the enlargement itself, but with gradients for all layers
            nn.init.normal_(last.weight, std=_NEARLY_NOTHING)
            nn.init.zeros_(cast("Tensor", last.bias))
        self.tail = nn.Sequential(*_enlarging(width, upscale), last)

    def forward(self, pictures: Tensor) -> Tensor:
        """The enlarged pictures."""
        # A constant takes the place of the mean colour of one set of photographs, which the authors subtract.
        shallow = self.head(pictures - 0.5)
        output: Tensor = self.tail(shallow + self.body(shallow))
        return output + (0.5 if self.enlarged is None else self.enlarged(pictures))


#: Its name in configurations.
edsr = EDSR


def _convolution(inward: int, outward: int) -> nn.Conv2d:
    return nn.Conv2d(inward, outward, 3, padding=1)


def _enlarging(width: int, upscale: int) -> list[nn.Module]:
    """Sub-pixel convolutions (Shi et al. 2016): one for 3, one for each doubling else."""
    factors = [3] if upscale == 3 else [2] * round(math.log2(upscale))
    layers: list[nn.Module] = []
    for factor in factors:
        layers += [_convolution(width, width * factor**2), nn.PixelShuffle(factor)]
    return layers
