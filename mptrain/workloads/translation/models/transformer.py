"""Transformer for translation (Vaswani et al. 2017): post-norm residual blocks and sinusoidal positions.

Section numbers in this module are those of the paper.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.text.subwords import lengths_mask, problems_of_heads
from mptrain.workloads.translation.models.masked_attention import attend, causal_mask

State = dict[str, Tensor]


class MultiHead(nn.Module):
    """Multi-head attention whose four matrices have no biases (section 3.2.2); ``width`` is a multiple of ``heads``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.outward = (nn.Linear(width, width, bias=False) for _ in range(4))

    def project(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a sequence to attend to, ``[N, S, width]`` each, all heads together."""
        return self.key(seen), self.value(seen)

    def forward(self, asking: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Attend from positions ``[N, T, width]`` to keys and values from `project`; the result is ``[N, T, width]``.

        ``keep`` is true where a position may attend, broadcastable to ``[N, heads, T, S]``; None masks nothing.
        """
        query, key, value = (
            tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2) for tensor in (self.query(asking), key, value)
        )
        answer: Tensor = self.outward(attend(query, key, value, keep).transpose(1, 2).flatten(2))
        return answer


class Feed(nn.Module):
    """Position-wise feed-forward network: two linear layers with ReLU in between (section 3.3)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, given: Tensor) -> Tensor:
        """Apply the two layers to each position by itself, ``[N, T, width]`` in and out."""
        answer: Tensor = self.narrow(F.relu(self.wide(given)))
        return answer


class EncoderLayer(nn.Module):
    """Post-norm encoder layer: self-attention and a feed-forward network, with dropout of both residual branches."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed = MultiHead(width, heads), Feed(width, inner)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, given: Tensor, keep: Tensor) -> Tensor:
        """Return new vectors, ``[N, S, width]``; ``keep`` is a mask broadcastable to ``[N, heads, S, S]``."""
        seen = self.attention(given, *self.attention.project(given), keep)
        given = self.attention_norm(given + self.dropout(seen))
        answer: Tensor = self.feed_norm(given + self.dropout(self.feed(given)))
        return answer


class DecoderLayer(nn.Module):
    """Post-norm decoder layer: self-attention, attention to the sentence, and a feed-forward network, with dropout."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.own, self.cross, self.feed = MultiHead(width, heads), MultiHead(width, heads), Feed(width, inner)
        self.own_norm, self.cross_norm, self.feed_norm = (nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, given: Tensor, visible: Tensor, memory: Tensor, keep: Tensor) -> Tensor:
        """Return new vectors of all positions of the translations at once, as in training, ``[N, T, width]``.

        The masks are broadcastable: ``visible`` to ``[N, heads, T, T]``, ``keep`` of the sentence to
        ``[N, heads, T, S]``.
        """
        return self.look(given, self.own.project(given), visible, self.cross.project(memory), keep)

    def look(
        self,
        given: Tensor,
        own: tuple[Tensor, Tensor],
        visible: Tensor | None,
        memory: tuple[Tensor, Tensor],
        keep: Tensor,
    ) -> Tensor:
        """Return new vectors of some positions, with keys and values of translation and sentence already computed.

        ``given`` is ``[N, T, width]``. ``own`` has the keys and values of the translation up to the last of these
        positions, and ``visible`` masks them, broadcastable to ``[N, heads, T, T']``; None masks nothing. ``memory``
        and ``keep`` are those of the sentence.
        """
        given = self.own_norm(given + self.dropout(self.own(given, *own, visible)))
        given = self.cross_norm(given + self.dropout(self.cross(given, *memory, keep)))
        answer: Tensor = self.feed_norm(given + self.dropout(self.feed(given)))
        return answer


class TransformerTranslator(nn.Module):
    """Transformer translation model (Vaswani et al. 2017); the defaults are the paper's base model.

    Embeddings are initialised with standard deviation width^-0.5 and multiplied by width^0.5; all other matrices have
    the uniform initialisation of Glorot and Bengio (2010), as in the authors' tensor2tensor. With ``tied``, both
    embeddings and the output layer share one matrix (section 3.4); initial logits then have a standard deviation of 1,
    and the initial loss is ln V + 1/2. ``inner`` is the hidden size of the feed-forward networks; ``dropout`` acts on
    the embeddings and the residual branches. ConfigError is raised if ``heads`` does not divide ``width``, or two
    vocabularies would be tied.
    """

    def __init__(
        self,
        *,
        source_vocabulary_size: int,
        target_vocabulary_size: int,
        shared_vocabulary: bool = False,
        width: PositiveInt = 512,
        layers: PositiveInt = 6,
        heads: PositiveInt = 8,
        inner: PositiveInt = 2048,
        dropout: BelowOneOrZero = 0.1,
        tied: bool = True,
    ) -> None:
        problems = problems_of_heads(width, heads)
        if tied and not shared_vocabulary:
            what = "model.tied=true: one matrix cannot be shared by two vocabularies"
            problems.append(Problem(what, "set dataset.shared=true, or model.tied=false"))
        if problems:
            raise ConfigError(problems)
        super().__init__()
        self.target_embedding = nn.Embedding(target_vocabulary_size, width)
        self.source_embedding = self.target_embedding if tied else nn.Embedding(source_vocabulary_size, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, inner, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, inner, dropout) for _ in range(layers))
        self.output = nn.Linear(width, target_vocabulary_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=width**-0.5)
        if tied:
            self.output.weight = self.target_embedding.weight

    def forward(self, source: Tensor, source_lengths: Tensor, given: Tensor) -> Tensor:
        """Return logits ``[N, T, V]`` of the token after each given token (teacher forcing).

        Sentences, int64 ``[N, S]``, are padded at the end with any token; ``given``, int64 ``[N, T]``, is the start
        token and the translation without its end token.
        """
        memory, keep = self._encode(source, source_lengths)
        visible = causal_mask(given.shape[1], given.device)
        at = self._embedded(self.target_embedding, given, 0)
        for layer in self._decoder():
            at = layer(at, visible, memory, keep)
        logits: Tensor = self.output(at)
        return logits

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        """Return the mask of the sentence, and each decoder layer's keys and values, as state of `step`.

        Those of the sentence are computed once; those of the translation, still empty, grow by one position per step.
        """
        memory, keep = self._encode(source, source_lengths)
        state = {"keep": keep[:, 0, 0]}
        for number, layer in enumerate(self._decoder()):
            state[f"memory_keys_{number}"], state[f"memory_values_{number}"] = layer.cross.project(memory)
            state[f"keys_{number}"], state[f"values_{number}"] = layer.own.project(memory[:, :0])
        return state

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one more token of each translation, and return the next logits, ``[N, V]``, and state."""
        after = dict(state)
        at = self._embedded(self.target_embedding, tokens[:, None], state["keys_0"].shape[1])
        for number, layer in enumerate(self._decoder()):
            key, value = layer.own.project(at)
            keys = after[f"keys_{number}"] = torch.cat([state[f"keys_{number}"], key], 1)
            values = after[f"values_{number}"] = torch.cat([state[f"values_{number}"], value], 1)
            memory = state[f"memory_keys_{number}"], state[f"memory_values_{number}"]
            at = layer.look(at, (keys, values), None, memory, state["keep"][:, None, None])
        logits: Tensor = self.output(at)
        return logits[:, 0], after

    def _encode(self, source: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoded sentences ``[N, S, width]``, and a mask of valid positions, bool ``[N, 1, 1, S]``."""
        keep = lengths_mask(source_lengths, source.shape[1])[:, None, None]
        at = self._embedded(self.source_embedding, source, 0)
        for layer in self.encoder:
            at = layer(at, keep)
        return at, keep

    def _decoder(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]

    def _embedded(self, embedding: nn.Embedding, tokens: Tensor, first: int) -> Tensor:
        given = embedding(tokens) * math.sqrt(embedding.embedding_dim)
        signal = positions(first, tokens.shape[1], embedding.embedding_dim, tokens.device)
        answer: Tensor = self.dropout(given + signal.to(given.dtype))
        return answer


def positions(first: int, count: int, width: int, device: torch.device) -> Tensor:
    """Return sinusoidal vectors to add to embeddings, float32 ``[count, width]``, from ``first`` on (section 3.5).

    Wavelengths are from 2 pi to 10000 * 2 pi. All sines precede all cosines, as in tensor2tensor.
    """
    places = torch.arange(first, first + count, device=device, dtype=torch.float32)
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device, dtype=torch.float32) * (-math.log(10000.0) / max(1, half - 1)))
    angles = places[:, None] * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, width % 2))


#: Name in configurations.
transformer_translator = TransformerTranslator
