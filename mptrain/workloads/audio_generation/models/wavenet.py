"""WaveNet: a network that predicts the level of each next sample of a sound from the samples before it.

Dilated causal convolutions look back over ever larger distances. All layers may run in half precision; the task
computes the softmax over the levels in FP32.

Generation costs one step per sample: every layer caches the past inputs that it needs (Paine et al. 2016, *Fast Wavenet
generation algorithm*), so the cost of a step depends on the number of layers and not on the receptive field. The result
is that of the whole network, up to rounding.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.fields import NonNegativeInt, PositiveInt


class GatedLayer(nn.Module):
    """Layer of WaveNet: dilated causal convolution with a tanh-sigmoid gate (van den Oord et al. 2016, eq. 2).

    Args:
        residual: Channels of the residual path, R.
        kernel_size: Number of taps of the convolution.
        dilation: Distance between taps in samples.
        condition: Channels of the condition, E, which is added to the gates (speaker, text); 0 for none.
        last: Whether this is the last layer, which has no residual output.

    Attributes:
        past: Number of earlier samples that an output depends on.
    """

    def __init__(self, residual: int, kernel_size: int, dilation: int, condition: int, *, last: bool) -> None:
        super().__init__()
        self.past = dilation * (kernel_size - 1)
        self.gates = nn.Conv1d(residual, 2 * residual, kernel_size, dilation=dilation)
        self.condition = nn.Conv1d(condition, 2 * residual, 1, bias=False) if condition else None
        self.residual = None if last else nn.Conv1d(residual, residual, 1)

    def forward(self, given: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the gated convolution to all samples of a sequence.

        Args:
            given: Inputs ``[N, R, L]``.
            condition: Condition ``[N, E, L]``, or ``[N, E, 1]`` for the same at all samples, or None.

        Returns:
            Two tensors ``[N, R, L]``: the residual output, which is the input of the next layer, and the gated product,
            which goes to the skip connections. In the last layer the residual output is the input unchanged.
        """
        gates, added = self.gates(F.pad(given, (self.past, 0))), self.added(condition)
        return self.outputs(given, gates if added is None else gates + added)

    def added(self, condition: Tensor | None) -> Tensor | None:
        """Project a condition to the part of the gates' pre-activations that it contributes, for all samples at once.

        Args:
            condition: ``[N, E, L]`` or ``[N, E, 1]``, or None.

        Returns:
            ``[N, 2 R, L]`` or ``[N, 2 R, 1]``; None if the layer or the call has no condition.
        """
        if self.condition is None or condition is None:
            return None
        added: Tensor = self.condition(condition)
        return added

    def outputs(self, given: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual output and the gated product, ``[N, R, L]`` each, from the gates' pre-activations.

        Args:
            given: Inputs of the layer ``[N, R, L]``.
            gates: Pre-activations ``[N, 2 R, L]``: those of tanh, then those of the sigmoid.
        """
        filtered, gate = gates.chunk(2, 1)
        product = torch.tanh(filtered) * torch.sigmoid(gate)
        onward = given if self.residual is None else given + self.residual(product)
        return onward, product


class Queue:
    """Gated layer with a cache of its past inputs, for generation sample by sample.

    Args:
        layer: The layer, whose weights are used unchanged.
        seen: Inputs of the layer so far, ``[N, R, L]``; only the last ``layer.past`` are kept.
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
        """Compute both outputs of the layer for the next sample, and add its input to the cache.

        Args:
            given: Input of the layer for this sample, ``[N, R, 1]``.
            condition: Contribution of the condition to the gates, from `GatedLayer.added`, ``[N, 2 R, 1]``; or None.

        Returns:
            Residual output and gated product, ``[N, R, 1]`` each, as in `GatedLayer.forward`.
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
    letters, mixed with their neighbours; each sample gets that of the letter being spoken (local conditioning).

    Args:
        levels: Number of µ-law levels.
        stacks: Number of stacks; dilations restart at 1 in each.
        layers: Layers per stack, the last with a dilation of ``2 ** (layers - 1)``.
        residual: Channels of the residual path and of the gates, R.
        skip: Channels of the sum over the skip connections of all layers.
        kernel_size: Number of taps of each layer.
        speakers: Number of speakers; 0 for no conditioning on the speaker.
        vocabulary_size: Number of letters, including that for "no letter"; 0 for no conditioning on text.
        condition: Size of the embeddings of speakers and letters, E.

    Attributes:
        receptive_field: Number of samples that an output depends on:
            ``1 + stacks (kernel_size - 1) (2 ** layers - 1)``.
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
        told = condition if speakers or vocabulary_size else 0
        self.layers = nn.ModuleList(
            GatedLayer(residual, kernel_size, dilation, told, last=number == len(dilations))
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
        """Predict the next level at each position: return the logits of all levels.

        Args:
            given: Levels, int64 ``[N, L]``.
            speaker: Numbers of the speakers, int64 ``[N]``.
            text: Numbers of the letters, int64 ``[N, M]``, zero-padded.
            place: Index into ``text`` of the letter being spoken, int64 ``[N, L]``.

        Returns:
            Logits ``[N, levels, L]``.
        """
        condition = self.conditioning(speaker, text, place)
        value = self.embedding(given).transpose(1, 2)
        products = []
        for layer in self.layers:
            value, product = layer(value, condition)
            products.append(product)
        return self.answer(products)

    def conditioning(self, speaker: Tensor | None, text: Tensor | None, place: Tensor | None) -> Tensor | None:
        """Embed speaker and text as the condition that is added to the gates of all layers.

        Args:
            speaker: As in `forward`.
            text: As in `forward`.
            place: As in `forward`.

        Returns:
            ``[N, E, L]`` with text, ``[N, E, 1]`` with only a speaker, None without either.
        """
        condition: Tensor | None = None
        if self.letters is not None and self.neighbours is not None and text is not None and place is not None:
            letters = self.neighbours(self.letters(text).transpose(1, 2)).transpose(1, 2)
            # F.embedding sums gradients in FP32, which matters because hundreds of samples share a letter.
            rows = place + torch.arange(len(text), device=text.device)[:, None] * text.shape[1]
            condition = F.embedding(rows, letters.flatten(0, 1)).transpose(1, 2)
        if self.speakers is not None and speaker is not None:
            voice = self.speakers(speaker).unsqueeze(2)
            condition = voice if condition is None else condition + voice
        return condition

    def answer(self, products: list[Tensor]) -> Tensor:
        """Compute the logits ``[N, levels, L]`` from the skip connections of all layers.

        Args:
            products: Gated product of each layer, ``[N, R, L]``: batch, channels, time steps.
        """
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
        """Generate levels one after the other, each drawn from the prediction given all levels before it.

        Args:
            given: Levels to continue, int64 ``[N, L]``, L at least 1.
            count: Number of levels to draw.
            source: Random number generator for the draws, on the device of the levels.
            speaker: As in `forward`.
            text: As in `forward`.
            place: As in `forward`, int64 ``[N, L - 1 + count]``: for each given and drawn level but the first.

        Returns:
            Drawn levels, int64 ``[N, count]``.
        """
        condition = self.conditioning(speaker, text, place)
        length = given.shape[1]
        layers = [cast("GatedLayer", layer) for layer in self.layers]
        told = [layer.added(condition) for layer in layers]
        queues, value = [], self.embedding(given[:, :-1]).transpose(1, 2)
        for layer in layers:
            queues.append(Queue(layer, value))
            if length > 1:  # torch rejects convolutions over zero samples
                value, _ = layer(value, None if condition is None else condition[..., : length - 1])
        level, levels = given[:, -1], []
        for position in range(length - 1, length - 1 + count):
            value, products = self.embedding(level).unsqueeze(2), []
            for queue, added in zip(queues, told, strict=True):
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
