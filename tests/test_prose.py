"""Docstrings, comments and messages of the package are in plain words: the easy part of that, which a program can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import mptrain
from tests.loops import each

PACKAGE = Path(mptrain.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: A docstring says what a thing is or does; these words begin a question or a riddle.
FIRST_WORDS = {"What", "Whether", "How", "Where", "Which", "Who", "When", "Whoever"}

#: Phrases of no other program's documentation, each with what the field says.
PHRASES = {
    r"\bg(o|oes|oing|one|ow)n? on with\b": "resume, or continue with",
    r"\bwhoever\b": "name it: the user, the caller, the reader",
    r"\bstrangers?\b": "untrusted",
    r"\berrands?\b": "job",
    r"\bwhat is done again\b": "repeat",
    r"\bit was told\b": "was given, or was configured",
    r"\bin one's own words\b": "describe",
    r"\bmend(s|ed|ing)?\b": "fix",
}

#: Names that were renamed to terms of the field.
OLD_NAMES = (
    "everyones|side_by_side|take_from_first|first_goes_ahead|agreed_norms|stand_in|AgreedTurns|Ledger|Tally|in_words|"
    "ReplayedMoment|stalled_after"
)


def texts(source: str) -> list[tuple[int, str]]:
    """Return line and text of all comments and string literals of a source, docstrings among them."""
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


def docstrings(source: str) -> list[tuple[int, str]]:
    """Return line and text of all docstrings of a source."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, holders)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def faults(source: str) -> list[str]:
    """Return what is wrong with the words of a source, a line each."""
    found = [
        f"line {line}: a docstring begins with {text.split()[0]}: begin with what it is or does"
        for line, text in docstrings(source)
        if text.split()[0] in FIRST_WORDS
    ]
    for line, text in texts(source):
        found += [
            f"line {line}: '{match[0]}': write {better}"
            for phrase, better in PHRASES.items()
            for match in re.finditer(phrase, text, re.IGNORECASE)
        ]
        found += [f"line {line}: {match[0]} is an old name" for match in re.finditer(rf"\b({OLD_NAMES})\b", text)]
    return found


@each("path", SOURCES)
def test_words_are_those_of_the_field(path):
    assert not faults(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE)


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""\n',
        "def f():\n    '''Whether it is.'''\n",
        "# the run goes on with step 3\n",
        "x = 'whoever started it'\n",
        "raise ValueError(f'{x} gone on with')\n",
        "# mends it\n",
        "# a Tally of steps\n",
    ],
)
def test_each_kind_is_found(source):
    assert len(faults(source)) == 1


def test_plain_words_pass():
    assert faults('"""Return the run directory of a name."""\nwhat = "resumed from step 3"  # fixed\n') == []
