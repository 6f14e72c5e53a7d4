"""Default image classifier: a small convolutional network with batch normalisation that is fast on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import MinLen
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt


def cnn(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int | None = None,
    widths: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (32, 64, 128),
) -> nn.Sequential:
    """Build a small image classifier: stages of 3x3 convolution, BatchNorm and ReLU, 2x2 max-pools, a linear layer.

    The pools are between the stages. The first stage has two convolutions. A global average precedes the linear layer.
    The smallest image leaves one pixel after the pools: 4 pixels for three stages. Smaller ones raise `ConfigError`,
    unless ``image_size`` is None.
    """
    if image_size is not None:
        require_pixels(image_size, widths, pools=len(widths) - 1)
    layers: list[nn.Module] = [*_convolution(in_channels, widths[0])]
    for stage, width in enumerate(widths):
        if stage > 0:
            layers.append(nn.MaxPool2d(2))
        layers += _convolution(widths[max(stage - 1, 0)], width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def require_pixels(image_size: int, widths: Sequence[int], pools: int) -> int:
    """Return the side in pixels after some 2x2 pools between stages, or raise ConfigError if nothing is left."""
    if image_size >> pools == 0:
        raise ConfigError(
            f"model.widths has {len(widths)} stages: images of {image_size} pixels are too small for their pools",
            "use fewer widths, or a larger dataset.image_size",
        )
    return image_size >> pools


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    # No bias, because the normalisation subtracts it.
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]
