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
    """Build a multilayer perceptron on flattened images: linear layers with ReLU, in PyTorch's default initialisation.

    ``dropout`` is the probability after each hidden layer; None for no dropout.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * image_size * image_size
    for wanted in hidden:
        layers += [nn.Linear(width, wanted), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = wanted
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
