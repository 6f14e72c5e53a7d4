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
from mptrain.system.extras import require_extra
from mptrain.system.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Exhibit, OneNetworkTask, Pictures
from mptrain.workloads.enhancement.image_similarity import EXTRA, WINDOW, in_8_bits, luminance, psnr, ssim

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
        return [{"picture": one} for one in restored.round().byte().cpu()]

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
