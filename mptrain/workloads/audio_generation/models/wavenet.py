"""WaveNet: a network that predicts the level of each next sample of a sound from the samples before it.

Generation costs one step per sample: every layer caches the past inputs that it needs (Paine et al. 2016, *Fast Wavenet
generation algorithm*), so the cost of a step depends on the number of layers and not on the receptive field. The result
is that of the whole network, up to rounding.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.system.fields import NonNegativeInt, PositiveInt


class GatedLayer(nn.Module):
    """Layer of WaveNet: dilated causal convolution with a tanh-sigmoid gate (van den Oord et al. 2016, eq. 2).

    The condition (speaker, text), of E channels, is added to the gates; 0 for none. The ``last`` layer has no residual
    output. ``past`` is the number of earlier samples that an output depends on.
    """

    def __init__(self, residual: int, kernel_size: int, dilation: int, condition: int, *, last: bool) -> None:
        super().__init__()
        self.past = dilation * (kernel_size - 1)
        self.gates = nn.Conv1d(residual, 2 * residual, kernel_size, dilation=dilation)
        self.condition = nn.Conv1d(condition, 2 * residual, 1, bias=False) if condition else None
        self.residual = None if last else nn.Conv1d(residual, residual, 1)

    def forward(self, given: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return residual output and gated product, ``[N, R, L]`` each, for inputs ``[N, R, L]``.

        The first goes to the next layer, the second to the skip connections; in the last layer the residual output is
        the input unchanged. The condition is ``[N, E, L]``, or ``[N, E, 1]`` for the same at all samples, or None.
        """
        gates, added = self.gates(F.pad(given, (self.past, 0))), self.added(condition)
        return self.outputs(given, gates if added is None else gates + added)

    def added(self, condition: Tensor | None) -> Tensor | None:
        """Return what a condition adds to the gates' pre-activations, ``[N, 2 R, L]`` or ``[N, 2 R, 1]``, or None."""
        if self.condition is None or condition is None:
            return None
        added: Tensor = self.condition(condition)
        return added

    def outputs(self, given: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of `forward` from the pre-activations ``[N, 2 R, L]``: of tanh, then of the sigmoid."""
        filtered, gate = gates.chunk(2, 1)
        product = torch.tanh(filtered) * torch.sigmoid(gate)
        onward = given if self.residual is None else given + self.residual(product)
        return onward, product


class Queue:
    """Gated layer with a cache of its last ``layer.past`` inputs, for generation sample by sample."""

    def __init__(self, layer: GatedLayer, seen: Tensor) -> None:
        self.layer = layer
        padded = F.pad(seen, (layer.past, 0))
        self._kept = padded[..., padded.shape[2] - layer.past :].clone()
        self._oldest = 0
        # For one output sample the convolution is one product with its past inputs side by side, the oldest first.
        weight = layer.gates.weight  # [2 R, R, K]
        self._weight = weight.transpose(1, 2).flatten(1)
        self._spacing = layer.gates.dilation[0]

    def step(self, given: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both outputs of the layer for the next sample, ``[N, R, 1]``, and add its input to the cache.

        ``condition`` is the result of `GatedLayer.added` for this sample, ``[N, 2 R, 1]``, or None.
        """
        size = self._kept.shape[2]
        taps = [self._kept[..., (self._oldest + back) % size] for back in range(0, size, self._spacing)] if size else []
        gates = F.linear(torch.cat([*taps, given[..., 0]], 1), self._weight, self.layer.gates.bias).unsqueeze(2)
        if size:
            self._kept[..., self._oldest] = given[..., 0]
            self._oldest = (self._oldest + 1) % size
        return self.layer.outputs(given, gates if condition is None else gates + condition)


class WaveNet(nn.Module):
    """WaveNet: stacks of gated layers with dilations 1, 2, 4 ... over embedded levels (van den Oord et al. 2016).

    The speaker is an embedding shared by all samples (global conditioning, their section 2.5). Text is an embedding of
    letters, mixed with their neighbours; each sample gets that of the letter being spoken (local conditioning). An
    output depends on ``receptive_field`` samples, ``1 + stacks (kernel_size - 1) (2 ** layers - 1)``.

    Args:
        stacks: Number of stacks; dilations restart at 1 in each.
        layers: Layers per stack, the last with a dilation of ``2 ** (layers - 1)``.
        residual: Channels of the residual path and of the gates, R.
        skip: Channels of the sum over the skip connections of all layers.
        vocabulary_size: Number of letters, including that for "no letter"; 0 for no text, like 0 ``speakers``.
        condition: Size of the embeddings of speakers and letters, E.
    """

    def __init__(
        self,
        *,
        levels: PositiveInt,
        speakers: NonNegativeInt = 0,
        vocabulary_size: NonNegativeInt = 0,
        stacks: PositiveInt = 3,
        layers: PositiveInt = 10,
        residual: PositiveInt = 64,
        skip: PositiveInt = 256,
        kernel_size: PositiveInt = 2,
        condition: PositiveInt = 64,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(levels, residual)
        self.speakers = nn.Embedding(speakers, condition) if speakers else None
        self.letters = nn.Embedding(vocabulary_size, condition, padding_idx=0) if vocabulary_size else None
        self.neighbours = nn.Conv1d(condition, condition, 5, padding=2) if vocabulary_size else None
        dilations = [2**layer for _ in range(stacks) for layer in range(layers)]
        condition_size = condition if speakers or vocabulary_size else 0
        self.layers = nn.ModuleList(
            GatedLayer(residual, kernel_size, dilation, condition_size, last=number == len(dilations))
            for number, dilation in enumerate(dilations, start=1)
        )
        # One product over the skip connections of all layers: their sum is rounded once, not after every layer.
        self.skip = nn.Conv1d(len(dilations) * residual, skip, 1)
        self.hidden = nn.Conv1d(skip, skip, 1)
        self.output = nn.Conv1d(skip, levels, 1)
        self.receptive_field = 1 + sum(dilations) * (kernel_size - 1)

    def forward(
        self, given: Tensor, speaker: Tensor | None = None, text: Tensor | None = None, place: Tensor | None = None
    ) -> Tensor:
        """Return logits of the next level at each position, ``[N, levels, L]``, for levels ``[N, L]``.

        ``speaker``, int64 ``[N]``, has numbers of speakers, ``text``, int64 ``[N, M]``, zero-padded, those of letters,
        and ``place``, int64 ``[N, L]``, the index into ``text`` of the letter being spoken.
        """
        condition = self.conditioning(speaker, text, place)
        value = self.embedding(given).transpose(1, 2)
        products = []
        for layer in self.layers:
            value, product = layer(value, condition)
            products.append(product)
        return self.answer(products)

    def conditioning(self, speaker: Tensor | None, text: Tensor | None, letter_index: Tensor | None) -> Tensor | None:
        """Return the condition of all layers, ``[N, E, L]`` with text, ``[N, E, 1]`` with only a speaker, or None."""
        condition: Tensor | None = None
        if self.letters is not None and self.neighbours is not None and text is not None and letter_index is not None:
            letters = self.neighbours(self.letters(text).transpose(1, 2)).transpose(1, 2)
            # F.embedding sums gradients in FP32, which matters because hundreds of samples share a letter.
            rows = letter_index + torch.arange(len(text), device=text.device)[:, None] * text.shape[1]
            condition = F.embedding(rows, letters.flatten(0, 1)).transpose(1, 2)
        if self.speakers is not None and speaker is not None:
            voice = self.speakers(speaker).unsqueeze(2)
            condition = voice if condition is None else condition + voice
        return condition

    def answer(self, products: list[Tensor]) -> Tensor:
        """Compute the logits ``[N, levels, L]`` from the gated product of each layer, ``[N, R, L]``."""
        logits: Tensor = self.output(F.relu(self.hidden(F.relu(self.skip(torch.cat(products, 1))))))
        return logits

    def drawn(
        self,
        given: Tensor,
        count: int,
        source: torch.Generator,
        speaker: Tensor | None = None,
        text: Tensor | None = None,
        place: Tensor | None = None,
    ) -> Tensor:
        """Generate ``count`` levels, int64 ``[N, count]``, each drawn from the prediction given all levels before it.

        ``given``, int64 ``[N, L]``, has at least one level; ``source`` is on its device. ``place`` is int64
        ``[N, L - 1 + count]``: for each given and drawn level but the first.
        """
        condition = self.conditioning(speaker, text, place)
        length = given.shape[1]
        layers = [cast("GatedLayer", layer) for layer in self.layers]
        conditions = [layer.added(condition) for layer in layers]
        queues, value = [], self.embedding(given[:, :-1]).transpose(1, 2)
        for layer in layers:
            queues.append(Queue(layer, value))
            if length > 1:  # torch rejects convolutions over zero samples
                value, _ = layer(value, None if condition is None else condition[..., : length - 1])
        level, levels = given[:, -1], []
        for position in range(length - 1, length - 1 + count):
            value, products = self.embedding(level).unsqueeze(2), []
            for queue, added in zip(queues, conditions, strict=True):
                now = added if added is None or added.shape[2] == 1 else added[..., position, None]
                value, product = queue.step(value, now)
                products.append(product)
            # A diverged run has NaN logits, from which nothing can be drawn.
            probabilities = self.answer(products)[..., 0].float().nan_to_num(0.0).softmax(1)
            level = torch.multinomial(probabilities, 1, generator=source)[:, 0]
            levels.append(level)
        return torch.stack(levels, 1) if levels else given[:, :0]


#: Name in configurations.
wavenet = WaveNet
