"""LSTM language models that carry their hidden and cell state from batch to batch."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.fields import AboveOne, BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.language.models.softmaxes import AdaptiveSoftmax, SampledSoftmax

#: Kind of output layer: over all tokens, with rare tokens in clusters, or against random samples in training.
Softmax = Literal["full", "adaptive", "sampled"]


class LSTMLanguageModel(nn.Module):
    """LSTM language model: embedding, LSTM layers and an output layer over the vocabulary (Zaremba et al. 2014).

    With lanes, the last hidden and cell state of each lane is kept, detached, for the batch that continues it;
    back-propagation through time is truncated at the batch. The state is in buffers ``hidden``, ``[layers, lanes, P]``,
    and ``cell``, ``[layers, lanes, H]``, outside ``state_dict()``, because it belongs to a position in a text and not
    to what was learned. Initial weights are PyTorch's default; a tied matrix is initialised like a linear layer.

    Args:
        lanes: Rows of state carried from batch to batch; 0 carries none.
        hidden_size: Size of a layer's cell state, H, and of its hidden state without a projection.
        projection: Size P, less than H, to which a matrix reduces each hidden state before the next time step and layer
            use it (Sak et al. 2014; Jozefowicz et al. 2016); 0 for none.
        dropout: Dropout probability before, between and after the layers.
        tied: Output layer and embedding share a matrix (Press and Wolf 2017).
        softmax: Kind of output layer. ``full``: over all tokens; ``adaptive``: rare tokens in clusters (Grave et al.
            2017); ``sampled``: against randomly drawn tokens in training (Jean et al. 2015).
        samples: Tokens that a sampled softmax draws per batch, at most one less than the vocabulary.
        cutoffs: Token numbers at which the clusters start; those beyond the vocabulary are ignored.
        shrink: Factor by which the feature size of an adaptive softmax shrinks from cluster to cluster.

    Raises:
        ConfigError: A tied matrix would need two shapes or does not exist, a projection would enlarge, or no cluster
            starts within the vocabulary.
    """

    hidden: Tensor
    cell: Tensor

    def __init__(
        self,
        *,
        vocabulary_size: int,
        lanes: NonNegativeInt = 0,
        embedding_size: PositiveInt = 64,
        hidden_size: PositiveInt = 64,
        projection: NonNegativeInt = 0,
        layers: PositiveInt = 1,
        dropout: BelowOneOrZero = 0.0,
        tied: bool = False,
        softmax: Softmax = "full",
        samples: PositiveInt = 8192,
        cutoffs: tuple[PositiveInt, ...] = (2000, 10000),
        shrink: AboveOne = 4.0,
    ) -> None:
        _refuse(embedding_size, hidden_size, projection, tied, softmax)
        within = _cutoffs(cutoffs, vocabulary_size) if softmax == "adaptive" else ()
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.lstm = nn.LSTM(
            embedding_size,
            hidden_size,
            layers,
            dropout=dropout if layers > 1 else 0.0,  # with a single layer torch warns that dropout has no effect
            batch_first=True,
            proj_size=projection,
        )
        features = projection or hidden_size
        self.decoder: nn.Module
        if softmax == "sampled":
            self.decoder = SampledSoftmax(features, vocabulary_size, min(samples, vocabulary_size - 1))
        elif softmax == "adaptive":
            self.decoder = AdaptiveSoftmax(features, vocabulary_size, within, shrink)
        else:
            self.decoder = nn.Linear(features, vocabulary_size)
        self.dropout = nn.Dropout(dropout)
        if tied and isinstance(self.decoder, nn.Linear):
            bound = 1 / math.sqrt(features)  # as in a linear layer: with an embedding's, initial logits would be huge
            nn.init.uniform_(self.embedding.weight, -bound, bound)
            self.decoder.weight = self.embedding.weight
        if lanes:
            for name, size in (("hidden", features), ("cell", hidden_size)):
                self.register_buffer(name, torch.zeros(layers, lanes, size), persistent=False)

    @property
    def takes_targets(self) -> bool:
        """True with a sampled or an adaptive softmax: ``forward`` takes targets and returns their losses."""
        return not isinstance(self.decoder, nn.Linear)

    def forward(
        self,
        tokens: Tensor,
        lane: Tensor | None = None,
        fresh: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return logits of the next tokens, ``[N, T, V]`` (log-probabilities with an adaptive softmax).

        With targets, return their losses in nats, float32 ``[N, T]``, and the best guesses, int64 ``[N, T]``, None
        in training. ``lane``, int64 ``[N]``, has the rows of the state that samples continue and replace, all
        different; None starts from zeros and keeps no state. ``fresh``, bool ``[N]``, marks samples that start from
        zeros nevertheless.
        """
        output, after = self._read(tokens, None if lane is None else self._carried(lane, fresh))
        if lane is not None:
            self._keep(lane, after)
        given = self.dropout(output)
        answer: Tensor | tuple[Tensor, Tensor | None]
        answer = self.decoder(given) if targets is None else self.decoder(given, targets)
        return answer

    def next_logits(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits of the token after ``tokens``, ``[N, V]``, and the state for the tokens after them."""
        output, state = self._read(tokens, state)
        return self.decoder(self.dropout(output[:, -1])), state

    def _read(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
            output, after = self.lstm(self.dropout(self.embedding(tokens)), state)
        return output, after

    def _carried(self, lane: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, cell = (buffer.index_select(1, lane) for buffer in (self.hidden, self.cell))
        if fresh is None:
            return hidden, cell
        # Not a product with zero, in which NaN from an overflow would stay NaN.
        return hidden.masked_fill(fresh[:, None], 0), cell.masked_fill(fresh[:, None], 0)

    def _keep(self, lane: Tensor, after: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():  # and in place, so that the caller can restore the buffers
            for buffer, value in zip((self.hidden, self.cell), after, strict=True):
                buffer.index_copy_(1, lane, value.to(buffer.dtype))


def _refuse(embedding_size: int, hidden_size: int, projection: int, tied: bool, softmax: Softmax) -> None:
    if projection >= hidden_size:
        raise ConfigError(
            f"model.projection={projection} with model.hidden_size={hidden_size}: a projection must be smaller",
            f"set model.projection={hidden_size // 2}, or 0 for none",
        )
    width, key = (projection, "projection") if projection else (hidden_size, "hidden_size")
    if tied and embedding_size != width:
        raise ConfigError(
            f"model.tied=true with model.embedding_size={embedding_size} and model.{key}={width}: "
            "one matrix cannot have both sizes",
            f"set model.embedding_size={width}, or model.tied=false",
        )
    if tied and softmax != "full":
        raise ConfigError(
            f"model.tied=true with model.softmax={softmax}: only a full softmax shares the embedding's matrix",
            "set model.softmax=full, or model.tied=false",
        )


def _cutoffs(cutoffs: tuple[int, ...], vocabulary_size: int) -> tuple[int, ...]:
    within = tuple(cutoff for cutoff in cutoffs if cutoff < vocabulary_size)
    if not within or list(within) != sorted(set(within)):
        raise ConfigError(
            f"model.cutoffs={list(cutoffs)} with a vocabulary of {vocabulary_size}: must rise and start below it",
            f"set model.cutoffs=[{max(1, vocabulary_size // 5)}], or model.softmax=full",
        )
    return within


#: Name in configurations.
lstm_language_model = LSTMLanguageModel
