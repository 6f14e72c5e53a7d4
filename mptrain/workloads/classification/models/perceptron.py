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
    """Build a multilayer perceptron that classifies flattened images: linear layers with ReLU between them.

    The weights have PyTorch's default initialisation.

    Args:
        num_classes: Number of classes, which is the length of the output.
        in_channels: Channels of the input ``[N, in_channels, image_size, image_size]``.
        image_size: Side of the input in pixels.
        hidden: Width of each hidden layer.
        dropout: Dropout probability after each hidden layer; None for no dropout.

    Returns:
        A network that maps images to logits ``[N, num_classes]``.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * image_size * image_size
    for wanted in hidden:
        layers += [nn.Linear(width, wanted), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = wanted
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
