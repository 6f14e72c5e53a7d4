"""Subword vocabularies that sentencepiece learns from the training text, and parts of networks for padded sequences.

Text is not normalised, except that white space is collapsed, so that metrics compare the text of the user's file.

Sequences are padded, because packed sequences of torch would need the lengths on the host.
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mptrain.system.errors import ConfigError, DataError, Problem
from mptrain.system.machine import load_extra

#: ``bpe``: byte pair encoding (Sennrich et al. 2016); ``unigram``: the most likely pieces (Kudo 2018); ``char``:
#: characters; ``word``: strings between spaces.
Pieces = Literal["bpe", "unigram", "char", "word"]

#: Token numbers that every vocabulary starts with: padding, unknown character, start and end of a sentence.
PAD, UNKNOWN, BEGIN, END = 0, 1, 2, 3

_LONGEST = 1 << 20  # bytes of the longest sentence to learn from; sentencepiece's default is 4,192


@dataclass(frozen=True)
class Subwords:
    """Vocabulary of subwords, from a serialised sentencepiece model; ``len()`` includes the four special tokens."""

    model: bytes

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    @functools.cached_property
    def _processor(self) -> Any:
        library = load_extra("sentencepiece", "translation", "a vocabulary of subwords")
        return library.SentencePieceProcessor(model_proto=self.model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each text, followed by `END`, as lists of different lengths."""
        encoded: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return [[*numbers, END] for numbers in encoded]

    def decode(self, numbers: list[int]) -> str:
        """Return the text of token numbers up to the first `END`, without special tokens."""
        if END in numbers:
            numbers = numbers[: numbers.index(END)]
        return str(self._processor.decode(numbers))

    def pieces(self) -> list[str]:
        """Return the string of each token in the order of token numbers; ``▁`` stands for a space."""
        return [self._processor.id_to_piece(number) for number in range(len(self))]

    def portable(self) -> str:
        """Return the model as base64 text, for ``SentencePieceProcessor(model_proto=base64.b64decode(text))``."""
        return base64.b64encode(self.model).decode()


def learn(name: str, texts: Sequence[str], pieces: Pieces, vocabulary: int) -> Subwords:
    """Learn a subword vocabulary from the training text only, in one thread and without sampling.

    ``vocabulary`` is the largest size, with the four special tokens; short texts give fewer. EnvironmentRefused is
    raised if sentencepiece is not installed, DataError without text, and ConfigError if the vocabulary is too small for
    the characters of the text, or sentencepiece fails otherwise.
    """
    library = load_extra("sentencepiece", "translation", f"dataset.pieces={pieces}")
    written = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter([text for text in texts if text]),
            model_writer=written,
            model_type=pieces,
            vocab_size=vocabulary,
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            max_sentence_length=_LONGEST,
            num_threads=1,
            minloglevel=2,
            pad_id=PAD,
            unk_id=UNKNOWN,
            bos_id=BEGIN,
            eos_id=END,
        )
    except RuntimeError as error:
        raise _explained(name, vocabulary, str(error)) from error
    return Subwords(written.getvalue())


def _explained(name: str, vocabulary: int, message: str) -> ConfigError | DataError:
    if "sentences_.empty()" in message:
        return DataError(f"{name} has no text to learn a vocabulary from", "choose other data")
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"dataset.vocabulary={vocabulary} is too small for the characters of {name}",
            f"set dataset.vocabulary={needed[1]} or more",
        )
    return ConfigError(f"{name}: sentencepiece cannot learn a vocabulary of {vocabulary}: {message.strip()}")


def reverse_padded(sequence: Tensor, lengths: Tensor) -> Tensor:
    """Reverse each sequence of a padded batch, ``[N, T, C]``, within its own length, int64 ``[N]``.

    Padding stays at the end. The function is its own inverse, and does not synchronise with the device.
    """
    places = torch.arange(sequence.shape[1], device=lengths.device)
    opposite = lengths[:, None] - 1 - places
    order = torch.where(opposite >= 0, opposite, places)
    return sequence.gather(1, order[:, :, None].expand_as(sequence))


def lengths_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a mask of padded sequences, bool ``[N, width]``: true before the end of each."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def problems_of_heads(width: int, heads: int) -> list[Problem]:
    """Return the problem that a number of attention heads does not divide the width of a model, if it does not."""
    if width % heads == 0:
        return []
    what = f"model.width={width} is not a multiple of model.heads={heads}"
    hint = f"set model.width={width // heads * heads + heads}, or a number of heads that divides {width}"
    return [Problem(what, hint)]
