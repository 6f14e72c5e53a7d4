"""Sounds from a WaveNet, sample by sample, at the cost of one sample for each.

Each layer keeps the samples that it will look back at (Paine et al. 2016, *Fast Wavenet generation algorithm*), so a step
costs as many products as there are layers, however far the network sees. It says what the whole network would, up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from mptrain.model.wavenet import GatedLayer, WaveNet


class Queue:
    """A gated layer with what it has seen.

    Args:
        layer: The layer.
        seen: Its inputs so far, ``[N, R, L]``.
    """

    def __init__(self, layer: GatedLayer, seen: Tensor) -> None:
        self.layer = layer
        padded = F.pad(seen, (layer.past, 0))
        self._kept = padded[..., padded.shape[2] - layer.past :].clone()
        self._oldest = 0
        weight = layer.gates.weight  # [2 R, R, K]
        self._weight = weight.transpose(1, 2).flatten(1)
        self._spacing = layer.gates.dilation[0]

    def step(self, given: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's two outputs for the next sample, ``[N, R, 1]``; a condition is what it adds to the gates."""
        size = self._kept.shape[2]
        taps = [self._kept[..., (self._oldest + back) % size] for back in range(0, size, self._spacing)] if size else []
        gates = F.linear(torch.cat([*taps, given[..., 0]], 1), self._weight, self.layer.gates.bias).unsqueeze(2)
        if size:
            self._kept[..., self._oldest] = given[..., 0]
            self._oldest = (self._oldest + 1) % size
        return self.layer.outputs(given, gates if condition is None else gates + condition)


def drawn(model: WaveNet, given: Tensor, count: int, source: torch.Generator, condition: Tensor | None) -> Tensor:
    """Levels drawn one after the other.

    Args:
        model: The network.
        given: Levels to go on from, int64 ``[N, L]``.
        count: How many to draw.
        source: What they are drawn from.
        condition: ``[N, E, L - 1 + count]`` or ``[N, E, 1]`` or None, of the level that follows each.

    Returns:
        int64 ``[N, count]``.
    """
    length = given.shape[1]
    layers = [cast("GatedLayer", layer) for layer in model.layers]
    told = [_added(layer, condition) for layer in layers]
    queues, value = [], model.embedding(given[:, :-1]).transpose(1, 2)
    for layer in layers:
        queues.append(Queue(layer, value))
        if length > 1:  # convolutions of nothing are refused
            value, _ = layer(value, None if condition is None else condition[..., : length - 1])
    level, levels = given[:, -1], []
    for place in range(length - 1, length - 1 + count):
        value, products = model.embedding(level).unsqueeze(2), []
        for queue, added in zip(queues, told, strict=True):
            now = added if added is None or added.shape[2] == 1 else added[..., place, None]
            value, product = queue.step(value, now)
            products.append(product)
        # NaN, which a run that went wrong has, has no probabilities.
        probabilities = model.answer(products)[..., 0].float().nan_to_num(0.0).softmax(1)
        level = torch.multinomial(probabilities, 1, generator=source)[:, 0]
        levels.append(level)
    return torch.stack(levels, 1) if levels else given[:, :0]


def _added(layer: GatedLayer, condition: Tensor | None) -> Tensor | None:
    """What a condition adds to a layer's gates, for all samples at once."""
    if layer.condition is None or condition is None:
        return None
    added: Tensor = layer.condition(condition)
    return added
