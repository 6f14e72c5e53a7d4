"""Metrics of the similarity between a restored picture and its target: PSNR and SSIM."""

from __future__ import annotations

import torch
from torch import Tensor

from mptrain.system.device import in_widest
from mptrain.system.extras import load_extra

#: Smallest mean squared error, which caps the PSNR at 100 dB; equal pictures would have an infinite PSNR.
LEAST_ERROR = 1e-10

#: Side and standard deviation of the window of SSIM (Wang et al. 2004, section III.C).
WINDOW, DEVIATION = 11, 1.5

#: Extra that installs scikit-image, and the option that needs it.
EXTRA = ("enhancement", "task=enhance")

#: Y of ITU-R BT.601 in 8 bits, where black is 16 and white 235, as in MATLAB's rgb2ycbcr.
_LUMINANCE, _BLACK = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16 / 255


def in_8_bits(pictures: Tensor) -> Tensor:
    """Round pictures to the values that an 8-bit file can hold: clamped to 0 to 1, multiples of 1/255, float32."""
    return (pictures.float().clamp(0, 1) * 255).round() / 255


def luminance(pictures: Tensor) -> Tensor:
    """Convert RGB ``[N, 3, H, W]`` from 0 to 1 to the luminance of YCbCr, ``[N, 1, H, W]`` from 16/255 to 235/255.

    Papers on super-resolution measure PSNR and SSIM on it.
    """
    red, green, blue = pictures.unbind(1)
    return (red * _LUMINANCE[0] + green * _LUMINANCE[1] + blue * _LUMINANCE[2] + _BLACK).unsqueeze(1)


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of pairs of pictures ``[N, C, H, W]`` from 0 to 1 in dB; at most 100.

    It is float64 ``[N]``, or float32 on devices without float64.
    """
    error = (in_widest(one) - in_widest(other)).square().mean((1, 2, 3))
    return -10 * error.clamp_min(LEAST_ERROR).log10()


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Return the structural similarity index (SSIM) of pairs of pictures ``[N, C, H, W]`` from 0 to 1, by scikit-image.

    It is the mean over positions and channels as Wang et al. (2004) define it, with their Gaussian window, float64
    ``[N]`` on the host. Only windows inside a picture count, so pictures need at least 11 pixels a side.
    """
    metrics = load_extra("skimage.metrics", *EXTRA)
    pairs = zip(one.float().cpu().numpy(), other.float().cpu().numpy(), strict=True)
    values = [
        metrics.structural_similarity(
            *pair, data_range=1.0, channel_axis=0, gaussian_weights=True, sigma=DEVIATION, use_sample_covariance=False
        )
        for pair in pairs
    ]
    return torch.tensor(values, dtype=torch.float64)
