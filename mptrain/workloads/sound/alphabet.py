"""The letters of transcripts and their numbers, of which 0 is the blank of connectionist temporal classification."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from mptrain.errors import ConfigError

#: English in small letters: with the blank these are the 29 outputs of Deep Speech 2.
ENGLISH = "abcdefghijklmnopqrstuvwxyz' "

#: What the list of labels calls the blank.
BLANK = "<blank>"

_DIGITS = dict(
    zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)


@dataclass(frozen=True)
class Alphabet:
    """Letters in the order of their numbers, the first of which is 1.

    Attributes:
        letters: All of them, the space between words included.

    Raises:
        ConfigError: There is none, or one is there twice.
    """

    letters: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.letters or len(set(self.letters)) < len(self.letters):
            what = "has a letter twice" if self.letters else "is empty"
            raise ConfigError(f"dataset.alphabet={self.letters!r} {what}", f"the English one is {ENGLISH!r}")

    def __len__(self) -> int:
        """How many numbers there are, the blank included."""
        return len(self.letters) + 1

    def spelled(self, text: str) -> str:
        """A transcript as the alphabet can write it.

        Capitals become small letters where the alphabet has none, typographic apostrophes plain ones, digits that stand
        alone words, and punctuation and white space a single space between words: as far as these are not letters themselves.
        """
        known = set(self.letters)
        if not any(letter.isupper() for letter in self.letters):
            text = text.lower()
        words = text.replace("\u2019", "'").split()
        spoken = [_DIGITS.get(word.strip(".,;:!?"), word) if not known & set("0123456789") else word for word in words]
        plain = (
            letter if letter in known or unicodedata.category(letter)[0] not in "PZ" else " "
            for letter in " ".join(spoken)
        )
        return " ".join("".join(plain).split())

    def problem(self, text: str) -> str:
        """What is wrong with a spelled transcript: the letters that the alphabet lacks; empty for none."""
        foreign = sorted(set(text) - set(self.letters))
        return f"its transcript has {' '.join(map(repr, foreign))}, not in dataset.alphabet" if foreign else ""

    def numbers(self, text: str) -> list[int]:
        """The number of each letter of a spelled transcript."""
        places = {letter: number for number, letter in enumerate(self.letters, start=1)}
        return [places[letter] for letter in text]

    def known_numbers(self, text: str) -> tuple[int, ...]:
        """The numbers of any text's letters; what the alphabet cannot write is left out."""
        return tuple(self.numbers("".join(letter for letter in self.spelled(text) if letter in self.letters)))

    def text(self, numbers: Sequence[int]) -> str:
        """The transcript with these numbers; blanks say nothing."""
        return "".join(self.letters[number - 1] for number in numbers if number > 0)

    def labels(self) -> list[str]:
        """A name for each number."""
        return [BLANK, *self.letters]
