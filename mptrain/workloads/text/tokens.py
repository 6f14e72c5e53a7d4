"""Tokens and vocabularies of language models, learned from training text only."""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mptrain.system.errors import DataError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.random_streams import mix, permutation
from mptrain.workloads.text.pretrained_tokenizer import Tokenizer
from mptrain.workloads.text.subwords import PAD

Tokens = Literal["word", "char", "space"]

#: Entry for unknown tokens, always number 0; text prepared by others may contain it.
UNKNOWN = "<unk>"

_PATTERNS: dict[Tokens, re.Pattern[str]] = {
    "word": re.compile(rf"{UNKNOWN}|\w+|([^\w\s])\1*"),  # words and numbers, runs of one punctuation mark
    "char": re.compile(r"[\s\S]"),
    "space": re.compile(r"\S+|\n"),  # strings between white space, and line ends: for text that is already tokenized
}


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary that maps text to token numbers, which are indices in ``entries``, and back.

    Attributes:
        tokens: Kind of tokens. ``word``: words, numbers and punctuation marks, with repetitions of a mark as one token;
            ``char``: characters; ``space``: strings between white space, and line ends.
        entries: `UNKNOWN`, then the other tokens, most frequent first and equally frequent ones in alphabetical order.
    """

    tokens: Tokens
    entries: tuple[str, ...]

    #: Number of `UNKNOWN`, which a continued text never gets.
    unknown: ClassVar[int] = 0

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Vocabulary:
        """Return the vocabulary in ``data.json``; raise KeyError or ValueError if there is none."""
        tokens, labels = card["tokens"], card["labels"]
        if tokens not in _PATTERNS or not all(isinstance(entry, str) for entry in labels):
            raise ValueError(f"tokens are {tokens!r}")
        return cls(tokens, tuple(labels))

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        return {entry: number for number, entry in enumerate(self.entries)}

    def numbers(self, text: str) -> Tensor:
        """Split a text into tokens and return their numbers, int32 ``[L]``; unknown tokens get number 0."""
        known = self._known
        numbers = array("i", (known.get(match.group(), 0) for match in _PATTERNS[self.tokens].finditer(text)))
        return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.zeros(0, dtype=torch.int32)

    def text(self, numbers: list[int]) -> str:
        """Return the text of token numbers: characters joined directly, other tokens with spaces."""
        return ("" if self.tokens == "char" else " ").join(self.entries[number] for number in numbers)

    __call__ = text

    def card(self) -> dict[str, Any]:
        """Return its part of ``data.json``, as `from_card` reads it."""
        return {"labels": list(self.entries), "tokens": self.tokens}


def read_vocabulary(card: Mapping[str, Any]) -> Vocabulary | Tokenizer:
    """Return the vocabulary or the tokenizer in ``data.json``; raise KeyError, TypeError or ValueError if damaged."""
    return Tokenizer.from_card(card) if "tokenizer" in card else Vocabulary.from_card(card)


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Options of data sets that learn a vocabulary from their training text, or take a tokenizer.

    Attributes:
        tokens: Kind of tokens, as in `Vocabulary`.
        min_count: Smallest count in the training text of a token with its own number; rarer ones are unknown.
        max_vocabulary: Largest size of the vocabulary, which keeps the most frequent tokens; None for no limit.
        tokenizer: Folder or repository of a tokenizer of transformers, which replaces what the others make.
        download: Whether a tokenizer that is missing in the cache is downloaded; None is no.
    """

    tokens: Tokens = "word"
    min_count: PositiveInt = 2
    max_vocabulary: PositiveInt | None = None
    tokenizer: str | None = None
    download: bool | None = None

    def learn(self, name: str, text: str) -> Vocabulary | Tokenizer:
        """Return the vocabulary of a training text, as `learn` does, or the tokenizer, as `Tokenizer.of` does."""
        if self.tokenizer is not None:
            return Tokenizer.of(self.tokenizer, download=bool(self.download))
        return learn(name, text, self.tokens, self.min_count, self.max_vocabulary)


def learn(name: str, text: str, tokens: Tokens, min_count: int, max_vocabulary: int | None) -> Vocabulary:
    """Return the vocabulary of a training text, with at most ``max_vocabulary`` entries (None for no limit).

    Tokens that occur fewer than ``min_count`` times are `UNKNOWN`. A text without tokens is a DataError.
    """
    counts = Counter(match.group() for match in _PATTERNS[tokens].finditer(text))
    if not counts:
        raise DataError(f"{name}: the text is empty", "check dataset.path, or try dataset=python_docs")
    counts.pop(UNKNOWN, None)
    frequent = (entry for entry, count in counts.items() if count >= min_count)
    ordered = sorted(frequent, key=lambda entry: (-counts[entry], entry))
    return Vocabulary(tokens, (UNKNOWN, *ordered)[:max_vocabulary])


#: Number of batches whose samples are sorted together: more give less padding, fewer give a more random order.
POOL = 50


_BATCHES = 1  # separates the random stream of the order of batches from that of samples


def bucketed_order(lengths: Tensor, batch_size: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """Return the order of samples in an epoch, int64 ``[N]``, with sequences of similar lengths in each batch.

    Samples are shuffled, cut into pools of `POOL` batches, sorted by length within each pool (equal lengths keep the
    shuffled order) and cut into batches. The order of batches is shuffled too, except that a short batch stays last.
    Without ``shuffle`` the order is shuffled as well, but the same for any seed and epoch: an evaluation shows samples
    of its first batch, which would otherwise be the shortest ones. Batch b consists of the indices at
    ``b * batch_size`` to ``(b + 1) * batch_size - 1``.
    """
    if not shuffle:
        seed = epoch = 0
    shuffled = permutation(len(lengths), seed, epoch)
    pools = [pool[torch.argsort(lengths[pool], stable=True)] for pool in torch.split(shuffled, POOL * batch_size)]
    batches = [batch for pool in pools for batch in torch.split(pool, batch_size)]
    whole = [batch for batch in batches if len(batch) == batch_size]
    rest = [batch for batch in batches if len(batch) < batch_size]
    order = permutation(len(whole), mix(seed, _BATCHES), epoch).tolist()
    return torch.cat([*(whole[position] for position in order), *rest])


class RaggedTokens:
    """Token sequences of different lengths, at least one token each, stored in one tensor without padding."""

    def __init__(self, rows: Sequence[Sequence[int]], padding: int = PAD) -> None:
        self.padding = padding
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._numbers = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        self._starts = self.lengths.cumsum(0) - self.lengths

    def padded(self, indices: Tensor) -> Tensor:
        """Return selected sequences as a table, padded at the end, int64 ``[len(indices), longest]``."""
        lengths = self.lengths[indices]
        places = torch.arange(int(lengths.max()))
        there = places < lengths[:, None]
        # Padding of the last sequence would be read beyond the end.
        numbers = self._numbers[torch.where(there, self._starts[indices][:, None] + places, 0)].long()
        return numbers.masked_fill(~there, self.padding)
