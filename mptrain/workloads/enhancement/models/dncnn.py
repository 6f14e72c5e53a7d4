"""DnCNN (Zhang et al. 2017): a denoiser, a plain stack of convolutions that predicts the noise in a picture."""

from __future__ import annotations

from typing import Annotated, cast

from annotated_types import Ge
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt

_NEARLY_NOTHING = 1e-3


class DnCNN(nn.Module):
    """Denoising network from noisy pictures ``[N, C, H, W]`` of about 0 to 1 to clean ones, not clamped.

    The first convolution has ReLU, the middle ones BatchNorm and ReLU, the last one neither; its output is subtracted
    from the input (Zhang et al., section III). Theirs has 17 layers for one noise level, 20 for a range of them, and 64
    channels. ConfigError is raised if the targets are larger than the inputs.
    """

    def __init__(
        self, *, in_channels: int, upscale: int = 1, depth: Annotated[int, Ge(2)] = 17, width: PositiveInt = 64
    ) -> None:
        super().__init__()
        if upscale != 1:
            raise ConfigError(
                f"this network keeps the size of a picture, but the targets are {upscale} times as large",
                "set dataset.degradation=noise, or choose model=edsr_small",
            )
        layers: list[nn.Module] = [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            # These convolutions need no bias because the normalisation would subtract it.
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.noise = nn.Sequential(*layers, nn.Conv2d(width, in_channels, 3, padding=1, bias=False))
        for module in self.noise[:-1]:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)  # He et al. 2015, as in section IV.B
        # The paper initialises the last layer like the others. With small weights the first noise estimate is near 0.
        nn.init.normal_(cast("nn.Conv2d", self.noise[-1]).weight, std=_NEARLY_NOTHING)

    def forward(self, pictures: Tensor) -> Tensor:
        """Subtract the noise that the network predicts."""
        noise: Tensor = self.noise(pictures)
        return pictures - noise


#: Name in configurations.
dncnn = DnCNN
