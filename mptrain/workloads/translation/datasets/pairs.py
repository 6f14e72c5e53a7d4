"""Data set ``pairs``: sentence pairs of the user, lines of tab-separated columns, in a file or a folder."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from mptrain.system.errors import ConfigError, DataError
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.data_files import Faults, OnError
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.text.reading import decoded, find_parts, read_content
from mptrain.workloads.translation.pair_dataset import Pair, PairDataset, PairOptions, pairs_as_dataset, tidied

SUFFIXES = (".tsv", ".txt")

_HINT = "set dataset.path to a tab-separated file, or to a folder of such files; dataset=number_words needs no files"


@dataclass(frozen=True, kw_only=True)
class PairFileOptions(PairOptions):
    """Options of the data set ``pairs``, tab-separated files of the user, besides those of `PairOptions`.

    ``columns`` are counted from 1; ``on_error`` is for lines that are not UTF-8 or lack a column.
    """

    path: Path = Path("data/pairs.tsv")
    name: str = "pairs"
    columns: tuple[PositiveInt, PositiveInt] = (1, 2)
    on_error: OnError = "stop"


@takes_fields_of(PairFileOptions)
def load_pairs(options: PairFileOptions) -> PairDataset:
    """Read sentence pairs of the user from UTF-8 lines of tab-separated columns, without quoting.

    Empty lines are ignored. A folder has files with `SUFFIXES` for training, validation and test, recognised by words
    in their names such as ``train.tsv``. If no name has such a word, the pairs of all files are divided into the three
    parts. A part without a file gets a share of the training pairs.

    Raises:
        EnvironmentRefused: sentencepiece is not installed.
        DataError: A file is missing or cannot be read, a line is unusable, or no file is for training.
        ConfigError: There are too few pairs for the options, or the columns are the same.
    """
    name, columns = options.name, options.columns
    if columns[0] == columns[1]:
        raise ConfigError(f"dataset.columns: {columns[0]} cannot be both languages", "set dataset.columns=[1,2]")
    part_files = find_parts(name, options.path, SUFFIXES, _HINT)
    faults = {part: Faults(options.on_error) for part in part_files}
    read = {
        part: [pair for file in files for pair in read_pairs(file, columns, faults[part])]
        for part, files in part_files.items()
    }
    if not read["train"]:
        raise DataError(f"{name}: {part_files['train'][0]} has no pairs{faults['train'].first()}", _HINT)
    return pairs_as_dataset(name, read, options, faults, part_files)


def read_pairs(file: Path, columns: tuple[int, int], faults: Faults) -> list[Pair]:
    """Return the sentence pairs of a file, in its order, without unusable lines, which ``faults`` records.

    DataError is raised if the file cannot be read or has no tab at all, or a line is unusable and ``faults.on_error``
    is ``stop``.
    """
    lines = read_content(file).split(b"\n")
    pairs: list[Pair] = []
    problems: dict[str, str] = {}
    filled = [line for line in lines if line.strip(b" \r")]
    if filled and not any(b"\t" in line for line in filled):
        raise DataError(
            f"{file}: no line has a tab",
            "separate the columns of each line by a tab; move files without pairs elsewhere",
        )
    for number, text in decoded(file, lines, problems):
        if not text.strip(" \r"):
            continue
        pair = _pair_in(text.rstrip("\r"), columns)
        if isinstance(pair, Pair):
            pairs.append(pair)
        else:
            problems[f"{file} line {number}"] = pair
    faults.report(problems)
    return pairs


def _pair_in(line: str, columns: tuple[int, int]) -> Pair | str:
    """Return the pair of a line, or a description of what is wrong with it."""
    cells = line.split("\t")
    if len(cells) < max(columns):
        return (
            f"{len(cells)} column{'s' if len(cells) > 1 else ''} between tabs, but dataset.columns has {max(columns)}"
        )
    apart = len(cells) > max(columns)
    if apart and any(
        cell[:1] == '"' != cell[-1:] and two[-1:] == '"' != two[:1] for cell, two in itertools.pairwise(cells)
    ):
        return "a tab stands within quotes, and every tab ends a column: quotes around cells mean nothing here"
    source, target = (tidied(cells[column - 1]) for column in columns)
    if not source or not target:
        return f"column {columns[1] if source else columns[0]} is empty"
    return Pair(source, target)
