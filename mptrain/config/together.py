"""Builds the data set and the task, and refuses parts that do not go together before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mptrain.config import location
from mptrain.config.catalogue import Catalogue
from mptrain.config.features import build_features
from mptrain.config.targets import Target, parameters
from mptrain.errors import ConfigError
from mptrain.workloads.base.task import Task

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.workloads.base.source import Dataset

_GO_TOGETHER = "a model's own file chooses a task and a dataset that go with it, if the command line lets it"

#: What a data set and a task of anybody's must have; see their protocols.
_DATASET = ("name", "workers", "train", "val", "test", "facts", "describe", "prepare")
_TASK = ("metric", "higher_is_better", "objectives", "measure", "summarise")


def build_dataset(config: Config) -> Dataset:
    """The data set.

    Raises:
        ConfigError: It lacks a part of the protocol.
        DataError: The data are missing or unusable.
    """
    dataset: Dataset = config.dataset.build(seed=config.seed, batch_size=config.train.batch_size)
    missing = [name for name in _DATASET if not hasattr(dataset, name)]
    _require("dataset", config.dataset, dataset, missing, "mptrain/workloads/base/source.py")
    return dataset


def build_task(config: Config, dataset: Dataset) -> Task:
    """The task, told what it asks for of the data's facts; one that has ``features`` gets those of its ``classifier``.

    Raises:
        ConfigError: The data do not say what it needs, or it lacks a part of the protocol.
        StorageError: The run of its classifier is not there, or cannot be used.
    """
    require_facts(config, "task", config.task, dataset)
    _require_own_kind(config, dataset)
    facts = dataset.facts()
    classifier = config.task.arguments.get("classifier")
    if classifier is not None and "features" in parameters(config.task.resolve())[0]:
        facts["features"] = build_features(classifier, config, dataset)
    task: Task = config.task.build(**facts)
    unwritten = [name for name in _TASK if getattr(type(task), name, None) is vars(Task).get(name, task)]
    missing = [name for name in _TASK if name in unwritten or not hasattr(task, name)]
    _require("task", config.task, task, missing, "mptrain/workloads/base/task.py")
    return task


def require_facts(config: Config, group: str, target: Target, dataset: Dataset) -> None:
    """Refuse a model or a task that needs to know what the data do not say.

    Raises:
        ConfigError: Names what is missing, by the words of the command line.
    """
    accepted, _ = parameters(target.resolve())
    facts = dataset.facts()
    missing = [
        name
        for name, known in accepted.items()
        if known.required and name not in target.arguments and name not in facts
    ]
    if missing:
        chosen, data = (config.chosen.get(name) for name in (group, "dataset"))
        hints: dict[str, str] = getattr(dataset, "lacks", {})
        raise ConfigError(
            f"{group}={chosen or target.path} needs {', '.join(missing)}, which dataset={data or config.dataset.path} does "
            f"not have: it has {', '.join(facts) or 'nothing to say'}",
            "; ".join(hints[name] for name in missing if name in hints) or _what_goes_together(config, group),
        )


def _require_own_kind(config: Config, dataset: Dataset) -> None:
    """Refuse a task that says of itself that such data are not for it.

    Raises:
        ConfigError: Names what the data have, by the words of the command line.
    """
    refused = [name for name in getattr(config.task.resolve(), "refuses", ()) if name in dataset.facts()]
    if refused:
        chosen, data = (config.chosen.get(name) for name in ("task", "dataset"))
        raise ConfigError(
            f"task={chosen or config.task.path} does not go with dataset={data or config.dataset.path}, which has "
            f"{', '.join(refused)}",
            _what_goes_together(config, "task"),
        )


def _what_goes_together(config: Config, group: str) -> str:
    """Which of mptrain's data sets go with the model or the task that was chosen, and what those chosen are for."""
    catalogue = Catalogue([location.configs()])
    chosen, data = (catalogue.groups[name].get(config.chosen.get(name, "")) for name in (group, "dataset"))
    sentences = [_GO_TOGETHER]
    if data is not None and data.tasks:
        sentences.insert(0, f"dataset={data.name} with task={', '.join(data.tasks)}")
    if chosen is not None:
        tasks = (chosen.name,) if group == "task" else chosen.tasks or (catalogue.defaults["task"],)
        fitting = [
            name for name, option in catalogue.groups["dataset"].items() if not {*tasks}.isdisjoint(option.tasks)
        ]
        if fitting:
            sentences.insert(0, f"{group}={chosen.name} goes with dataset={', '.join(fitting)}")
    return "; ".join(sentences)


def _require(group: str, target: Target, part: Any, missing: list[str], protocol: str) -> None:
    if missing:
        raise ConfigError(
            f"{group}: {target.path} made a {type(part).__name__} without {', '.join(missing)}",
            f"what a {group} must have stands in {protocol}",
        )
