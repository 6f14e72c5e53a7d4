"""Data set ``text``: one or several text files of the user, optionally with files for validation and test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.language.language_dataset import TextDataset, TextOptions, divide, joined, windows_of
from mptrain.workloads.text.reading import find_parts, read_file

#: Suffixes of text files in a folder; WikiText (Merity et al., 2016) has the second.
SUFFIXES = (".txt", ".tokens")

_HINT = "set dataset.path to a file, a list of files, a pattern or a folder; dataset=python_docs needs no files"


@dataclass(frozen=True, kw_only=True)
class TextFileOptions(TextOptions):
    """Options of the data set ``text``, text files of the user, besides those of `TextOptions`.

    Attributes:
        path: A file, a pattern (``data/*.txt``), a folder, or a list of these.
        on_error: ``stop`` or ``skip`` for lines that are not UTF-8.
    """

    path: Path | tuple[Path, ...] = Path("data/text")
    name: str = "text"
    on_error: OnError = "stop"


@takes_fields_of(TextFileOptions)
def load_text(options: TextFileOptions) -> TextDataset:
    """Read UTF-8 text files of the user, and cut their text into windows for language modelling.

    In a folder, the files with `SUFFIXES` are read in the order of their names. If the name of a file marks it as
    training text, each other file counts only for the part that its own name gives. If no name marks a part, all files
    are divided. A part without a file of its own is cut off the end of the training text, with its share. DataError is
    raised if a file is missing or cannot be read, or there is no text; ConfigError if it is too short for the options.
    """
    name = options.name
    part_files = find_parts(name, options.path, SUFFIXES, _HINT, subfolders=True)
    faults = {part: Faults(options.on_error) for part in part_files}
    documents: dict[str, list[str]] = {}
    for part, files in part_files.items():
        documents[part] = [read_file(file, faults[part]) for file in files]
        if not any(text and not text.isspace() for text in documents[part]):
            more = f", nor in {len(files) - 1} more" if len(files) > 1 else ""
            raise DataError(f"{name}: there is no text in {files[0]}{more}", _HINT)
    shares = options.shares(documents)
    cut = divide(documents.pop("train"), shares["val"], shares["test"])
    parts = {**cut, **{part: joined(texts) for part, texts in documents.items()}}
    return windows_of(name, parts, options, faults, part_files)
