"""The default model: a small convolutional network with batch normalisation, quick on a CPU."""

from __future__ import annotations

from typing import Annotated

from annotated_types import MinLen
from torch import nn

from mptrain.errors import ConfigError
from mptrain.fields import PositiveInt


def cnn(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int | None = None,
    widths: Annotated[tuple[PositiveInt, ...], MinLen(1)] = (32, 64, 128),
) -> nn.Sequential:
    """Stages of 3x3 convolution, BatchNorm and ReLU with 2x2 max-pools between them, then a linear layer.

    Works at any image size that the pools leave a pixel of: 4 pixels and more for three stages. The first
    stage has two convolutions.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the input ``[N, in_channels, H, W]``.
        image_size: Side of the input in pixels; None leaves it unchecked.
        widths: Channels of each stage.

    Raises:
        ConfigError: The pools leave nothing of such an image.
    """
    if image_size is not None and image_size >> (len(widths) - 1) == 0:
        raise ConfigError(
            f"model.widths has {len(widths)} stages: the pools between them leave nothing of {image_size} pixels",
            "write fewer widths, or a larger dataset.image_size",
        )
    layers: list[nn.Module] = [*_convolution(in_channels, widths[0])]
    for stage, width in enumerate(widths):
        if stage > 0:
            layers.append(nn.MaxPool2d(2))
        layers += _convolution(widths[max(stage - 1, 0)], width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    # The normalisation subtracts any bias again, so the convolution has none.
    convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels), nn.ReLU()]
