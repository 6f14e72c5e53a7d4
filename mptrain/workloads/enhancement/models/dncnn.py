"""DnCNN (Zhang et al. 2017): a plain stack of convolutions that says what is noise in a picture."""

from __future__ import annotations

from typing import Annotated, cast

from annotated_types import Ge
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.fields import PositiveInt

_NEARLY_NOTHING = 1e-3


class DnCNN(nn.Module):
    """From noisy pictures ``[N, C, H, W]`` of about 0 to 1 to clean ones of the same shape, not clamped.

    The first convolution has ReLU, the middle ones BatchNorm and ReLU, the last one neither; what comes out of it is
    subtracted from the input (Zhang et al., section III).

    Theirs has 17 layers for one level of noise, 20 for many, and 64 channels.

    Args:
        in_channels: C.
        upscale: How much larger the data's targets are than its inputs; only 1 goes with this network.
        depth: Convolutions.
        width: Channels inside.

    Raises:
        ConfigError: The data are for enlarging.
    """

    def __init__(
        self, *, in_channels: int, upscale: int = 1, depth: Annotated[int, Ge(2)] = 17, width: PositiveInt = 64
    ) -> None:
        super().__init__()
        if upscale != 1:
            raise ConfigError(
                f"this network keeps the size of a picture, and the data want it {upscale} times as large",
                "write dataset.degradation=noise, or choose model=edsr_small",
            )
        layers: list[nn.Module] = [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            # The normalisation subtracts any bias again, so these convolutions have none.
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.noise = nn.Sequential(*layers, nn.Conv2d(width, in_channels, 3, padding=1, bias=False))
        for module in self.noise[:-1]:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)  # He et al. 2015, as in section IV.B
        # Theirs begins as large as the others. Small, training need not first unlearn noise of its own making.
        nn.init.normal_(cast("nn.Conv2d", self.noise[-1]).weight, std=_NEARLY_NOTHING)

    def forward(self, pictures: Tensor) -> Tensor:
        """The pictures without what the network takes for noise."""
        noise: Tensor = self.noise(pictures)
        return pictures - noise


#: Its name in configurations.
dncnn = DnCNN
