"""EDSR (Lim et al. 2017): residual blocks without normalisation at low resolution, then sub-pixel upsampling."""

from __future__ import annotations

import math
from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.system.fields import PositiveFloat, PositiveInt

Upscale = Literal[1, 2, 3, 4, 8]

_NEARLY_NOTHING = 1e-3


class Enlarged(nn.Module):
    """Bicubic enlargement of pictures with the usual coefficient of -0.5, in at least FP32.

    torch does not implement this kernel in half precision. A picture rounded to half precision would also differ from
    its target by up to 0.0002 whatever the network adds.
    """

    def __init__(self, upscale: int) -> None:
        super().__init__()
        self.upscale = upscale

    def forward(self, pictures: Tensor) -> Tensor:
        """Enlarge pictures, which become float32 if they are in half precision."""
        wide = pictures if pictures.element_size() >= 4 else pictures.float()
        if self.upscale == 1:
            return wide
        return F.interpolate(wide, scale_factor=self.upscale, mode="bicubic", antialias=True)


class _Block(nn.Module):
    """Residual block ``x + scale * conv(relu(conv(x)))``."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(width, width), nn.ReLU(), _convolution(width, width))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.body(x)
        return x + change * self.scale


class EDSR(nn.Module):
    """Super-resolution network from pictures ``[N, C, H, W]`` to ``[N, C, upscale * H, upscale * W]``.

    Inputs are from 0 to 1; outputs are not clamped. The networks of Lim et al. (section 3 and table 1) have 16 blocks
    of 64 channels, or 32 blocks of 256 channels with a ``residual_scale`` of 0.1, the factor of each block's output,
    which keeps wide networks from diverging. ``interpolated`` adds the bicubic enlargement of the input to the output,
    so that the network learns only the difference, as in VDSR (Kim et al. 2016). This is not in the paper; it makes
    progress visible within minutes.
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
        if interpolated:  # the initial output is nearly the enlargement itself, with gradients for all layers
            nn.init.normal_(last.weight, std=_NEARLY_NOTHING)
            nn.init.zeros_(cast("Tensor", last.bias))
        self.tail = nn.Sequential(*_enlarging(width, upscale), last)

    def forward(self, pictures: Tensor) -> Tensor:
        """Restore pictures at the larger size."""
        # The authors subtract the mean colour of their training set; this network subtracts a constant.
        shallow = self.head(pictures - 0.5)
        output: Tensor = self.tail(shallow + self.body(shallow))
        return output + (0.5 if self.enlarged is None else self.enlarged(pictures))


#: Name in configurations.
edsr = EDSR


def _convolution(inward: int, outward: int) -> nn.Conv2d:
    return nn.Conv2d(inward, outward, 3, padding=1)


def _enlarging(width: int, upscale: int) -> list[nn.Module]:
    """Return sub-pixel convolutions (Shi et al. 2016): one for a factor of 3, otherwise one per doubling."""
    factors = [3] if upscale == 3 else [2] * round(math.log2(upscale))
    layers: list[nn.Module] = []
    for factor in factors:
        layers += [_convolution(width, width * factor**2), nn.PixelShuffle(factor)]
    return layers
