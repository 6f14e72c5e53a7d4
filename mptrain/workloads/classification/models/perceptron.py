"""Fully connected network on flattened inputs of any shape, such as images."""

from __future__ import annotations

import math

from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOne, PositiveInt


class Flat(nn.Flatten):
    """Layer that makes rows ``[N, D]`` of floating-point inputs ``[N, ...]``; ConfigError is raised for integers."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            raise ConfigError(f"model=mlp takes floats, and the inputs are {input.dtype}", "give it inputs.float()")
        return super().forward(input.unsqueeze(-1))  # nn.Flatten refuses inputs [N], each sample one number


def mlp(
    *,
    num_outputs: int,
    input_shape: tuple[int, ...],
    hidden: tuple[PositiveInt, ...] = (128, 128, 128),
    dropout: BelowOne | None = None,
) -> nn.Sequential:
    """Build a network of linear layers with ReLU and ``dropout`` (unless None), in PyTorch's initialisation.

    It maps floating-point inputs ``[N, *input_shape]`` to ``[N, num_outputs]``.
    """
    layers: list[nn.Module] = [Flat()]
    width = math.prod(input_shape)
    for wanted in hidden:
        layers += [nn.Linear(width, wanted), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = wanted
    return nn.Sequential(*layers, nn.Linear(width, num_outputs))
