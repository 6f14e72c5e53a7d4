"""LSTM translation model with attention. Padding never changes a result, and the host reads no lengths.

Packed sequences of torch need the lengths on the host, which would synchronise with the device in every step. Instead,
padding is at the end, after everything a forward layer depends on; a backward layer reads each sentence reversed within
its length; and attention masks padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.text.subwords import lengths_mask, reverse_padded
from mptrain.workloads.translation.models.masked_attention import attend


class LSTMTranslator(nn.Module):
    """LSTM translation model with attention, in the layout of GNMT (Wu et al. 2016, section 3).

    It consists of an encoder and a decoder (Sutskever et al. 2014) of at least two ``layers`` each (ConfigError
    otherwise). The encoder's first layer is bidirectional, and layers from the third on have residual connections. The
    decoder's first layer queries the attention; the context goes into all layers above and, with the output of the last
    layer, into the layer before the logits (Luong et al. 2015, equation 5). No layer depends on the context of the
    previous token, so in training each layer runs over all tokens at once, as in NVIDIA's implementation. The attention
    is the "general" one of Luong et al. (section 3.1), divided by the square root of the width. The initial states of
    the decoder are computed from the backward layer's output at the first word (Bahdanau et al. 2015, appendix A.2.2);
    with zeros, small networks needed longer to learn attention. ``dropout`` is of each layer's input.
    """

    def __init__(
        self,
        *,
        source_vocabulary_size: int,
        target_vocabulary_size: int,
        width: PositiveInt = 128,
        layers: PositiveInt = 2,
        dropout: BelowOneOrZero = 0.0,
    ) -> None:
        if layers < 2:
            raise ConfigError(
                "model.layers=1: the encoder needs at least two layers: the second reads both directions of the first",
                "set model.layers=2 or more",
            )
        super().__init__()
        self.source_embedding = nn.Embedding(source_vocabulary_size, width)
        self.target_embedding = nn.Embedding(target_vocabulary_size, width)
        self.forward_layer, self.backward_layer = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.encoder = _layers(2 * width, width, width, layers - 1)
        self.asking = nn.LSTM(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.decoder = _layers(2 * width, 2 * width, width, layers - 1)
        self.bridge = nn.Linear(width, 2 * layers * width)
        self.combine = nn.Linear(2 * width, width)
        self.output = nn.Linear(width, target_vocabulary_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, source_lengths: Tensor, given: Tensor) -> Tensor:
        """Return logits ``[N, T, V]`` of the token after each given token (teacher forcing).

        Sentences, int64 ``[N, S]``, are padded at the end with any token; ``given``, int64 ``[N, T]``, is the start
        token and the translation without its end token.
        """
        logits, _ = self._decode(given, self.encode(source, source_lengths))
        return logits

    def encode(self, source: Tensor, source_lengths: Tensor) -> dict[str, Tensor]:
        """Return the initial state of `step`, samples first.

        It has ``memory``, the encoded sentence, ``[N, S, H]``; ``keep``, its valid positions, bool ``[N, S]``;
        ``hidden`` and ``cell``, the state of the decoder's layers, ``[N, layers, H]`` each.
        """
        embedded = self.dropout(self.source_embedding(source))
        onward, _ = self.forward_layer(embedded)
        backward, _ = self.backward_layer(reverse_padded(embedded, source_lengths))
        backward = reverse_padded(backward, source_lengths)
        memory = torch.cat([onward, backward], -1)
        for number, layer in enumerate(self.encoder):
            answer, _ = layer(self.dropout(memory))
            memory = answer + memory if number else answer
        summary = self.bridge(backward[:, 0]).tanh()
        hidden, cell = summary.unflatten(1, (2, 1 + len(self.decoder), -1)).unbind(1)
        return {"memory": memory, "keep": lengths_mask(source_lengths, source.shape[1]), "hidden": hidden, "cell": cell}

    def step(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one more token of each translation, and return the next logits, ``[N, V]``, and state."""
        logits, after = self._decode(tokens[:, None], state)
        return logits[:, 0], after

    def _decode(self, given: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits ``[N, T, V]`` of the token after each given one, and the state after the last."""
        before = [_of_one_layer(*pair) for pair in zip(state["hidden"].unbind(1), state["cell"].unbind(1), strict=True)]
        answer, end = self.asking(self.dropout(self.target_embedding(given)), before[0])
        ends = [end]
        context = attend(self.query(answer), state["memory"], state["memory"], state["keep"][:, None])
        for number, (layer, own) in enumerate(zip(self.decoder, before[1:], strict=True)):
            below = answer
            answer, end = layer(self.dropout(torch.cat([below, context.to(below.dtype)], -1)), own)
            answer = answer + below if number else answer
            ends.append(end)
        hidden, cell = (torch.cat(parts).transpose(0, 1) for parts in zip(*ends, strict=True))
        heard = self.combine(torch.cat([answer, context.to(answer.dtype)], -1)).tanh()
        logits: Tensor = self.output(self.dropout(heard))
        return logits, {**state, "hidden": hidden, "cell": cell}


def _layers(first: int, others: int, width: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.LSTM(others if number else first, width, batch_first=True) for number in range(count))


def _of_one_layer(hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[N, H]`` in the shape of a one-layer LSTM, ``[1, N, H]``."""
    return hidden[None].contiguous(), cell[None].contiguous()


#: Name in configurations.
lstm_translator = LSTMTranslator
