"""Text of the user's own: a file, several, or a folder, with or without files for validation and test."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from mptrain.errors import DataError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.language.language_dataset import Choices, TextDataset, windows_of
from mptrain.workloads.language.text_partition import divide, joined
from mptrain.workloads.text.reading import read_file
from mptrain.workloads.text.tokens import Tokens

#: Names of text files in a folder end so; WikiText (Merity et al., 2016) has the second.
SUFFIXES = (".txt", ".tokens")

#: The word in a file's name that says which part of the data it is, as in ``wiki.valid.tokens``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}

_HINT = "set dataset.path to a file, a list of files, a pattern or a folder; dataset=python_docs needs no files"


def load_text(
    *,
    path: Path | tuple[Path, ...] = Path("data/text"),
    name: str = "text",
    tokens: Tokens = "word",
    sequence_length: PositiveInt = 128,
    stream: bool = True,
    min_count: PositiveInt = 2,
    max_vocabulary: PositiveInt | None = None,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    on_error: OnError = "stop",
    batch_size: PositiveInt = 32,
) -> TextDataset:
    """Read UTF-8 text.

    In a folder, all files that end in `SUFFIXES` are read, in the order of their names. Where one of them says in its
    name that it is for training, the others count only as what they say they are; where none does, all are divided.
    A part that has no file of its own is cut off the end of the training text, and has the share of it that is asked
    for.

    Args:
        path: A file, a pattern (``data/*.txt``), a folder, or a list of such.
        name: What to call the data set in records.
        tokens: ``word``: words, numbers and punctuation marks, the same mark several times over being one;
            ``char``: characters; ``space``: what stands between spaces, and line ends.
        sequence_length: Tokens of a sample.
        stream: Each batch continues the one before, for networks that carry state; False makes samples independent.
        min_count: Tokens that occur less often in the training text are all the same unknown one.
        max_vocabulary: At most so many tokens have numbers, the most frequent; None for no limit.
        val_share: Share of the text held out for validation, where no file is for it.
        test_share: Share of the text to test on, where no file is for it.
        train_samples: Train on so many samples only; None trains on all.
        on_error: What to do about lines that are not UTF-8.
        batch_size: Of the run: how many places of the text are read at a time.

    Raises:
        DataError: A file is missing or cannot be read, or there is no text.
        ConfigError: The text is too short for what is asked.
    """
    choices = Choices(
        tokens, sequence_length, stream, min_count, max_vocabulary, val_share, test_share, train_samples, batch_size
    )
    faults: dict[str, Faults] = {}
    documents: dict[str, list[str]] = {}
    found = find_files(name, (path,) if isinstance(path, Path) else path)
    for part, files in found.items():
        faults[part] = Faults(on_error)
        documents[part] = [read_file(file, faults[part]) for file in files]
        if not any(text and not text.isspace() for text in documents[part]):
            more = f", nor in {len(files) - 1} more" if len(files) > 1 else ""
            raise DataError(f"{name}: there is no text in {files[0]}{more}", _HINT)
    cut = divide(
        documents.pop("train"),
        0 if "val" in documents else val_share,
        0 if "test" in documents else test_share,
    )
    dataset = windows_of(name, {**cut, **{part: joined(texts) for part, texts in documents.items()}}, choices, faults)
    dataset.files = {part: [str(file.absolute()) for file in files] for part, files in found.items()}
    return dataset


def find_files(name: str, paths: tuple[Path, ...]) -> dict[str, list[Path]]:
    """The files of ``train``, and of ``val`` and ``test`` where there are any.

    Raises:
        DataError: A path leads to nothing.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        place = path.expanduser()
        if place == Path():  # what an empty text becomes, such as that of a shell's variable without a value
            raise DataError(f"{name} not found: dataset.path is empty, or the present folder", f"{_HINT}; ./ is $PWD")
        if place.is_dir():
            inside = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        elif place.exists():
            inside = [place]
        else:
            inside = [file for file in map(Path, sorted(glob.glob(str(place), recursive=True))) if file.is_file()]  # noqa: PTH207
        if not inside:
            what = f"no file in {place} ends in {' or '.join(SUFFIXES)}" if place.is_dir() else f"looked for {place}"
            raise DataError(f"{name} not found: {what}", _HINT)
        for file in inside:
            found.setdefault(_part_of(file), []).append(file)
    if "train" in found:
        found.pop("", None)
        return found
    if "" not in found:
        there = ", ".join(str(file) for files in found.values() for file in files[:1])
        raise DataError(
            f"{name}: there is {there}, but no file to train on", "name it train.txt, or give it by its path"
        )
    return {"train": [file for files in found.values() for file in files]}


def _part_of(file: Path) -> str:
    """The part of the data that a file's name says it is; empty where it says nothing."""
    words = re.split(r"[^a-z]+", file.name.lower())
    return next((_PARTS[word] for word in words if word in _PARTS), "")
