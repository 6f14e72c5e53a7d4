"""Language models of LSTM layers, which read on where they left off: the state is carried from batch to batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveInt


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers, and a linear layer that says which token comes next (Zaremba et al. 2014).

    With lanes, the last hidden and cell state of each row of a batch is kept for the batch that continues it, without
    its gradient: back-propagation through time is cut off at the batch. The state lies in buffers that are no part of
    ``state_dict()``: it belongs to a place in a text, not to what was learned.

    Args:
        vocabulary_size: How many tokens there are, V.
        lanes: Rows of state; 0 carries none.
        embedding_size: Numbers that stand for a token.
        hidden_size: Numbers of a layer's hidden state, and of its cell state, H.
        layers: How many LSTM layers.
        dropout: Share of activations set to zero in training, before, between and after the layers.
        tied: The last layer's matrix is that of the embedding.

    Attributes:
        hidden: Hidden state carried, ``[layers, lanes, H]``; absent without lanes.
        cell: Cell state carried, likewise.
    """

    hidden: Tensor
    cell: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        lanes: int,
        *,
        embedding_size: int,
        hidden_size: int,
        layers: int,
        dropout: float,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.lstm = nn.LSTM(
            embedding_size,
            hidden_size,
            layers,
            dropout=dropout if layers > 1 else 0.0,  # torch warns of dropout between the layers of one
            batch_first=True,
        )
        self.decoder = nn.Linear(hidden_size, vocabulary_size)
        self.dropout = nn.Dropout(dropout)
        if tied:
            bound = 1 / math.sqrt(hidden_size)  # the linear layer's: an embedding's would begin with huge logits
            nn.init.uniform_(self.embedding.weight, -bound, bound)
            self.decoder.weight = self.embedding.weight
        if lanes:
            for name in ("hidden", "cell"):
                self.register_buffer(name, torch.zeros(layers, lanes, hidden_size), persistent=False)

    def forward(self, tokens: Tensor, lane: Tensor | None = None, fresh: Tensor | None = None) -> Tensor:
        """Logits of the token that follows each token.

        Args:
            tokens: Token numbers, int64 ``[N, T]``.
            lane: The row of the state that each sample goes on from, all different, int64 ``[N]``; None begins with
                zeros and keeps nothing.
            fresh: Which samples begin with zeros all the same, bool ``[N]``.

        Returns:
            ``[N, T, V]``.
        """
        state = None if lane is None else self._carried(lane, fresh)
        output, after = self.lstm(self.dropout(self.embedding(tokens)), state)
        if lane is not None:
            self._keep(lane, after)
        logits: Tensor = self.decoder(self.dropout(output))
        return logits

    def _carried(self, lane: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, cell = (buffer.index_select(1, lane) for buffer in (self.hidden, self.cell))
        if fresh is None:
            return hidden, cell
        # Not a product with zero: what an overflow left behind stays NaN in one.
        return hidden.masked_fill(fresh[:, None], 0), cell.masked_fill(fresh[:, None], 0)

    def _keep(self, lane: Tensor, after: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():  # and in place, so that whoever guards the buffers can put them back
            for buffer, value in zip((self.hidden, self.cell), after, strict=True):
                buffer.index_copy_(1, lane, value.to(buffer.dtype))


def lstm_language_model(
    *,
    vocabulary_size: int,
    lanes: NonNegativeInt = 0,
    embedding_size: PositiveInt = 64,
    hidden_size: PositiveInt = 64,
    layers: PositiveInt = 1,
    dropout: BelowOneOrZero = 0.0,
    tied: bool = False,
) -> LSTMLanguageModel:
    """Build an LSTM language model in PyTorch's default initialisation; a tied matrix is drawn as a linear layer's.

    Args:
        vocabulary_size: How many tokens there are.
        lanes: Rows of state carried from batch to batch; 0 carries none.
        embedding_size: Numbers that stand for a token.
        hidden_size: Numbers of a layer's hidden state, and of its cell state.
        layers: How many LSTM layers.
        dropout: Share of activations set to zero in training, before, between and after the layers.
        tied: The last layer's matrix is that of the embedding (Press and Wolf 2017).

    Raises:
        ConfigError: A tied matrix would need two shapes.
    """
    if tied and embedding_size != hidden_size:
        raise ConfigError(
            f"model.tied=true with model.embedding_size={embedding_size} and model.hidden_size={hidden_size}: "
            "one matrix cannot have both widths",
            f"write model.embedding_size={hidden_size}, or model.tied=false",
        )
    return LSTMLanguageModel(
        vocabulary_size,
        lanes,
        embedding_size=embedding_size,
        hidden_size=hidden_size,
        layers=layers,
        dropout=dropout,
        tied=tied,
    )
