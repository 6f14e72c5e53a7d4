"""How much one picture is like another: PSNR and SSIM, in FP32 and under no autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: The smallest mean squared error that counts, which is a PSNR of 100 dB: equal pictures have an infinite one.
LEAST_ERROR = 1e-10

#: Of SSIM: side and standard deviation of its window, and its two constants (Wang et al. 2004, section III.C).
WINDOW, DEVIATION, CONSTANTS = 11, 1.5, (0.01**2, 0.03**2)

#: Y of ITU-R BT.601 in 8 bits, where black is 16 and white 235, as MATLAB's rgb2ycbcr has it.
_LUMINANCE, _BLACK = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16 / 255


def in_8_bits(pictures: Tensor) -> Tensor:
    """The pictures as a file would hold them: clamped to 0 to 1 and rounded, float32."""
    return (pictures.float().clamp(0, 1) * 255).round() / 255


def luminance(pictures: Tensor) -> Tensor:
    """Y of RGB pictures ``[N, 3, H, W]`` of 0 to 1, ``[N, 1, H, W]`` of 16/255 to 235/255."""
    red, green, blue = pictures.unbind(1)
    return (red * _LUMINANCE[0] + green * _LUMINANCE[1] + blue * _LUMINANCE[2] + _BLACK).unsqueeze(1)


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of pictures of 0 to 1, in dB, float64 ``[N]``; at most 100."""
    error = (one.double() - other.double()).square().mean((1, 2, 3))
    return -10 * error.clamp_min(LEAST_ERROR).log10()


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of pictures of 0 to 1, mean over places and channels, float64 ``[N]``.

    Windows lie wholly inside, so the pictures have at least 11 pixels a side.
    """
    channels = one.shape[1]
    places = torch.arange(WINDOW, device=one.device, dtype=torch.float64) - WINDOW // 2
    weights = (-0.5 * (places / DEVIATION).square()).exp()
    weights = (weights / weights.sum()).to(one.dtype)
    with torch.autocast(one.device.type, enabled=False):

        def mean(pictures: Tensor) -> Tensor:
            down = weights.view(1, 1, WINDOW, 1).expand(channels, -1, -1, -1)
            across = weights.view(1, 1, 1, WINDOW).expand(channels, -1, -1, -1)
            return F.conv2d(F.conv2d(pictures, down, groups=channels), across, groups=channels)

        mean_one, mean_other = mean(one), mean(other)
        variances = mean(one * one) - mean_one**2 + mean(other * other) - mean_other**2
        covariance = mean(one * other) - mean_one * mean_other
    first, second = CONSTANTS
    places_alike = (2 * mean_one * mean_other + first) / (mean_one**2 + mean_other**2 + first)
    return (places_alike * (2 * covariance + second) / (variances + second)).double().mean((1, 2, 3))
