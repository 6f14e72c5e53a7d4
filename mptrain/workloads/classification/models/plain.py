"""Deep narrow image classifier without normalisation, whose small gradients need loss scaling in FP16."""

from __future__ import annotations

from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt

POOL_AFTER = (6, 11)  # at about thirds of the depth, which reduces 16x16 images to 4x4


def plain16(
    *, num_classes: int, in_channels: int, image_size: int, width: PositiveInt = 16, depth: PositiveInt = 16
) -> nn.Sequential:
    """Build a deep narrow image classifier without normalisation, a test case that needs loss scaling in FP16.

    It has 3x3 convolutions with ReLU, 2x2 max-pools after the sixth and the eleventh, and one linear layer. PyTorch's
    default initialisation shrinks gradients in every layer. At depth 16 the gradients of the first layers are below the
    smallest FP16 number; a loss scale is enough to correct this. Images too small for the pools raise `ConfigError`.
    """
    layers: list[nn.Module] = []
    side = image_size
    for number in range(1, depth + 1):
        layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU()]
        in_channels = width
        if number in POOL_AFTER:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    if side == 0:
        raise ConfigError(f"dataset.image_size={image_size} is too small for the pools", "use 4 pixels or more")
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * side * side, num_classes))
