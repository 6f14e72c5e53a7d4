"""Small Transformer language model. It uses torch's own causal masking and adds no large negative number.

In FP16 a mask of -1e9 is -inf, and a row of -inf only gives NaN. A mask of -65504 leaves no range for the logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOneOrZero, NonNegativeInt, PositiveInt
from mptrain.workloads.text.subwords import problems_of_heads

#: Standard deviation of initial weights (Radford et al. 2018).
DEVIATION = 0.02


class CausalAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017); ``width`` is a multiple of ``heads``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, given: Tensor, past: list[Tensor] | None = None) -> Tensor:
        """Mix each position's value with those of earlier ones, ``[N, T, width]`` in and out, without the residual.

        ``past`` has the keys and values of earlier positions, ``[N, heads, T, width / heads]``, or is empty, and gets
        those of these positions too. If it is not empty, T is 1.
        """
        heads = self.inward(given).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        causal = not past
        if past:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        if past is not None:
            past[:] = key, value
        # No dropout of attention weights: with it, torch would use other CPU kernels, with other dtypes.
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
        answer: Tensor = self.outward(seen.transpose(1, 2).flatten(2))
        return answer


class Block(nn.Module):
    """Pre-norm residual block: causal self-attention, and an MLP with four times the width; both with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.wide_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, given: Tensor, past: list[Tensor] | None = None) -> Tensor:
        """Add the outputs of attention and MLP to the vectors of positions, ``[N, T, width]`` in and out."""
        given = given + self.dropout(self.attention(self.attention_norm(given), past))
        answer: Tensor = given + self.dropout(self.narrow(F.gelu(self.wide(self.wide_norm(given)))))
        return answer


class TransformerLanguageModel(nn.Module):
    """Transformer language model: embeddings of tokens and positions, pre-norm blocks, a norm and a linear layer.

    The architecture follows Radford et al. (2018 and 2019); initial weights are those of GPT-2 (Radford et al. 2019).
    Dropout is after the embedding and in the residual branches; ``tied`` shares a matrix between output layer and
    embedding (Press and Wolf 2017). ConfigError is raised if ``width`` is not a multiple of ``heads``, or ``lanes`` is
    not 0, although the model carries no state.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int,
        sequence_length: int,
        lanes: NonNegativeInt = 0,
        width: PositiveInt = 64,
        layers: PositiveInt = 2,
        heads: PositiveInt = 4,
        dropout: BelowOneOrZero = 0.0,
        tied: bool = False,
    ) -> None:
        if lanes:
            raise ConfigError(
                "dataset.stream=true: a Transformer carries no state from batch to batch", "set dataset.stream=false"
            )
        if problems := problems_of_heads(width, heads):
            raise ConfigError(problems)
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary_size, bias=False)
        self.apply(_draw_weights)
        for name, parameter in self.named_parameters():
            if name.endswith(("outward.weight", "narrow.weight")):  # keeps the sum of 2 * layers branches in range
                nn.init.normal_(parameter, std=DEVIATION / math.sqrt(2 * layers))
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next tokens, ``[N, T, V]``, from tokens int64 ``[N, T]``, T <= ``sequence_length``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        given = self.dropout(self.embedding(tokens) + self.positions(places))
        logits: Tensor = self.decoder(self.norm(self.blocks(given)))
        return logits

    def next_logits(self, tokens: Tensor, state: list[list[Tensor]] | None) -> tuple[Tensor, list[list[Tensor]]]:
        """Return logits of the token after ``tokens``, ``[N, V]``, and the state for the next call, with one token.

        The state has the keys and values of each block. The token that begins a text is the first of a None state.
        """
        state = state or [[] for _ in self.blocks]
        begin = state[0][0].shape[2] if state[0] else 0
        places = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        given = self.dropout(self.embedding(tokens) + self.positions(places))
        for block, past in zip(self.blocks, state, strict=True):
            given = block(given, past)
        return self.decoder(self.norm(given[:, -1])), state


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


#: Name in configurations.
transformer_language_model = TransformerLanguageModel
