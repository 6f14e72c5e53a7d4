"""Fully connected network on flattened images."""

from __future__ import annotations

from torch import nn

from mptrain.system.fields import BelowOne, PositiveInt


def mlp(
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    hidden: tuple[PositiveInt, ...] = (128, 128, 128),
    dropout: BelowOne | None = None,
) -> nn.Sequential:
    """Build a classifier of linear layers with ReLU and ``dropout`` (unless None), in PyTorch's initialisation."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_channels * image_size * image_size
    for wanted in hidden:
        layers += [nn.Linear(width, wanted), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = wanted
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
