"""What a run exhibited: the newest pictures, texts and recordings of its folder of samples."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Final

from mptrain.files import read_bytes, read_text
from mptrain.report.page import Block, Cell, Picture, Sound, Text, table
from mptrain.runlog.layout import CAPTIONS
from mptrain.runlog.reader import Run

#: Bytes of a file that is put into a page at most.
MOST_BYTES: Final = 3_000_000

#: Rows of a table of texts, and recordings of a kind, at most.
_MOST: Final = 24

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_WAV: Final = b"RIFF"


def exhibits(run: Run, *, over: str = "", most_bytes: int = MOST_BYTES) -> list[Block]:
    """The newest file of each kind, pictures first, then texts and recordings; what is damaged or too large is left out.

    Recordings are in the order of their numbers, so that those which belong together stand beside each other.

    Args:
        run: Whose.
        over: The folder of the run as the report sees it, ending with a slash; empty for its own report.
        most_bytes: Of one file.
    """
    blocks: list[Block] = []
    captions = _captions(run.paths.samples)
    for suffix in (".png", ".tsv", ".wav"):
        newest: dict[str, Path] = {}
        try:
            for path in sorted(run.paths.samples.glob(f"*{suffix}"), key=_kind_and_step):
                newest[_kind_and_step(path)[0]] = path
            kinds = sorted(newest, key=_number_and_name) if suffix == ".wav" else list(newest)
            found = [
                (newest[kind], read_bytes(newest[kind]), captions.get(kind, ""))
                for kind in kinds
                if newest[kind].stat().st_size <= most_bytes
            ]
        except OSError:
            continue
        for path, data, caption in found[:_MOST]:
            blocks += _block(path, f"{over}{run.paths.samples.name}/{path.name}", data, caption)
    return blocks


def _block(path: Path, file: str, data: bytes, caption: str) -> list[Block]:
    words = ". ".join(filter(None, (_what(path), caption)))
    if path.suffix == ".png" and data.startswith(_PNG):
        return [Picture(file, words, data)]
    if path.suffix == ".wav" and data.startswith(_WAV):
        return [Sound(file, words, data)]
    if path.suffix == ".tsv":
        try:
            rows = list(csv.reader(io.StringIO(data.decode(errors="replace"), newline=""), dialect="excel-tab"))
        except csv.Error:
            return []
        if rows and rows[0]:
            width = len(rows[0])
            body: list[list[Cell | str]] = [
                list[Cell | str]([*row, *[""] * width][:width]) for row in rows[1 : _MOST + 1]
            ]
            return [Text(f"{_what(path)}:"), table(tuple(rows[0]), body)]
    return []


def _kind_and_step(path: Path) -> tuple[str, int]:
    """``("samples", 60)`` of ``samples-000060.png``; other files are of a kind of their own."""
    name, _, step = path.stem.rpartition("-")
    return (name, int(step)) if name and step.isdecimal() else (path.stem, 0)


def _number_and_name(kind: str) -> tuple[int, str]:
    """``(2, "drawn")`` of ``drawn-2``."""
    name, _, number = kind.rpartition("-")
    return (int(number), name) if name and number.isdecimal() else (0, kind)


def _captions(samples: Path) -> dict[str, str]:
    """What the samples are, by kind; empty where nothing is said, or it cannot be read."""
    try:
        found = json.loads(read_text(samples / CAPTIONS))
    except (OSError, ValueError, RecursionError):
        return {}
    return {kind: text for kind, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _what(path: Path) -> str:
    """``samples-000060.png`` in words."""
    name, _, step = path.stem.rpartition("-")
    return f"{name} after step {int(step):,}" if name and step.isdecimal() else path.stem
