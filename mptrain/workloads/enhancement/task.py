"""Task of image enhancement: restore high-quality pictures from degraded ones; mean error, PSNR and SSIM.

Losses and metrics are in FP32, with targets that are never rounded to half precision. FP16 cannot tell a white pixel
from one that is 0.0002 darker, and squares of errors below 0.0002 underflow to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import in_widest
from mptrain.system.errors import ConfigError
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.system.machine import load_extra, require_extra
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Pictures

#: Number of pictures to show.
SHOWN = 6


@dataclass(frozen=True)
class Enhance(OneNetworkTask):
    """Enhancement task: restore targets ``[N, C, H, W]`` from inputs ``[N, C, h, w]``, both float32 from 0 to 1.

    Metrics are computed on pictures as files would hold them: clamped, rounded to 8 bits, and without a border of
    `border` pixels. The baseline is the input itself, enlarged by bicubic interpolation if targets are larger.

    Attributes:
        loss_of: Loss function: ``l1``, the mean absolute error (Lim et al. 2017, section 3.3), or ``mse``.
        luminance: Measure only the Y channel of colour pictures; None does so if targets are larger, as papers on
            super-resolution do, and otherwise measures all channels.
        border: Pixels at each edge left out of the metrics; None leaves out ``upscale`` pixels if targets are larger,
            otherwise none.
    """

    upscale: PositiveInt
    loss_of: Literal["l1", "mse"] = "l1"
    luminance: bool | None = None
    border: NonNegativeInt | None = None

    metric = "psnr"
    higher_is_better = True

    def __post_init__(self) -> None:
        """Raise EnvironmentRefused if scikit-image, which computes SSIM, is not installed."""
        require_extra("skimage", *EXTRA)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean error over pixels and channels, float32; ConfigError if the output has a wrong shape."""
        return self._errors(self._restored(model, batch), batch.targets).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss``, ``psnr`` and its ``psnr_gain`` over the baseline in dB, and ``ssim``, float64 ``[N]``.

        All but SSIM are in float32 on devices without FP64. ConfigError is raised if the model's output does not have
        the shape of the targets, or the pictures are too small for SSIM.
        """
        output = self._restored(model, batch)
        restored, target = self._measured(output), self._measured(batch.targets)
        reached = psnr(restored, target)
        return {
            "loss": in_widest(self._errors(output, batch.targets)).mean((1, 2, 3)),
            "psnr": reached,
            "psnr_gain": reached - psnr(self._measured(self._before(batch)), target),
            "ssim": ssim(restored, target),
        }

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the restored ``picture`` of each input, in 8 bits."""
        restored = in_8_bits(model(batch.inputs)) * 255
        return [{"picture": picture} for picture in restored.round().byte().cpu()]

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return rows of baseline, model output and target of the pictures that the degradation changed most."""
        before, target = self._before(batch), batch.targets
        chosen = (before - target).square().mean((1, 2, 3)).topk(min(SHOWN, batch.samples)).indices
        rows = torch.stack(
            [pictures[chosen].clamp(0, 1) for pictures in (before, self._restored(model, batch), target)], 1
        )
        given = "input, enlarged by bicubic interpolation" if self.upscale > 1 else "input"
        caption = f"From left to right: {given}; model output; target."
        return {"enhanced": Pictures(rows.flatten(0, 1), caption, columns=rows.shape[1])}

    def _errors(self, output: Tensor, targets: Tensor) -> Tensor:
        difference = output - targets
        return difference.abs() if self.loss_of == "l1" else difference.square()

    def _restored(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's output in float32; ConfigError if it does not have the shape of the targets."""
        output: Tensor = model(batch.inputs)
        if output.shape != batch.targets.shape:
            made, wanted = ("x".join(map(str, shape[1:])) for shape in (output.shape, batch.targets.shape))
            raise ConfigError(
                f"task=enhance: {type(model).__name__} returns {made}, but the targets are {wanted}",
                "choose a model that uses the dataset's fact upscale, such as model=edsr_small",
            )
        return output.float()

    def _before(self, batch: Batch) -> Tensor:
        given, size = batch.inputs.float(), batch.targets.shape[-2:]
        if given.shape[-2:] == size:
            return given
        return F.interpolate(given, size=size, mode="bicubic", antialias=True)

    def _measured(self, pictures: Tensor) -> Tensor:
        """Return pictures without border, in 8 bits, or their luminance; ConfigError if too small for SSIM."""
        border = (self.upscale if self.upscale > 1 else 0) if self.border is None else self.border
        height, width = pictures.shape[-2:]
        if min(height, width) < WINDOW + 2 * border:
            raise ConfigError(
                f"pictures of {width}x{height} without a border of {border} are too small for SSIM's window of "
                f"{WINDOW} pixels",
                "evaluate on larger pictures, or choose a smaller task.border",
            )
        pictures = in_8_bits(pictures[..., border : height - border, border : width - border])
        on_luminance = self.upscale > 1 if self.luminance is None else self.luminance
        return luminance(pictures) if on_luminance and pictures.shape[1] == 3 else pictures


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


def psnr(pictures: Tensor, other: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of pairs of pictures ``[N, C, H, W]`` from 0 to 1 in dB; at most 100.

    It is float64 ``[N]``, or float32 on devices without float64.
    """
    error = (in_widest(pictures) - in_widest(other)).square().mean((1, 2, 3))
    return -10 * error.clamp_min(LEAST_ERROR).log10()


def ssim(pictures: Tensor, other: Tensor) -> Tensor:
    """Return the structural similarity index (SSIM) of pairs of pictures ``[N, C, H, W]`` from 0 to 1, by scikit-image.

    It is the mean over positions and channels as Wang et al. (2004) define it, with their Gaussian window, float64
    ``[N]`` on the host. Only windows inside a picture count, so pictures need at least 11 pixels a side.
    """
    metrics = load_extra("skimage.metrics", *EXTRA)
    pairs = zip(pictures.float().cpu().numpy(), other.float().cpu().numpy(), strict=True)
    values = [
        metrics.structural_similarity(
            *pair, data_range=1.0, channel_axis=0, gaussian_weights=True, sigma=DEVIATION, use_sample_covariance=False
        )
        for pair in pairs
    ]
    return torch.tensor(values, dtype=torch.float64)
