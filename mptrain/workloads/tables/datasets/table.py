"""Data set ``table``: rows of a CSV, tab-separated or Parquet file, or of pandas, and new rows of the same columns.

A frame is a ``pandas.DataFrame``. The cells of a column are N floats or N names, with None for missing ones. The
encoding of a column is a JSON object in ``data.json``. Its kind and the names of classes come from the whole frame that
rows are held out of, and all else from training rows alone:

- ``name`` and ``kind``, ``number`` or ``category``
- ``mean`` and ``std`` of a number over the rows that have one; it is standardised, and a missing one becomes 0
- ``indicator`` of a number: whether some are missing; one more input is then 1 for missing ones, and 0 for others
- ``categories`` of a category: its names, sorted, and None at the end if some are missing. Each has an input, which is
  1 for rows of it; a name that is not among them has zeros alone

The whole encoding has ``columns`` in the order of their inputs, ``targets`` (names of columns), ``target_texts`` (those
of text), ``target_kind``, and ``outputs``, the facts of the targets.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from mptrain.system.errors import ConfigError, DataError, Problem, instance, suggest
from mptrain.system.fields import NonNegativeInt
from mptrain.system.files import expanded
from mptrain.system.machine import load_extra
from mptrain.system.words import counted, listed
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import SplitDataset, class_facts, takes_fields_of
from mptrain.workloads.base.map_style import MapSplit, statistics, target_facts
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.splits import ShareOptions, hold_out, share_sizes, stratified_order
from mptrain.workloads.text.reading import read_content

Cells: TypeAlias = list[Any]
Encoding: TypeAlias = dict[str, Any]

SUFFIXES = (".csv", ".tsv", ".parquet")

#: Largest number of categories of a column, and of distinct whole numbers that are classes if nothing else is said.
CATEGORIES, WHOLE_CLASSES = 1000, 20

#: Largest number that an input can have, that of float32.
LARGEST = torch.finfo(torch.float32).max

#: Words of ``pandas.api.types.infer_dtype`` for columns of numbers, without a value, and of names.
_NUMBERS = ("integer", "floating", "mixed-integer-float", "decimal", "boolean", "empty")
_NAMES = ("string", "categorical")

#: Dotted name of `load_table`, on record in runs.
PATH = "mptrain.workloads.tables.datasets.table.load_table"

_HINT = "set dataset.path to a .csv, .tsv or .parquet file"

_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}")


@dataclass(frozen=True, kw_only=True)
class TableOptions(ShareOptions):
    """Options of a table; its shares are of the rows, and for classes of each class.

    Attributes:
        path: File of the rows to train on, None for frames of a Python program; rows are held out of it for a part
            whose own file is None.
        target: Name of the column to predict, or names of several of them.
        target_kind: ``classes``, ``values`` or ``labels``, which are several columns of 0 and 1. A task takes targets
            of one kind and data do not know the task, so the columns decide. ``auto`` takes names, truth values and up
            to `WHOLE_CLASSES` whole numbers as classes, several columns of 0 and 1 as labels, and all else as values.
        ignore: Names of columns that are left out.
        split_seed: Seed of the order from which rows are held out; the seed of the run does not matter.
        workers: Not used, because rows are in memory.
        fitted: Content of the ``data.json`` of a run that is evaluated on other rows than its own: they get its
            encoding, and rows for training are test data if there are no others. None fits an encoding.
    """

    path: Path | None = None
    val_path: Path | None = None
    test_path: Path | None = None
    target: str | tuple[str, ...] | None = None
    target_kind: Literal["auto", "classes", "values", "labels"] = "auto"
    ignore: tuple[str, ...] = ()
    split_seed: NonNegativeInt = 0
    workers: NonNegativeInt = 0
    fitted: Mapping[str, Any] | None = None


@takes_fields_of(TableOptions)
def load_table(options: TableOptions) -> Table:
    """Read the files of a table, and make a data set of them; for the errors see `Table` and `read_table`."""
    paths = {"train": options.path, "val": options.val_path, "test": options.test_path}
    if options.path is None:
        what = "a frame of pandas is given by mptrain.train(data=frame), or mptrain.open_run(RUN, data=frame)"
        raise ConfigError("dataset.path is not set", f"{_HINT}; {what}")
    files = {part: [str(expanded(path).absolute())] for part, path in paths.items() if path is not None}
    known = options.fitted or {"files": {}, "preparation": {"columns": ()}}
    files = {part: some for part, some in files.items() if some != known["files"].get(part)} or files  # the other ones
    texts = _texts(known["preparation"])
    frames: dict[str, Any] = {}
    for part, (file,) in files.items():
        frames[part] = read_table(Path(file), texts)
        texts = texts or [name for name, column in frames[part].items() if kind_of(column) == "string"]
    return Table(frames, options, files)


def read_table(file: Path, texts: Collection[str] = ()) -> Any:
    """Return the table in a file as a frame, as pandas reads it; columns ``texts`` have text, also of digits alone.

    Raises:
        DataError: It cannot be read, or its rows have more cells than its header.
        EnvironmentRefused: pandas is not installed, or for a ``.parquet`` file pyarrow.
    """
    pandas, content = load_extra("pandas", "tables", "dataset=table"), io.BytesIO(read_content(file, _HINT))
    try:
        if file.suffix == ".parquet":
            load_extra("pyarrow", "tables", "a .parquet file")
            return pandas.read_parquet(content)
        read = pandas.read_table if file.suffix == ".tsv" else pandas.read_csv
        frame = read(content, dtype=dict.fromkeys(texts, str), low_memory=False)  # kinds of whole columns
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {str(error).strip().splitlines()[0]}", "check its content") from error
    if not frame.index.equals(pandas.RangeIndex(len(frame))):  # the first cells have become names of the rows
        raise DataError(f"{file}: its rows have more cells than its header", "give each column a name")
    return frame


def _texts(encoding: Mapping[str, Any]) -> list[str]:
    inputs = (column["name"] for column in encoding["columns"] if column["kind"] == "category")
    return [*inputs, *encoding.get("target_texts", ())]


def kind_of(column: Any) -> str:
    """Return the kind of the values of a column in pandas's words, such as ``string``; missing ones do not count."""
    return str(load_extra("pandas", "tables", "dataset=table").api.types.infer_dtype(column, skipna=True))


def values_of(frame: Any) -> dict[str, list[Any]]:
    """Return the values of the columns of a frame by name, None for missing ones; DataError for two of one name."""
    if twice := frame.columns[frame.columns.map(str).duplicated()].tolist():
        raise DataError(f"a table has two columns {twice[0]}", "rename one of them")
    return {str(name): column.astype(object).where(column.notna(), None).tolist() for name, column in frame.items()}


def name_of(value: Any) -> str:
    """Return the name of a category or class; a whole number has no fraction, as others of its column may have one."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def number_of(value: Any) -> float:
    """Return the number that a value is or a text has; NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_column(part: str, table: Mapping[str, Cells], name: str, kind: str, index: Sequence[Any] = ()) -> Cells:
    """Return the cells of a column of values, None for missing ones.

    ``index`` has the labels of the rows of a program's frame, by which messages name them; empty for rows of a file,
    which count from 1.

    DataError is raised if there is no such column, or a number is needed and a value is none.
    """
    _require(part, table, name)
    read: Callable[[Any], Any] = name_of if kind == "category" else number_of
    cells = [None if value is None or value != value else read(value) for value in table[name]]
    if kind == "number":
        odd = (cell is not None and not abs(cell) <= LARGEST for cell in cells)
        _refuse(part, name, odd, "is no finite number of float32", index)
    return cells


def read_inputs(
    part: str, table: Mapping[str, Cells], encoding: Encoding, index: Sequence[Any] = ()
) -> dict[str, Cells]:
    """Return the cells of the columns of inputs by name; ``index`` and errors are those of `read_column`."""
    kinds = {column["name"]: column["kind"] for column in encoding["columns"]}
    return {name: read_column(part, table, name, kind, index) for name, kind in kinds.items()}


def read_targets(part: str, table: Mapping[str, Cells], encoding: Encoding, index: Sequence[Any] = ()) -> Tensor:
    """Return the targets of rows: classes int64 ``[N]``, values float64 ``[N]`` or ``[N, K]``, or labels ``[N, K]``.

    DataError names the rows without a target, of another class, or with a label that is neither 0 nor 1.
    """
    kind, columns = encoding["target_kind"], []
    classes = {name: number for number, name in enumerate(encoding["outputs"].get("class_names", ()))}
    for name in encoding["targets"]:
        cells = read_column(part, table, name, "category" if kind == "classes" else "number", index)
        _refuse(part, name, (cell is None for cell in cells), "is missing", index)
        if kind == "classes":
            _refuse(part, name, (cell not in classes for cell in cells), "is no class of the training data", index)
        elif kind == "labels":
            _refuse(part, name, (cell not in (0, 1) for cell in cells), "is neither 0 nor 1", index)
        columns.append([classes[cell] for cell in cells] if classes else cells)
    targets = torch.tensor(columns, dtype=torch.int64 if classes else torch.float64)
    return targets[0] if kind != "labels" and not columns[1:] else targets.T


def _require(part: str, table: Mapping[str, Any], name: str) -> None:
    if name not in table:
        raise DataError(f"{part} has no column {name}", suggest(name, table, f"it has {listed([*table], 20)}"))


def _refuse(part: str, name: str, rows: Iterable[bool], what: str, index: Sequence[Any]) -> None:
    if odd := [row for row, is_odd in enumerate(rows) if is_odd]:
        names = [str(index[row]) if len(index) else f"{row + 1:,}" for row in odd]
        where = f"{counted(len(odd), 'row')}: {'index ' if len(index) else ''}{listed(names, 5)}"
        raise DataError(f"{part}: {name} {what} in {where}", "fix these rows, or drop them")


def objection(column: Any) -> str:
    """Return why a column of a training frame is neither of numbers nor of categories; empty if it is."""
    if (kind := kind_of(column)) not in _NAMES:
        return "" if kind in _NUMBERS else f"is {kind}"
    names = {*map(name_of, column.dropna())}
    if names and all(map(_DATE.fullmatch, names)):
        return "has dates"
    too_many = len(names) > CATEGORIES or len(names) == column.count() > 1
    return f"has {len(names):,} categories in {column.count():,} rows" if too_many else ""


def planned(frame: Any, options: TableOptions) -> Encoding:
    """Return the encoding of a training frame without what its training rows determine: kinds and classes.

    Raises:
        ConfigError: No target is named.
        DataError: A column can be neither numbers nor categories, or the target is no good as classes.
    """
    table = {str(name): column for name, column in frame.items()}
    targets = [options.target] if isinstance(options.target, str) else [*(options.target or ())]
    if not targets:
        raise ConfigError("dataset.target is not set", f"set it to one of the columns {listed([*table], 20)}")
    for name in (*targets, *options.ignore):
        _require("train", table, name)
    chosen = [name for name in table if name not in (*targets, *options.ignore) and not name.startswith("Unnamed: ")]
    if refused := {name: why for name in chosen if (why := objection(table[name]))}:
        what = "; ".join(f"{name} {why}" for name, why in refused.items())
        hint = f"set dataset.ignore=[{','.join((*options.ignore, *refused))}], or convert them"
        raise DataError(f"columns that are neither numbers nor categories: {what}", hint)
    kinds, first, kind = {kind_of(table[name]) for name in targets}, table[targets[0]], options.target_kind
    named = kinds <= {"boolean", *_NAMES}
    if kind == "auto" and targets[1:]:
        kind = "labels" if all(table[name].isin([0, 1]).all() for name in targets) else "values"
    elif kind == "auto":
        kind = "classes" if named or (kinds == {"integer"} and first.nunique() <= WHOLE_CLASSES) else "values"
    classes = sorted({*map(name_of, first.dropna())}, key=None if named else float) if kind == "classes" else []
    if kind == "classes" and (targets[1:] or not 1 < len(classes) < len(first)):
        what = f"{listed(targets)} cannot be classes: {counted(len(classes), 'value')} in {len(first):,} rows"
        raise DataError(what, "name one column of values that recur, or set dataset.target_kind")
    columns = [{"name": name, "kind": "category" if kind_of(table[name]) in _NAMES else "number"} for name in chosen]
    outputs = class_facts(classes) if classes else {}
    texts = [name for name in targets if kind_of(table[name]) in _NAMES]
    return {"columns": columns, "targets": targets, "target_texts": texts, "target_kind": kind, "outputs": outputs}


def fit(encoding: Encoding, inputs: Mapping[str, Cells], targets: Tensor) -> tuple[Encoding, tuple[str, ...]]:
    """Return an encoding with what training rows determine, and warnings of their targets.

    The columns that are the same in all of these rows are left out.
    """
    columns = []
    for column in encoding["columns"]:
        cells = inputs[column["name"]]
        if len(names := {*cells}) < 2:
            continue
        if column["kind"] == "category":
            columns.append(column | {"categories": sorted(names, key=lambda name: (name is None, name))})
        else:
            mean, std = statistics(torch.tensor([cell for cell in cells if cell is not None], dtype=torch.float64))
            columns.append(column | {"mean": mean, "std": std, "indicator": None in names})
    if not columns:
        raise DataError("no column differs between training rows", "the inputs need one")
    statistics_of_targets, warned = target_facts(targets, encoding["targets"])
    outputs = {"num_outputs": len(encoding["targets"]), "output_names": encoding["targets"]}
    if encoding["target_kind"] == "classes":
        outputs = encoding["outputs"] | {"num_outputs": encoding["outputs"]["num_classes"]}
    elif encoding["target_kind"] == "labels":
        outputs["label_counts"] = targets.long().sum(0).tolist()
    else:
        outputs |= {name: list(fact) for name, fact in statistics_of_targets.items()}
    return encoding | {"columns": columns, "outputs": outputs}, warned


def encode(encoding: Encoding, inputs: Mapping[str, Cells]) -> Tensor:
    """Return the inputs of rows, float32 ``[N, D]``, of their cells by column."""
    return torch.cat([_encoded(column, inputs[column["name"]]) for column in encoding["columns"]], 1)


def _encoded(column: Mapping[str, Any], cells: Cells) -> Tensor:
    if column["kind"] == "category":
        numbers = {name: number for number, name in enumerate(column["categories"])}
        return torch.eye(len(numbers) + 1, len(numbers))[[numbers.get(cell, -1) for cell in cells]]
    values = [0.0 if cell is None else (cell - column["mean"]) / column["std"] for cell in cells]
    missing = [float(cell is None) for cell in cells]
    return torch.tensor([values, missing][: 1 + column["indicator"]], dtype=torch.float32).T


def unseen(encoding: Encoding, inputs: Mapping[str, Cells]) -> dict[str, int]:
    """Return the number of cells of each column that are of no category of the training rows."""
    known = {column["name"]: {*column.get("categories", ())} for column in encoding["columns"]}
    return {name: sum(cell not in names for cell in inputs[name]) for name, names in known.items() if names}


def facts_of(encoding: Encoding) -> dict[str, Any]:
    """Return ``input_shape`` and the facts of the outputs."""
    width = sum(len(column.get("categories", "1")) + column.get("indicator", 0) for column in encoding["columns"])
    facts = {name: tuple(fact) if isinstance(fact, list) else fact for name, fact in encoding["outputs"].items()}
    return {"input_shape": (width,), **facts}


def card_of(encoding: Encoding) -> dict[str, Any]:
    """Return the encoding as ``preparation``, and as ``labels`` the classes and its digest.

    So a checkpoint, which knows the labels, accepts no other encoding than that of its weights.
    """
    digest = hashlib.sha256(json.dumps(encoding, sort_keys=True).encode()).hexdigest()[:16]
    return {"labels": [*encoding["outputs"].get("class_names", ()), f"encoding {digest}"], "preparation": encoding}


def saved_encoding(card: Mapping[str, Any]) -> Encoding:
    """Return the encoding in a ``data.json``; raise KeyError if there is none, and ValueError if it is another one."""
    encoding: Encoding = card["preparation"]
    if card_of(encoding)["labels"] != card["labels"]:
        raise ValueError("labels and preparation do not fit together")
    return encoding


class Table(SplitDataset[MapSplit]):
    """Data set of a table: a frame, or a mapping of frames from ``train``, and ``val`` and ``test`` if there are any.

    A batch has inputs float32 ``[N, D]`` with classes int64 ``[N]``, values float32 ``[N]`` or of several columns
    ``[N, K]``, or labels float32 ``[N, K]``. ``files`` are those that the parts were read from.

    Raises:
        DataError: A column or a target is unusable; the message names it, and its rows.
        ConfigError: No target is named, a column is absent, or the shares leave no rows to train on.
        EnvironmentRefused: pandas is not installed.
    """

    inputs = "rows"

    def __init__(self, frames: Any, options: TableOptions, files: Mapping[str, Sequence[str]] | None = None) -> None:
        given = {"train": frames} if hasattr(frames, "columns") else frames
        frames = {part: frame for part, frame in given.items() if frame is not None}
        if options.fitted is not None:
            frames = {part: frame for part, frame in frames.items() if part != "train"} or {"test": frames["train"]}
        tables = {part: values_of(frame) for part, frame in frames.items()}
        if odd := [part for part, table in tables.items() if not table.keys() & tables.get("train", table).keys()]:
            hint = "two frames are train and val; for inputs and targets give one frame, with target=NAME"
            raise DataError(f"{odd[0]} has none of the columns of train", hint)
        encoding = planned(frames["train"], options) if options.fitted is None else saved_encoding(options.fitted)
        index = {part: () if files else frame.index for part, frame in frames.items()}
        inputs = {part: read_inputs(part, table, encoding, index[part]) for part, table in tables.items()}
        targets = {part: read_targets(part, table, encoding, index[part]) for part, table in tables.items()}
        self._held, self.warnings = "", tuple[str, ...]()
        for part, cells in inputs.items():
            self.warnings += _counted(f"missing in {part}", {name: some.count(None) for name, some in cells.items()})
        if options.fitted is None:
            every, them = inputs["train"], targets["train"]
            classes = them if encoding["target_kind"] == "classes" else torch.zeros(len(them)).long()
            # The test part is the end of the order, so that it is the same with any val_share.
            sizes = {"train": options.train_samples, **share_sizes(options.shares(tables), len(them))}
            for part, rows in hold_out(stratified_order(classes, options.split_seed), sizes, "rows").items():
                inputs[part] = {name: [cells[row] for row in rows.tolist()] for name, cells in every.items()}
                targets[part] = them[rows]
                self._held += f"; {len(rows):,} rows held out for {part}" if part not in tables else ""
            encoding, warned = fit(encoding, inputs["train"], targets["train"])
            used = {*options.ignore, *encoding["targets"], *(column["name"] for column in encoding["columns"])}
            if odd := [name for name in tables["train"] if name not in used]:
                self.warnings += (f"left out, without a name or the same in all training rows: {listed(odd, 20)}",)
            self.warnings += warned
        self.encoding, splits = encoding, {}
        for part, cells in inputs.items():
            self.warnings += _counted(f"of no category of the training rows in {part}", unseen(encoding, cells))
            outputs = targets[part].float() if targets[part].is_floating_point() else targets[part]
            splits[part] = MapSplit(part, TensorDataset(encode(encoding, cells), outputs))
        splits.setdefault("train", next(iter(splits.values())))  # to build an evaluation
        super().__init__(name="table", splits=splits, workers=options.workers, files=files or {})

    @property
    def lacks(self) -> dict[str, Problem]:
        """Reasons, with hints, why the data lacks facts of images, and of targets of other kinds."""
        what = f"the target {listed(self.encoding['targets'])} is read as {self.encoding['target_kind']}"
        kinds = {"num_classes": "classes", "target_mean": "values", "label_counts": "labels"}
        image = Problem("rows of a table have no pixels", "choose another model, such as model=mlp")
        hint = "choose another task, or set dataset.target_kind={}".format
        other = {fact: Problem(what, hint(kind)) for fact, kind in kinds.items()}
        return {**other, "in_channels": image, "image_size": image}

    @override
    def facts(self) -> dict[str, Any]:
        """Return ``input_shape`` and ``num_outputs``, and facts of the kind of target.

        Classes have ``num_classes`` and ``class_names``. Others have ``output_names``: values with ``target_mean`` and
        ``target_std`` of each column over the training rows, and labels with ``label_counts``, of the rows with each.
        """
        return facts_of(self.encoding)

    @override
    def card(self) -> dict[str, Any]:
        return card_of(self.encoding) | self.train.kinds() | super().card()

    @override
    def describe(self) -> str:
        """Return, for example, ``12 inputs of 5 columns, price as values; 40 rows held out for test``."""
        width, columns = self.train.first.inputs.shape[1], counted(len(self.encoding["columns"]), "column")
        target = f"{listed(self.encoding['targets'])} as {self.encoding['target_kind']}"
        return f"{counted(width, 'input')} of {columns}, {target}{self._held}"


def _counted(what: str, counts: Mapping[str, int]) -> tuple[str, ...]:
    some = [f"{name} ({counted(count, 'row')})" for name, count in counts.items() if count]
    return (f"{what}: {listed(some, 20)}",) if some else ()


class NewRows(NewInputs):
    """Rows of a table, each a JSON object of its columns in a line; columns that the run does not have are ignored."""

    unreadable = (DataError, ValueError, RecursionError)

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.encoding = saved_encoding(card)
        super().__init__(card, {**facts, **facts_of(self.encoding)})

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return the inputs of a row, float32 ``[D]``; raise DataError for a column that is absent or no number."""
        row = json.loads(given) if given.lstrip().startswith("{") else {}
        cells = read_inputs("the row", {name: [value] for name, value in row.items()}, self.encoding)
        unknown = [name for name, count in unseen(self.encoding, cells).items() if count]
        indicated = {column["name"]: column.get("indicator", True) for column in self.encoding["columns"]}
        lacking = [name for name, known in indicated.items() if cells[name] == [None] and not known]
        remarks = {"of no category of the training rows": unknown, "missing, and in no training row": lacking}
        if remark := "; ".join(f"{what}: {', '.join(names)}" for what, names in remarks.items() if names):
            faults.remarks[given] = remark
        return encode(self.encoding, cells)[0]

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return inputs, float32 ``[N, D]``."""
        return Batch(torch.stack(list(samples)), torch.zeros(len(samples), dtype=torch.int64))

    @override
    def inputs_in(self, given: Any) -> Iterator[str] | None:
        """Return the rows of a frame, of a file with the name of a table, or the one that a mapping of columns is.

        A row of a frame, a ``pandas.Series``, is one, too. DataError is raised for a column of the encoding that is
        absent, and for what is none of these.
        """
        if isinstance(given, str | Path):
            if not str(given).endswith(SUFFIXES):
                return None
            given = read_table(expanded(given), _texts(self.encoding))
        if isinstance(given, list):
            return itertools.chain.from_iterable(self.inputs_in(row) or [str(row)] for row in given)
        names = [column["name"] for column in self.encoding["columns"]]
        given = given.to_frame().T.infer_objects() if hasattr(given, "to_frame") else given
        if not isinstance(given, Mapping) and not hasattr(given, "columns"):
            raise DataError(f"the input is {instance(given)}, no table", "give a DataFrame, a row of it, or a mapping")
        values = {name: [value] for name, value in given.items()} if isinstance(given, Mapping) else values_of(given)
        for name in names:
            _require("the input", values, name)
        rows = (dict(zip(names, row, strict=True)) for row in zip(*map(values.get, names), strict=True))
        return (json.dumps(row, default=str, ensure_ascii=False) for row in rows)
