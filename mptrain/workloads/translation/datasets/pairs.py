"""Sentence pairs of the user's own: lines of tab-separated columns, in a file or a folder."""

from __future__ import annotations

import re
from pathlib import Path

from mptrain.errors import ConfigError, DataError
from mptrain.fields import BelowOneOrZero, PositiveInt
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.text.subwords import Pieces
from mptrain.workloads.translation.pair_dataset import Choices, PairDataset, pairs_as_dataset
from mptrain.workloads.translation.pair_partition import Pair, distinct, divide_pairs, tidied

SUFFIXES = (".tsv", ".txt")

#: Words in a file's name that say which part of the data it is, as in ``valid.tsv``.
_PARTS = {"train": "train", "valid": "val", "validation": "val", "val": "val", "dev": "val", "test": "test"}

_HINT = "set dataset.path to a file of tab-separated lines, or to a folder of such; dataset=number_words needs no files"


def load_pairs(
    *,
    path: Path = Path("data/pairs.tsv"),
    name: str = "pairs",
    columns: tuple[PositiveInt, PositiveInt] = (1, 2),
    pieces: Pieces = "bpe",
    vocabulary: PositiveInt = 4000,
    target_vocabulary: PositiveInt | None = None,
    shared: bool = False,
    max_tokens: PositiveInt = 100,
    val_share: BelowOneOrZero = 0.1,
    test_share: BelowOneOrZero = 0.1,
    train_samples: PositiveInt | None = None,
    on_error: OnError = "stop",
    batch_size: PositiveInt = 32,
) -> PairDataset:
    """Read UTF-8 lines of columns with a tab between them; nothing is quoted, and empty lines count for nothing.

    In a folder, files that end in `SUFFIXES` and say in their names that they are for training, validation or test are
    those parts, as they are; where none says so, all are divided. A part without a file gets a share of the training pairs.
    A pair that a part has several times is taken once, and its repetitions are counted.

    Args:
        path: A file or a folder.
        name: What to call the data set in records.
        columns: Which column is translated from and which into, from 1.
        pieces: What a token is.
        vocabulary: Tokens of the source language, or of both where they are shared.
        target_vocabulary: Tokens of the target language; None for as many.
        shared: One vocabulary for both languages.
        max_tokens: Pairs with more on a side are left out.
        val_share: Share of the source sentences for validation, where no file is for it.
        test_share: Share of the source sentences to test on, where no file is for it.
        train_samples: Train on so many pairs only; None trains on all.
        on_error: What to do about lines that are not UTF-8 or lack a side.
        batch_size: Of the run.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: A file is missing or cannot be read, or a line cannot be used.
        ConfigError: There are too few pairs for what is asked, or the columns are the same.
    """
    if columns[0] == columns[1]:
        raise ConfigError(f"dataset.columns: {columns[0]} cannot be both languages", "write dataset.columns=[1,2]")
    found = _find(name, path)
    faults = {part: Faults(on_error) for part in found}
    read = {
        part: [pair for file in files for pair in read_pairs(file, columns, faults[part])]
        for part, files in found.items()
    }
    given = {part: distinct(pairs) for part, pairs in read.items()}
    shares = (0.0 if "val" in given else val_share, 0.0 if "test" in given else test_share)
    if not given["train"]:
        raise DataError(f"{name}: {found['train'][0]} has no pairs", _HINT)
    parts = {
        **divide_pairs(given["train"], *shares),
        **{part: pairs for part, pairs in given.items() if part != "train"},
    }
    choices = Choices(pieces, vocabulary, target_vocabulary, shared, max_tokens, train_samples, batch_size)
    dataset = pairs_as_dataset(name, parts, choices, faults)
    dataset.repeated = sum(len(pairs) - len(given[part]) for part, pairs in read.items())
    dataset.files = {part: [str(file.absolute()) for file in files] for part, files in found.items()}
    return dataset


def _find(name: str, path: Path) -> dict[str, list[Path]]:
    """The files of ``train``, and of ``val`` and ``test`` where there are any."""
    place = path.expanduser()
    if place == Path():
        raise DataError(f"{name} not found: dataset.path is empty, or the present folder", f"{_HINT}; ./ is $PWD")
    if not place.exists():
        raise DataError(f"{name} not found: looked for {place}", _HINT)
    if place.is_file():
        return {"train": [place]}
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"{name} not found: no file in {place} ends in {' or '.join(SUFFIXES)}", _HINT)
    found: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.name.lower())
        found.setdefault(next((_PARTS[word] for word in words if word in _PARTS), ""), []).append(file)
    if "train" in found:
        found.pop("", None)
    elif "" in found:
        found = {"train": files}
    else:
        raise DataError(f"{name}: there is {files[0]}, but no file to train on", "name it train.tsv")
    return found


def read_pairs(file: Path, columns: tuple[int, int], faults: Faults) -> list[Pair]:
    """The pairs of one file, in its order.

    Args:
        file: Where.
        columns: Which are the two sides, from 1.
        faults: Takes the lines that cannot be used; they are left out.

    Raises:
        DataError: The file cannot be read or has no tab at all, or a line of it cannot be used and ``faults`` says stop.
    """
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}", "check its permissions") from error
    pairs: list[Pair] = []
    problems: dict[str, str] = {}
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip(b" \r")]
    if filled and not any(b"\t" in line for _, line in filled):
        raise DataError(
            f"{file}: no line has a tab: is it separated by something else?",
            "write a tab between the columns of each line; a file without pairs belongs elsewhere",
        )
    for number, line in filled:
        pair = _pair_in(line.rstrip(b"\r"), columns)
        if isinstance(pair, Pair):
            pairs.append(pair)
        else:
            problems[f"{file} line {number}"] = pair
    faults.report(problems)
    return pairs


def _pair_in(line: bytes, columns: tuple[int, int]) -> Pair | str:
    """The pair of a line, or what is wrong with it."""
    try:
        cells = line.decode().split("\t")
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not UTF-8"
    if len(cells) < max(columns):
        return (
            f"{len(cells)} column{'s' if len(cells) > 1 else ''} between tabs, but column {max(columns)} is asked for"
        )
    source, target = (tidied(cells[column - 1]) for column in columns)
    if not source or not target:
        return f"column {columns[1] if source else columns[0]} is empty"
    return Pair(source, target)
