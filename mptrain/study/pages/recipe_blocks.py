"""Blocks of a recipe's report: its claim, its expectations with their numbers, and the verdict.

A recipe is a published claim with the runs and the expected results that test it. The blocks show the content of
``verdict.json`` in a recipe's folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mptrain.numerics.words import counted
from mptrain.report.page import Block, Cell, Text, Tone, facts, table
from mptrain.runlog.strict_json import read_object, restore_nonfinite
from mptrain.runlog.sweeps import SCHEMA, SweepPaths
from mptrain.system.errors import StorageError

_TONES: Final[dict[str, Tone]] = {
    "REPRODUCED": "good",
    "NOT REPRODUCED": "bad",
    "met": "good",
    "not met": "bad",
    "undecided": "warn",
}


@dataclass(frozen=True)
class SavedVerdict:
    """Content of a recipe's ``verdict.json``; empty if there is none, or with a problem if it cannot be read."""

    fields: Mapping[str, Any]
    problem: str = ""

    @property
    def verdict(self) -> Cell | None:
        """The verdict, ``REPRODUCED`` or ``NOT REPRODUCED``, and with which overrides; None if there is none yet."""
        word = str(self.fields.get("verdict") or "")
        changed = f" with {shlex.join(self.words)}" if self.words else ""
        return Cell(f"{word}{changed}", _TONES.get(word, "warn")) if word else None

    @property
    def words(self) -> list[str]:
        """The user's overrides of every run."""
        words = self.fields.get("words")
        return [str(word) for word in words] if isinstance(words, list) else []

    @property
    def title(self) -> str:
        """Title of the recipe, or its name if it has no title; empty if neither is recorded."""
        return str(self.fields.get("title") or self.fields.get("recipe") or "")


def read_verdict(folder: Path) -> SavedVerdict:
    """Read the verdict on a recipe from its folder. The result is empty if there is none yet, or it is damaged.

    The folder may be that of any comparison, which has no verdict.
    """
    path = SweepPaths(folder).verdict
    try:
        if not path.exists():
            return SavedVerdict({})
        return SavedVerdict(restore_nonfinite(read_object(path, SCHEMA)))
    except StorageError as error:
        return SavedVerdict({}, str(error))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return SavedVerdict({}, f"{path} is damaged: its list of non-finite numbers is invalid")


def expectations_in_words(found: SavedVerdict) -> str:
    """Return the number of a recipe's expectations met, not met and undecided in words; empty if none is judged."""
    outcomes = [str(one.get("outcome")) for one in _expectations(found)]
    if not outcomes or not found.verdict:
        return ""
    parts = [f"{outcomes.count('met')} of {counted(len(outcomes), 'expectation')} met"]
    parts += [f"{outcomes.count(word)} {word}" for word in ("not met", "undecided") if word in outcomes]
    return ", ".join(parts) + "."


def _expectations(found: SavedVerdict) -> list[Mapping[str, Any]]:
    listed = found.fields.get("expectations")
    return [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []


def claim_blocks(found: SavedVerdict) -> list[Block]:
    """Return the part of a recipe's report on its claim: claim and source, table of expectations."""
    fields = found.fields
    rows: list[list[Cell | str]] = []
    for one in _expectations(found):
        outcome = str(one.get("outcome") or "undecided")
        rows.append([str(one.get("text") or ""), Cell(outcome, _TONES.get(outcome, "")), str(one.get("numbers") or "")])
    return [
        facts(("claim", str(fields.get("claim") or "")), ("source", str(fields.get("source") or ""))),
        *([Text(found.problem, "warn")] if found.problem else []),
        table(("expectation", "outcome", "numbers"), rows),
    ]
