"""Enhancement: pictures of low quality to pictures of high quality; mean error, PSNR, SSIM.

Losses and metrics are in FP32, of targets that were never rounded to half precision: in FP16 a white pixel could not
be told from one that is 0.0002 darker, and squares of errors below 0.0002 would be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mptrain.device import in_widest
from mptrain.errors import ConfigError
from mptrain.extras import require_extra
from mptrain.fields import NonNegativeInt, PositiveInt
from mptrain.workloads.base.exhibits import Exhibit, Pictures
from mptrain.workloads.base.task import Objective, Task
from mptrain.workloads.enhancement.image_similarity import EXTRA, WINDOW, in_8_bits, luminance, psnr, ssim

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch

#: How many pictures to show.
SHOWN = 6


@dataclass(frozen=True)
class Enhance(Task):
    """Inputs ``[N, C, h, w]``, targets ``[N, C, H, W]`` in float32, both of 0 to 1; the model makes targets of inputs.

    Pictures are measured as files would hold them, clamped and rounded to 8 bits, without a border of `border` pixels.
    What to beat is the input itself, enlarged by bicubic interpolation where targets are larger.

    Attributes:
        upscale: How many times larger targets are than inputs.
        loss_of: ``l1``, the mean absolute error (Lim et al. 2017, section 3.3), or ``mse``, the mean squared one.
        luminance: Measure colour pictures on Y alone; None does so where targets are larger, as papers on
            super-resolution do, and measures all channels else.
        border: Pixels at each edge that are not measured; None leaves out ``upscale`` of them where targets are
            larger, and none else.
    """

    upscale: PositiveInt
    loss_of: Literal["l1", "mse"] = "l1"
    luminance: bool | None = None
    border: NonNegativeInt | None = None

    metric = "psnr"
    higher_is_better = True

    def __post_init__(self) -> None:
        """Refuse to begin without the library that measures SSIM.

        Raises:
            EnvironmentRefused: It is not installed.
        """
        require_extra("skimage", *EXTRA)

    def objectives(self) -> tuple[Objective, ...]:
        """One loss for all parameters."""
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean error over all pixels and channels, float32 scalar."""
        return self._errors(self._restored(model, batch), batch.targets).mean()

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Of each picture the loss, the PSNR in dB, by how much it beats the input's, and the SSIM; float64 ``[N]``."""
        output = self._restored(model, batch)
        restored, target = self._measured(output), self._measured(batch.targets)
        reached = psnr(restored, target)
        return {
            "loss": in_widest(self._errors(output, batch.targets)).mean((1, 2, 3)),
            "psnr": reached,
            "psnr_gain": reached - psnr(self._measured(self._before(batch)), target),
            "ssim": ssim(restored, target),
        }

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Means over pictures."""
        return {name: total / terms for name, total in sums.items()}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """``enhanced``: a row of before, after and truth for each of the pictures with most to be gained."""
        before, target = self._before(batch), batch.targets
        chosen = (before - target).square().mean((1, 2, 3)).topk(min(SHOWN, batch.samples)).indices
        rows = torch.stack(
            [pictures[chosen].clamp(0, 1) for pictures in (before, self._restored(model, batch), target)], 1
        )
        given = "input, enlarged by bicubic interpolation" if self.upscale > 1 else "input"
        caption = f"From left to right: {given}; made by the model; truth."
        return {"enhanced": Pictures(rows.flatten(0, 1), caption, columns=rows.shape[1])}

    def _errors(self, output: Tensor, targets: Tensor) -> Tensor:
        difference = output - targets
        return difference.abs() if self.loss_of == "l1" else difference.square()

    def _restored(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's output in float32.

        Raises:
            ConfigError: It has not the shape of the targets.
        """
        output: Tensor = model(batch.inputs)
        if output.shape != batch.targets.shape:
            made, wanted = ("x".join(map(str, shape[1:])) for shape in (output.shape, batch.targets.shape))
            raise ConfigError(
                f"task=enhance: {type(model).__name__} makes {made} where the targets are {wanted}",
                "choose a model that takes the fact upscale of the data, such as model=edsr_small",
            )
        return output.float()

    def _before(self, batch: Batch) -> Tensor:
        """Return the pictures without a model, float32 in the size of the targets."""
        given, size = batch.inputs.float(), batch.targets.shape[-2:]
        if given.shape[-2:] == size:
            return given
        return F.interpolate(given, size=size, mode="bicubic", antialias=True)

    def _measured(self, pictures: Tensor) -> Tensor:
        """Return the part of the pictures that is compared.

        Raises:
            ConfigError: Too little is left of them for a window of SSIM.
        """
        border = (self.upscale if self.upscale > 1 else 0) if self.border is None else self.border
        height, width = pictures.shape[-2:]
        if min(height, width) < WINDOW + 2 * border:
            raise ConfigError(
                f"pictures of {width}x{height} without a border of {border} are too small for SSIM's window of {WINDOW}",
                "evaluate on larger pictures, or write a smaller task.border",
            )
        pictures = in_8_bits(pictures[..., border : height - border, border : width - border])
        on_luminance = self.upscale > 1 if self.luminance is None else self.luminance
        return luminance(pictures) if on_luminance and pictures.shape[1] == 3 else pictures
