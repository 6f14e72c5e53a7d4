"""From text to numbers: what a token is, and which tokens have a number of their own.

A vocabulary is learned from training text alone. Knows nothing of files, splits or windows.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mptrain.errors import DataError

Tokens = Literal["word", "char", "space"]

#: The entry, always number 0, that stands for every token without a number; text prepared by others may contain it.
UNKNOWN = "<unk>"

_PATTERNS: dict[Tokens, re.Pattern[str]] = {
    "word": re.compile(rf"{UNKNOWN}|\w+|([^\w\s])\1*"),  # words and numbers, punctuation marks, lines drawn of them
    "char": re.compile(r"[\s\S]"),
    "space": re.compile(r"\S+|\n"),  # what stands between spaces, and line ends: for text that was cut up before
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that have numbers; their numbers are their places.

    Attributes:
        tokens: What a token is.
        entries: `UNKNOWN`, then the others, the most frequent first and equally frequent ones by alphabet.
    """

    tokens: Tokens
    entries: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.entries)

    def numbers(self, text: str) -> Tensor:
        """The numbers of a text's tokens, int32 ``[L]``."""
        known = {entry: number for number, entry in enumerate(self.entries)}
        found = array("i", (known.get(match.group(), 0) for match in _PATTERNS[self.tokens].finditer(text)))
        return torch.frombuffer(found, dtype=torch.int32) if found else torch.zeros(0, dtype=torch.int32)

    def text(self, numbers: list[int]) -> str:
        """Numbers as text again: characters as they are, other tokens with spaces between them."""
        return ("" if self.tokens == "char" else " ").join(self.entries[number] for number in numbers)


def learn(name: str, text: str, tokens: Tokens, min_count: int, max_vocabulary: int | None) -> Vocabulary:
    """The vocabulary of a training text.

    Args:
        name: What to call the text in messages.
        text: The training text, and no other.
        tokens: What a token is.
        min_count: Rarer tokens become `UNKNOWN`.
        max_vocabulary: At most so many entries, `UNKNOWN` among them; None for no limit.

    Raises:
        DataError: The text holds no token at all.
    """
    counts = Counter(match.group() for match in _PATTERNS[tokens].finditer(text))
    if not counts:
        raise DataError(f"{name}: there is no text in it", "check dataset.path, or try dataset=python_docs")
    counts.pop(UNKNOWN, None)
    frequent = (entry for entry, count in counts.items() if count >= min_count)
    ordered = sorted(frequent, key=lambda entry: (-counts[entry], entry))
    return Vocabulary(tokens, (UNKNOWN, *ordered)[:max_vocabulary])
