"""A small Transformer that predicts the next token. Its mask is torch's own causal one: no large number is added.

A mask of -1e9 is -inf in FP16, and a row of such alone gives NaN; one of -65504 leaves nothing for the logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.errors import ConfigError
from mptrain.fields import BelowOneOrZero, NonNegativeInt, PositiveInt

#: Standard deviation of initial weights (Radford et al. 2018).
DEVIATION = 0.02


class CausalAttention(nn.Module):
    """Each position looks at itself and at those before it (Vaswani et al. 2017), with several heads.

    Args:
        width: Numbers of a position, a multiple of ``heads``.
        heads: How many heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, given: Tensor) -> Tensor:
        """From ``[N, T, width]`` to ``[N, T, width]``."""
        heads = self.inward(given).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        # Without dropout of its weights: torch's kernels for a CPU, and so their dtypes, would be others with it.
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        answer: Tensor = self.outward(seen.transpose(1, 2).flatten(2))
        return answer


class Block(nn.Module):
    """Attention and a layer of four times the width, each added to what came in and normalised before.

    Args:
        width: Numbers of a position.
        heads: Heads of the attention.
        dropout: Share of what is added set to zero in training.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.wide_norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, given: Tensor) -> Tensor:
        """From ``[N, T, width]`` to ``[N, T, width]``."""
        given = given + self.dropout(self.attention(self.attention_norm(given)))
        answer: Tensor = given + self.dropout(self.narrow(F.gelu(self.wide(self.wide_norm(given)))))
        return answer


class TransformerLanguageModel(nn.Module):
    """Embeddings of tokens and positions, blocks, a last norm and a linear layer (Radford et al. 2018 and 2019).

    Initial weights are those of GPT-2 (Radford et al. 2019).

    Args:
        vocabulary_size: How many tokens there are, V.
        sequence_length: Positions it knows: tokens of a sample.
        lanes: Must be 0; it carries no state.
        width: Numbers that stand for a position, a multiple of ``heads``.
        layers: How many blocks of attention and two linear layers.
        heads: Heads of each attention.
        dropout: Share of activations set to zero in training, after the embedding and before each addition.
        tied: The last layer's matrix is that of the embedding (Press and Wolf 2017).

    Raises:
        ConfigError: The heads do not divide the width, or state was to be carried.
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
                "dataset.stream=true: a Transformer carries no state from batch to batch", "write dataset.stream=false"
            )
        if width % heads:
            raise ConfigError(
                f"model.width={width} is not a multiple of model.heads={heads}",
                f"write model.width={width // heads * heads + heads}, or a number of heads that divides {width}",
            )
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary_size, bias=False)
        self.apply(_draw_weights)
        for name, parameter in self.named_parameters():
            if name.endswith(("outward.weight", "narrow.weight")):  # what 2 * layers of them add up to stays in range
                nn.init.normal_(parameter, std=DEVIATION / math.sqrt(2 * layers))
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token that follows each token, given it and those before it.

        Args:
            tokens: Token numbers, int64 ``[N, T]``, T at most ``sequence_length``.

        Returns:
            ``[N, T, V]``.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        given = self.dropout(self.embedding(tokens) + self.positions(places))
        logits: Tensor = self.decoder(self.norm(self.blocks(given)))
        return logits


def _draw_weights(module: nn.Module) -> None:
    """Normal weights around 0 and no biases; norms keep torch's ones and zeros."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


#: Configurations name the class so.
transformer_language_model = TransformerLanguageModel
