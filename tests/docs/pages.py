"""The pages of the documentation, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Each page by its path below the root of the repository.
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        *(path.name for path in sorted(ROOT.glob("*.md"))),
        "mptrain/README.md",
        "examples/README.md",
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    )
}


def blocks(name: str) -> list[str]:
    """Return the blocks of a page that show a terminal."""
    return re.findall(r"```console\n(.*?)```", PAGES[name], flags=re.DOTALL)


def commands(name: str) -> list[list[str]]:
    """Return the words of all commands that a page shows, in their order, without comments."""
    lines = [line[2:] for block in blocks(name) for line in block.splitlines() if line.startswith("$ ")]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] if words[0] == "PYTHONPATH=." else words for words in found]
