"""Data set ``labelled_text``: labelled texts of the user, in TSV, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptrain.system.errors import DataError
from mptrain.workloads.base.data_files import Faults, OnError, composed
from mptrain.workloads.base.dataset import takes_fields_of
from mptrain.workloads.text.labelled_dataset import Labelled, LabelledDataset, LabelledOptions, labelled_as_dataset
from mptrain.workloads.text.reading import decoded, find_parts, read_content

SUFFIXES = (".tsv", ".csv", ".jsonl")

_HINT = "set dataset.path to a file of labels and texts, or to a folder of them; dataset=docstrings needs no files"


@dataclass(frozen=True, kw_only=True)
class LabelledFileOptions(LabelledOptions):
    """Options of the data set ``labelled_text``, texts of the user with labels, besides those of `LabelledOptions`.

    ``columns`` are names in a header or in JSON; ``on_error`` is for lines that are not UTF-8 or lack a label or
    a text.
    """

    path: Path = Path("data/labelled.tsv")
    name: str = "labelled_text"
    columns: tuple[str, str] = ("label", "text")
    on_error: OnError = "stop"


@takes_fields_of(LabelledFileOptions)
def load_labelled_text(options: LabelledFileOptions) -> LabelledDataset:
    """Read texts of the user with their labels from UTF-8 files.

    A ``.csv`` or tab-separated file has the label in its first column and the text in the second, or a header that
    names both. A ``.jsonl`` file has a JSON object a line. In a folder, words in the names such as ``train.tsv`` mark
    files for training, validation and test. A part without a file gets a share of the training texts of each class.
    DataError is raised if a file is missing, cannot be read or has an unusable line; ConfigError if there are too few
    texts for the options.
    """
    part_files = find_parts(options.name, options.path, SUFFIXES, _HINT)
    faults = {part: Faults(options.on_error) for part in part_files}
    read = {
        part: [sample for file in files for sample in read_labelled(file, options.columns, faults[part])]
        for part, files in part_files.items()
    }
    if not read["train"]:
        raise DataError(
            f"{options.name}: {part_files['train'][0]} has no labelled text{faults['train'].first()}", _HINT
        )
    return labelled_as_dataset(options.name, read, options, faults, part_files)


def read_labelled(file: Path, columns: tuple[str, str], faults: Faults) -> list[Labelled]:
    """Return the labelled texts of one file, in its order, without unusable lines, which ``faults`` records.

    DataError is raised if the file cannot be read, or a line is unusable and ``faults.on_error`` is ``stop``.
    """
    problems: dict[str, str] = {}
    texts = decoded(file, read_content(file).splitlines(keepends=True), problems)
    rows = _objects(texts, columns) if file.suffix == ".jsonl" else _cells(file, texts, columns)
    samples = []
    for number, cells in rows:
        label, text = (str(cell).strip() if isinstance(cell, (str, int)) else "" for cell in cells)
        quoted = file.suffix == ".tsv" and label[:1] == label[-1:] == '"'
        if label and text and not quoted:
            samples.append(Labelled(composed(label), text))
            continue
        why = f"its {columns[0]} is in quotes" if quoted else f"it has no {columns[1] if label else columns[0]}"
        form = "; a .tsv has tabs between its cells and no quotes around them (a .csv may have quotes)"
        problems[f"{file} line {number}"] = f"{why}{form if file.suffix == '.tsv' else ''}"
    faults.report(problems)
    return samples


def _objects(lines: Iterator[tuple[int, str]], columns: tuple[str, str]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield number, (row.get(columns[0]), row.get(columns[1])) if isinstance(row, dict) else (None, None)


def _cells(
    file: Path, lines: Iterator[tuple[int, str]], columns: tuple[str, str]
) -> Iterator[tuple[int, tuple[Any, Any]]]:
    numbers: list[int] = []  # of the lines that the reader has taken; it counts none that was left out
    texts = (numbers.append(number) or line for number, line in lines)  # type: ignore[func-returns-value]
    reader = csv.reader(texts) if file.suffix == ".csv" else csv.reader(texts, csv.excel_tab, quoting=csv.QUOTE_NONE)
    indices = (0, 1)
    try:
        for count, row in enumerate(reader):
            if count == 0 and {*columns} <= {*row}:
                indices = (row.index(columns[0]), row.index(columns[1]))
            elif row:
                label, text = (row[index] if index < len(row) else None for index in indices)
                yield numbers[-1], (label, text)
    except csv.Error as error:
        raise DataError(f"{file} line {numbers[-1]}: {error}", "check its quotes and separators") from error
