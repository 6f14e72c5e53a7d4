"""Parts that a Python program gives a run in place of those that YAML names: models, data and tasks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mptrain.config.targets import DATA_FACTS, Given, facts_in
from mptrain.system.errors import CheckpointError, ConfigError, DataError, UsageError, instance
from mptrain.system.words import listed
from mptrain.workloads.base.dataset import Dataset, takes_fields_of
from mptrain.workloads.base.datasets.from_python import PATH, given_from_python
from mptrain.workloads.base.map_style import MapDataset, parts_by_name, torch_parts
from mptrain.workloads.tables.datasets.table import PATH as TABLE
from mptrain.workloads.tables.datasets.table import Table, TableOptions

if TYPE_CHECKING:
    from torch import nn


def given_parts(model: Any = None, data: Any = None, task: Any = None) -> dict[str, Given]:
    """Return what a program gives by group of the configuration; None is left out.

    Args:
        model: A `torch.nn.Module`, of which each run trains a copy; or a class or function that makes one.
        data: Map-style datasets of torch, or tensors; see `mptrain.workloads.base.map_style.torch_parts`.
        task: A class or function that makes a task.

    Raises:
        UsageError: One of them is of another kind.
    """
    given = {} if model is None else {"model": _model(model)}
    given |= {} if data is None else {"dataset": given_data(data)}
    return given | ({} if task is None else {"task": _callable("task", task)})


def _model(model: Any) -> Given:
    from torch import nn

    if isinstance(model, dict):
        hint = "give the network, and load the state dict into it first; or write model.weights=FILE"
        raise UsageError("model is a state dict" if model else "model is an empty dict", hint)
    if not isinstance(model, nn.Module):
        return _callable("model", model)
    return Given(_path(model), lambda: _copy(model), model)


def _callable(name: str, part: Any) -> Given:
    if isinstance(part, str):
        raise UsageError(
            f"{name}={part!r} is a text", f'an option of mptrain is a word: mptrain.train("{name}={part}")'
        )
    if name == "task" and _is_loss(part):
        raise UsageError(f"task is {_path(part)}: a loss alone is no task", OWN_LOSS)
    if not callable(part):
        kinds = "a torch.nn.Module, or a class or function" if name == "model" else "a class or function"
        raise UsageError(f"{name} is {instance(part)}", f"give {kinds} that makes one")
    return Given(_path(part), part)


#: Hint for a loss where a task is wanted.
OWN_LOSS = (
    "a task has a loss and metrics: give as task= a class derived from mptrain.workloads.classification.task.Classify, "
    "or another task, with def loss(self, model, batch): return your_loss(model(batch.inputs), batch.targets)"
)


def _is_loss(part: Any) -> bool:
    """Return whether a part is a loss of torch, a module, or a function of two values that are no facts of data."""
    from torch import nn

    code = getattr(part, "__code__", None)  # of a function
    two = code is not None and code.co_argcount == 2 and not {*code.co_varnames[:2]} & {*DATA_FACTS}
    is_module = issubclass(part if isinstance(part, type) else type(part), nn.Module)
    return is_module or two or str(getattr(part, "__module__", "")).startswith("torch.")


def _path(part: Any) -> str:
    """Return the dotted name of a class or function; that of an object, or of a partial, says that it is one."""
    if isinstance(part, functools.partial):
        return f"<partial of {_path(part.func)}>"
    name = getattr(part, "__qualname__", "")
    return f"{part.__module__}.{name}" if name else f"<object of {_path(type(part))}>"


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).cpu()
    except Exception as error:  # modules may keep anything
        raise ConfigError(
            f"model is {instance(model)} that cannot be copied: {type(error).__name__}: {error}",
            "give its class, or a function that makes it",
        ) from error


def frames_in(data: Any) -> dict[str, Any]:
    """Return the `pandas.DataFrame` objects in data by the part that they are; empty if it has none."""
    several = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    if not _is_frame(data) and not any(map(_is_frame, several)):
        return {}
    parts = parts_by_name(data, _is_frame)
    if odd := [name for name, part in parts.items() if not _is_frame(part)]:
        if isinstance(data, tuple) and len(data) == 2:
            return {}  # columns of inputs, and a column of targets: a pair of arrays
        raise UsageError(f"{odd[0]} is {instance(parts[odd[0]])}, and other parts are DataFrames", "give them one kind")
    return parts


def _is_frame(part: Any) -> bool:
    return hasattr(part, "columns") and hasattr(part, "iloc")


def given_data(data: Any) -> Given:
    """Return the data set of a program's frames, datasets or tensors; raise UsageError if there is none to train on."""
    if frames := frames_in(data):

        @takes_fields_of(TableOptions)
        def load(options: TableOptions) -> Table:
            return Table(frames, options)

        return Given(TABLE, load)
    if not (parts := torch_parts(data)):
        raise UsageError(
            f"data is {instance(data)}: it has no samples that a run could take",
            "give a pair (inputs, targets) of tensors or arrays, a torch.utils.data.Dataset or a pandas.DataFrame; or "
            "a tuple or mapping of them: train, val and test",
        )

    @functools.wraps(given_from_python)
    def make(workers: int = 0) -> MapDataset:
        return MapDataset("from_python", parts, workers)

    return Given(PATH, make)


class DataOfRun(MapDataset):
    """Data to evaluate a run on, with the classes, and all other facts, of the run's own data.

    Args:
        parts: Datasets by name; of several, the training data are left out, and a single one is test data.
        card: Content of the ``data.json`` of the run.

    Raises:
        DataError: The samples, their targets or the names of their classes are not of the kind that the run knows.
    """

    def __init__(self, parts: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        held_out = {name: part for name, part in parts.items() if name != "train"} or {"test": parts["train"]}
        super().__init__(card.get("name", ""), held_out, 0)
        own, self._facts, self._labels = super().facts(), facts_in(card), card.get("labels", [])
        for what, theirs, known in (
            ("samples", list(own["input_shape"]), card.get("input_shape")),
            ("targets", self.train.kinds()["target_shape"], card.get("target_shape")),
        ):
            if known not in (None, theirs):
                raise DataError(f"the {what} are {theirs}, and the run was trained on {known}", "give the same shape")
        for name, kind in self.train.kinds().items():
            if name.endswith("_dtype") and ("float" in kind) != ("float" in card.get(name, kind)):
                what = f"the {name.removesuffix('_dtype')}s are {kind}, and the run was trained on {card[name]}"
                raise DataError(what, "give the same kind of numbers")
        if "label_counts" in self._facts and "label_counts" not in own:
            raise DataError("the targets are no labels", "labels are 0 or 1")
        if (most := self._facts.get("num_classes")) is not None and own.get("num_classes", 0) > most:
            what = f"a target is class {own['num_classes'] - 1}, and the run has {most} classes, from 0"
            raise DataError(what, "give the classes the numbers that they had in training")
        names = self.train.names() or self.train.names("output_names")
        if names and self._labels and list(names) != self._labels[: len(names)]:
            what = f"the names are {listed(names, 5)}, and those of the run {listed(self._labels, 5)}"
            raise DataError(what, "give the classes or outputs the order that they had in training")
        self.warnings = ()  # they are about data to train on

    @override
    def facts(self) -> dict[str, Any]:
        return dict(self._facts) if hasattr(self, "_facts") else super().facts()

    @override
    def card(self) -> dict[str, Any]:
        return {"labels": self._labels}


def data_of_run(data: Any, card: Mapping[str, Any]) -> Dataset:
    """Return data to evaluate a run on, whose ``data.json`` has this content; a mapping may have ``test`` alone.

    Raises:
        UsageError: The run was trained on data of another kind, which are prepared otherwise.
    """
    if isinstance(data, Mapping) and "train" not in data:
        data = {"train": next(iter(data.values()), None), **data}
    frames = frames_in(data)
    rows = "columns" in (card.get("preparation") or ())
    if bool(frames) != rows or (not frames and "preparation" in card):
        kind = "a table" if rows else card.get("name", "other data")
        hint = "give a pandas.DataFrame" if rows else "give tensors" if "preparation" not in card else ""
        what = f"the run was trained on {kind}, and data is {instance(data)}, which is not prepared like it"
        raise UsageError(what, hint or "name other files: evaluate('dataset.root=FOLDER')")
    if frames:
        return Table(frames, TableOptions(fitted=card))
    if not (parts := torch_parts(data)):
        given_data(data)  # says what is wrong
    return DataOfRun(parts, card)


def put_weights(module: nn.Module, root: Path) -> int | None:
    """Give a module the weights of a run's last checkpoint, in its own dtypes; return their step, None without one."""
    from mptrain.engine.weights_io import load_matching, plain_weights
    from mptrain.runlog.checkpoints import CheckpointStore
    from mptrain.runlog.directory import open_run

    loaded = CheckpointStore(open_run(root).paths.checkpoints, keep=1).load_latest()
    if loaded is None:
        return None
    fit = load_matching(module, plain_weights(loaded.state, average=True), str(root))
    if fit.fresh:
        name, why = fit.fresh[0]
        raise CheckpointError(
            f"the module does not take the weights of {root}: {name} ({why})",
            "update_model=False leaves it as it was; mptrain.open_run(RUN, model=...).model() is the network",
        )
    return loaded.manifest.step
