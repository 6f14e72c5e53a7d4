"""Splits a bash line as far as it is typed, and says which part of its last word readline will replace."""

from __future__ import annotations

from dataclasses import dataclass, field

_ESCAPED = frozenset(" \t\n\\'\"`$&|;<>()[]{}*?!#")


@dataclass
class Line:
    """A command line up to the cursor.

    Attributes:
        words: The words before the one at the cursor, without quotes.
        current: The word at the cursor, without quotes; empty after a blank.
        kept: How many characters of it readline leaves where they are; it replaces the rest.
        quote: The quote that is open at the cursor, or nothing.
    """

    words: list[str] = field(default_factory=list)
    current: str = ""
    kept: int = 0
    quote: str = ""


def split(text: str, breaks: str) -> Line:
    """The words of a line.

    Args:
        text: The line up to the cursor; quotes may be open.
        breaks: The characters at which readline begins a new word, ``COMP_WORDBREAKS``.
    """
    line = Line()
    inside = False  # of a word, which may be an empty one in quotes
    letters = iter(text)
    for letter in letters:
        if line.quote:
            if letter == line.quote:
                line.quote, line.kept = "", len(line.current)
            elif letter == "\\" and line.quote == '"':
                line.current += next(letters, "")
            else:
                line.current += letter
        elif letter in "'\"":
            line.quote, line.kept, inside = letter, len(line.current), True
        elif letter in " \t\n":
            if inside:
                line.words.append(line.current)
            line.current, line.kept, inside = "", 0, False
        else:
            inside = True
            line.current += next(letters, "") if letter == "\\" else letter
            if letter in breaks:
                line.kept = len(line.current)
    return line


def escaped(text: str, quote: str) -> str:
    """A word as it is typed: inside an open quote as it is, else with a backslash before what the shell would read."""
    if quote:
        return text
    return "".join(f"\\{letter}" if letter in _ESCAPED else letter for letter in text)
