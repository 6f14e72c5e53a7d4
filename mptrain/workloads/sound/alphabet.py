"""Alphabets that number the letters of transcripts; 0 is the blank of connectionist temporal classification (CTC)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from mptrain.system.errors import ConfigError

#: English lower-case letters; with the blank these are the 29 outputs of Deep Speech 2.
ENGLISH = "abcdefghijklmnopqrstuvwxyz' "

#: Label of the blank.
BLANK = "<blank>"

_DIGITS = dict(
    zip("0123456789", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)


@dataclass(frozen=True)
class Alphabet:
    """Letters of transcripts, numbered from 1 in the given order; number 0 is the CTC blank, or "no letter".

    ``len()`` counts the blank too, so it is the number of outputs of a network. ConfigError is raised if there is no
    letter, or one occurs twice.
    """

    letters: str = ENGLISH

    def __post_init__(self) -> None:
        if not self.letters or len(set(self.letters)) < len(self.letters):
            what = "has a letter twice" if self.letters else "is empty"
            raise ConfigError(f"dataset.alphabet={self.letters!r} {what}", f"the English one is {ENGLISH!r}")

    def __len__(self) -> int:
        return len(self.letters) + 1

    def spelled(self, text: str) -> str:
        """Normalise a transcript to the letters of the alphabet: ``Press 1, now!`` becomes ``press one now``.

        Capitals become lower case if the alphabet has no capitals. Typographic apostrophes become plain. Single
        digits become English words if the alphabet has no digits. Runs of punctuation and white space become one
        space. Characters of the alphabet stay as they are; letters and symbols outside it stay too, and `problem`
        reports them.
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
        """Return a message with the letters of a `spelled` transcript that the alphabet lacks; empty for none."""
        foreign = sorted(set(text) - set(self.letters))
        return f"its transcript has {' '.join(map(repr, foreign))}, not in dataset.alphabet" if foreign else ""

    def numbers(self, text: str) -> list[int]:
        """Return the number of each letter of a `spelled` transcript, or raise KeyError if the alphabet lacks one."""
        places = {letter: number for number, letter in enumerate(self.letters, start=1)}
        return [places[letter] for letter in text]

    def known_numbers(self, text: str) -> tuple[int, ...]:
        """Normalise any text with `spelled` and return its letter numbers; letters not in the alphabet are left out."""
        return tuple(self.numbers("".join(letter for letter in self.spelled(text) if letter in self.letters)))

    def text(self, numbers: Sequence[int]) -> str:
        """Return the transcript that letter numbers spell; blanks (0) are left out, and repeated letters stay."""
        return "".join(self.letters[number - 1] for number in numbers if number > 0)

    def labels(self) -> list[str]:
        """Return the label of each number: `BLANK` for 0, then the letters."""
        return [BLANK, *self.letters]
