"""Translation by LSTM layers with attention. Padding never changes a result, and no length is read on the host.

torch's packed sequences want the lengths on the host, which waits for the device in every step. So padding stands behind
the sentences, where a forward layer comes to it last; a backward layer reads each sentence turned round in its own length;
and the attention never sees padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.text.reversal import reverse_padded
from mptrain.workloads.translation.models.masked_attention import attend, lengths_mask


class LSTMTranslator(nn.Module):
    """An encoder and a decoder of LSTM layers (Sutskever et al. 2014) laid out as in GNMT (Wu et al. 2016, section 3).

    The encoder's first layer reads in both directions. From the third layer on, what goes into a layer is added to what comes
    out. The decoder's first layer asks the attention, and the answer goes into all layers above and, with what the last of
    them says, into the one before the logits (Luong et al. 2015, equation 5). No layer waits for the answer to the token
    before: so those of a known translation run one after the other over all its tokens, as in NVIDIA's implementation.
    The attention is the "general" one of Luong et al. (section 3.1), divided by the root of the width. The decoder begins
    with what the backward layer knows at the first word (Bahdanau et al. 2015, appendix A.2.2), made hidden and cell state
    of each layer: from zeros, small networks took longer to find their attention.

    Args:
        source_vocabulary_size: Tokens of the language to translate from.
        target_vocabulary_size: Tokens of the language to translate into, V.
        width: Numbers that stand for a token, and those of each layer's hidden state, H.
        layers: LSTM layers of the encoder, and of the decoder; at least 2.
        dropout: Share of each layer's input set to zero in training.

    Raises:
        ConfigError: There is one layer only.
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
                "model.layers=1: the first layer reads in both directions, and a second has to make one of both",
                "set model.layers=2",
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
        """Logits of the token that follows each given one.

        Args:
            source: Token numbers, int64 ``[N, S]``, padded behind with any.
            source_lengths: Tokens of each sentence, int64 ``[N]``.
            given: The beginning token and the translation but for its end, int64 ``[N, T]``.

        Returns:
            ``[N, T, V]``.
        """
        logits, _ = self._decode(given, self.encode(source, source_lengths))
        return logits

    def encode(self, source: Tensor, source_lengths: Tensor) -> dict[str, Tensor]:
        """What `step` needs to begin a translation: tensors by name, the samples first.

        Args:
            source: As `forward` takes it.
            source_lengths: Likewise.
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
        """Logits ``[N, V]`` of what follows one token of each sample, and the state behind it.

        Args:
            tokens: The last token of each translation so far, int64 ``[N]``.
            state: From `encode` or the step before.
        """
        logits, after = self._decode(tokens[:, None], state)
        return logits[:, 0], after

    def _decode(self, given: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits ``[N, T, V]``, and the state behind the last token."""
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
    """Hidden and cell state ``[N, H]`` as torch's LSTM takes those of one layer, ``[1, N, H]``."""
    return hidden[None].contiguous(), cell[None].contiguous()


#: Configurations name the class so.
lstm_translator = LSTMTranslator
