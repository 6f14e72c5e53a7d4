"""The pages of the documentation, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np

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


def write_logs(folder: Path) -> None:
    """Write what docs/compare-logs.md compares: logs of five runs of each of three arms."""
    draws = np.random.default_rng(1)
    folder.mkdir()
    for arm, level in (("bf16", 3.30), ("fp8", 3.302), ("fp16", 3.34)):
        for seed in range(5):
            end = level + draws.normal(0, 0.003)
            rows = [(at, end + 2 * np.exp(-at / 150) + draws.normal(0, 0.001)) for at in range(0, 1001, 50)]
            text = "".join(f"{at},{loss:.5f}\n" for at, loss in rows)
            (folder / f"{arm}-{seed}.csv").write_text(f"step,loss\n{text}")
