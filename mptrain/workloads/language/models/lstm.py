"""Language models of LSTM layers, which read on where they left off: the state is carried from batch to batch."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.fields import AboveOne, BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.language.models.softmaxes import AdaptiveSoftmax, SampledSoftmax

#: The last layer: over all tokens, with rare ones in clusters, or in training against some drawn at random.
Softmax = Literal["full", "adaptive", "sampled"]


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers, and a last layer that says which token comes next (Zaremba et al. 2014).

    With a projection, each layer's hidden state is multiplied by a matrix, which gives it fewer numbers before the next
    time step and the next layer see it (Sak et al. 2014; Jozefowicz et al. 2016).

    With lanes, the last hidden and cell state of each row of a batch is kept for the batch that continues it, without
    its gradient: back-propagation through time is cut off at the batch. The state lies in buffers that are no part of
    ``state_dict()``: it belongs to a place in a text, not to what was learned.

    Initial weights are PyTorch's default; a tied matrix is drawn as a linear layer's.

    Args:
        vocabulary_size: How many tokens there are, V.
        lanes: Rows of state carried from batch to batch; 0 carries none.
        embedding_size: Numbers that stand for a token.
        hidden_size: Numbers of a layer's cell state, H, and of its hidden state where there is no projection.
        projection: Numbers of a layer's hidden state, P, fewer than ``hidden_size``; 0 projects nothing.
        layers: How many LSTM layers.
        dropout: Share of activations set to zero in training, before, between and after the layers.
        tied: The last layer's matrix is that of the embedding (Press and Wolf 2017).
        softmax: ``full``: over all tokens; ``adaptive``: rare tokens in clusters (Grave et al. 2017); ``sampled``: in
            training against some tokens drawn at random (Jean et al. 2015).
        samples: Tokens that a sampled softmax draws for a batch; of a smaller vocabulary one less than all.
        cutoffs: Numbers of the tokens at which an adaptive softmax's clusters begin; those beyond the vocabulary are
            left out.
        shrink: By how much the rows of an adaptive softmax become shorter from cluster to cluster.

    Raises:
        ConfigError: A tied matrix would need two shapes, or is no matrix; a projection would enlarge; no cluster
            begins within the vocabulary.

    Attributes:
        hidden: Hidden state carried, ``[layers, lanes, P]``; absent without lanes.
        cell: Cell state carried, ``[layers, lanes, H]``; likewise.
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
            dropout=dropout if layers > 1 else 0.0,  # torch warns of dropout between the layers of one
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
            bound = 1 / math.sqrt(features)  # the linear layer's: an embedding's would begin with huge logits
            nn.init.uniform_(self.embedding.weight, -bound, bound)
            self.decoder.weight = self.embedding.weight
        if lanes:
            for name, size in (("hidden", features), ("cell", hidden_size)):
                self.register_buffer(name, torch.zeros(layers, lanes, size), persistent=False)

    @property
    def takes_targets(self) -> bool:
        """Whether it says by itself what targets cost; see `mptrain.workloads.language.task.Language`."""
        return not isinstance(self.decoder, nn.Linear)

    def forward(
        self,
        tokens: Tensor,
        lane: Tensor | None = None,
        fresh: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits of the token that follows each token, or what the tokens that do follow cost.

        Args:
            tokens: Token numbers, int64 ``[N, T]``.
            lane: The row of the state that each sample goes on from, all different, int64 ``[N]``; None begins with
                zeros and keeps nothing.
            fresh: Which samples begin with zeros all the same, bool ``[N]``.
            targets: The tokens that follow, int64 ``[N, T]``, where the last layer takes them.

        Returns:
            ``[N, T, V]``; with targets their losses, float32 ``[N, T]``, and the best guesses, int64 ``[N, T]`` or None.
        """
        state = None if lane is None else self._carried(lane, fresh)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")
            output, after = self.lstm(self.dropout(self.embedding(tokens)), state)
        if lane is not None:
            self._keep(lane, after)
        given = self.dropout(output)
        answer: Tensor | tuple[Tensor, Tensor | None]
        answer = self.decoder(given) if targets is None else self.decoder(given, targets)
        return answer

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


def _refuse(embedding_size: int, hidden_size: int, projection: int, tied: bool, softmax: Softmax) -> None:
    if projection >= hidden_size:
        raise ConfigError(
            f"model.projection={projection} with model.hidden_size={hidden_size}: a projection has fewer numbers",
            f"write model.projection={hidden_size // 2}, or 0 for none",
        )
    width, key = (projection, "projection") if projection else (hidden_size, "hidden_size")
    if tied and embedding_size != width:
        raise ConfigError(
            f"model.tied=true with model.embedding_size={embedding_size} and model.{key}={width}: "
            "one matrix cannot have both widths",
            f"write model.embedding_size={width}, or model.tied=false",
        )
    if tied and softmax != "full":
        raise ConfigError(
            f"model.tied=true with model.softmax={softmax}: only a full softmax shares the embedding's matrix",
            "write model.softmax=full, or model.tied=false",
        )


def _cutoffs(cutoffs: tuple[int, ...], vocabulary_size: int) -> tuple[int, ...]:
    within = tuple(cutoff for cutoff in cutoffs if cutoff < vocabulary_size)
    if not within or list(within) != sorted(set(within)):
        raise ConfigError(
            f"model.cutoffs={list(cutoffs)} with a vocabulary of {vocabulary_size}: they must rise, and one lie below it",
            f"write model.cutoffs=[{max(1, vocabulary_size // 5)}], or model.softmax=full",
        )
    return within


#: Configurations name the class so.
lstm_language_model = LSTMLanguageModel
