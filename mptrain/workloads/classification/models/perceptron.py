"""Fully connected network on flattened images."""

from __future__ import annotations

from torch import nn

from mptrain.fields import BelowOne, PositiveInt


def mlp(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    hidden: tuple[PositiveInt, ...] = (128, 128, 128),
    dropout: BelowOne | None = None,
) -> nn.Sequential:
    """Linear layers with ReLU between them, with PyTorch's default initialisation.

    Args:
        num_classes: Length of the output.
        in_channels: Channels of the input ``[N, in_channels, image_size, image_size]``.
        image_size: Side of the input in pixels.
        hidden: Width of each hidden layer.
        dropout: Dropout probability after each hidden layer; None for no dropout.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * image_size * image_size
    for wanted in hidden:
        layers += [nn.Linear(width, wanted), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = wanted
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
