"""Construction of the data set and of the task (losses and metrics), with checks that the parts are compatible."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mptrain.config.allowed_targets import is_allowed
from mptrain.config.catalogue import Catalogue, configs_folder
from mptrain.config.compose import reload
from mptrain.config.overrides import is_about_data
from mptrain.config.schema import Config
from mptrain.config.targets import Target, facts_in, parameters
from mptrain.engine.checkpointing import require_same_schema
from mptrain.engine.weights_io import load_matching, plain_weights
from mptrain.runlog import open_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.strict_json import parse_strict
from mptrain.system.errors import CheckpointError, ConfigError, Problem, UnusableSample, instance
from mptrain.system.files import expanded, read_text
from mptrain.system.pretrained import ATTRIBUTE, PretrainedWeights
from mptrain.workloads.base.data_files import hidden_noted
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.map_style import MapDataset, torch_parts
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.base.task import Objective, Task
from mptrain.workloads.classification.task import train_classifier
from mptrain.workloads.gan.task import ClassifierFeatures

#: Means and deviations that differ less are taken as alike: those of other photographs.
SIMILAR = 0.1

#: Value of ``task.classifier`` that trains a classifier on the run's own data.
TRAIN = "train"

_GO_TOGETHER = "choose only a model, and its file sets a task and a dataset for it"

#: Attributes that every data set and every task must have; see their protocols.
_DATASET = ("name", "workers", "train", "val", "test", "facts", "describe", "prepare")
_TASK = ("metric", "higher_is_better", "objectives", "measure", "summarise")


def build_dataset(config: Config, card: Mapping[str, Any] | None = None) -> Dataset:
    """Build the data set of a run.

    ``card`` is the content of the ``data.json`` of a run that is evaluated on other data than its own, for a data set
    that takes its ``labels``, or all of it as ``fitted``.

    Raises:
        ConfigError: The data set lacks an attribute that every data set must have (`mptrain.workloads.base.dataset`),
            and is no map-style dataset of torch either (`mptrain.workloads.base.map_style`).
        DataError: The data is missing or unusable.
    """
    known = {} if card is None else {"labels": tuple(card.get("labels", ())), "fitted": card}
    try:
        with hidden_noted() as hidden:
            dataset: Dataset = config.dataset.build(**config.for_dataset(), **known)
    except UnusableSample as error:
        name_doctor(error, config)
        raise
    missing = [name for name in _DATASET if not hasattr(dataset, name)]
    if missing and (parts := torch_parts(dataset)):
        name = config.chosen.get("dataset") or config.dataset.path.rpartition(".")[2]
        return MapDataset(name, parts, config.dataset.arguments.get("workers", 4))
    _require("dataset", config.dataset, dataset, missing, "mptrain/workloads/base/dataset.py")
    if hidden:
        vars(dataset)["warnings"] = (*getattr(dataset, "warnings", ()), *hidden)
    return dataset


def name_doctor(error: BaseException, config: Config) -> None:
    """Add the command that lists all unusable files to the hint of an `UnusableSample`; ignore any other exception."""
    if isinstance(error, UnusableSample):
        words = [word for word in config.overrides if is_about_data(word)]
        if not any(word.startswith(("dataset=", "dataset._target_=")) for word in words):
            words.insert(0, f"dataset={config.chosen['dataset']}")
        error.hint += f"; list all such files: {shlex.join(['mptrain', 'doctor', *words])}"


def build_task(config: Config, dataset: Dataset) -> Task:
    """Build the task of a run (losses and metrics), with facts of the data set such as the number of classes.

    A task with a ``features`` parameter gets the feature extractor of its ``classifier`` (see `build_features`).

    Raises:
        ConfigError: The data set lacks a fact that the task needs, or the task lacks a method or attribute that every
            task must have (`mptrain.workloads.base.task`).
        StorageError: The run of its classifier does not exist or cannot be used.
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
    """Check that the data set provides every fact, such as ``num_classes``, that a ``model`` or ``task`` requires.

    ``group`` is one of these two. Raise ConfigError, which names the missing facts and the overrides involved.
    """
    accepted, _ = parameters(target.resolve())
    facts, fact_names = dataset.facts(), target.facts or {}
    missing = [
        name
        for name, known in accepted.items()
        if known.required and name not in {*target.arguments, *fact_names} and name not in facts
    ]
    missing += [fact for fact in fact_names.values() if fact not in facts]
    if missing:
        chosen, data = (config.chosen.get(name) for name in (group, "dataset"))
        lacks: dict[str, Problem] = getattr(dataset, "lacks", {})
        known = [lacks[name] for name in missing if name in lacks]
        why = "; ".join(dict.fromkeys(problem.what for problem in known)) or f"it has {', '.join(facts) or 'no facts'}"
        raise ConfigError(
            f"{group}={chosen or target.path} needs {', '.join(missing)}, which dataset={data or config.dataset.path} "
            f"does not have: {why}",
            "; ".join(dict.fromkeys(problem.hint for problem in known)) or _what_goes_together(config, group),
        )


def describe_untold(target: Target, dataset: Dataset) -> tuple[str, ...]:
    """Return a warning if a model takes any keywords (``**kwargs``) and no fact of the data set is passed to it."""
    accepted, open_ended = parameters(target.resolve())
    names = [name for name in dataset.facts() if not name.startswith(("class_names", "decode"))]
    if not open_ended or target.facts is not None or {*names} & {*accepted, *target.arguments}:
        return ()
    if is_allowed(target.path, ("torchvision",)):  # gets num_classes
        return ()
    return (
        f"{target.path} takes any keywords (**kwargs), so no fact of the data set is passed to it: add "
        f"model.facts=[...] with the ones that it needs among {', '.join(names)}, or model.facts=[] for none",
    )


def describe_statistics(model: nn.Module, dataset: Dataset) -> tuple[str, ...]:
    """Return a warning if pretrained weights were trained on images that were normalised otherwise than those here."""
    own: PretrainedWeights | None = getattr(model, ATTRIBUTE, None)
    preparation = getattr(dataset, "preparation", None)
    if own is None or own.statistics is None or not isinstance(preparation, Preparation):
        return ()
    here, there = (*preparation.mean, *preparation.std), (*own.statistics[0], *own.statistics[1])
    if len(here) != len(there) or max(abs(a - b) for a, b in zip(here, there, strict=True)) < SIMILAR:
        return ()
    shown = [
        ", ".join(f"{value:.3g}" for value in values) for values in (*own.statistics, preparation.mean, preparation.std)
    ]
    half = ": set dataset.normalise=symmetric" if {*there} == {0.5} else ""
    return (
        f"{own.source} was trained on images with mean {shown[0]} subtracted and divided by {shown[1]}, "
        f"and here they are {shown[2]} and {shown[3]}{half}",
    )


def require_known_learners(config: Config, objectives: Sequence[Objective]) -> None:
    """Raise ConfigError for all learners that the configuration has settings for and the task does not have."""
    names = [objective.learner for objective in objectives]
    if unknown := [name for name in config.learners if name not in names]:
        hint = f"its learners are {', '.join(names)}"
        raise ConfigError([Problem(f"learners.{name}: the task has no such learner", hint) for name in unknown])


def _require_own_kind(config: Config, dataset: Dataset) -> None:
    """Raise ConfigError for a task that lists one of the data set's facts in its ``refuses``."""
    refused = [name for name in getattr(config.task.resolve(), "refuses", ()) if name in dataset.facts()]
    if refused:
        chosen, data = (config.chosen.get(name) for name in ("task", "dataset"))
        raise ConfigError(
            f"task={chosen or config.task.path} does not work with dataset={data or config.dataset.path}, which has "
            f"{', '.join(refused)}",
            _what_goes_together(config, "task"),
        )


def _what_goes_together(config: Config, group: str) -> str:
    """Return a hint: the data sets that work with the chosen model or task, and the tasks of the chosen data set."""
    catalogue = Catalogue([configs_folder()])
    chosen, data = (catalogue.groups[name].get(config.chosen.get(name, "")) for name in (group, "dataset"))
    sentences = [_GO_TOGETHER]
    if data is not None and data.tasks:
        sentences.insert(0, f"dataset={data.name} works with task={', '.join(data.tasks)}")
    if chosen is not None:
        tasks = (chosen.name,) if group == "task" else chosen.tasks or (catalogue.defaults["task"],)
        fitting = [
            name for name, option in catalogue.groups["dataset"].items() if not {*tasks}.isdisjoint(option.tasks)
        ]
        if fitting:
            sentences.insert(0, f"{group}={chosen.name} works with dataset={', '.join(fitting)}")
    return "; ".join(sentences)


def _require(group: str, target: Target, part: Any, missing: list[str], protocol: str) -> None:
    if missing:
        raise ConfigError(
            f"{group}: {target.path} returned {instance(part)} without {', '.join(missing)}",
            f"see the protocol of a {group} in {protocol}",
        )


def build_features(classifier: str, config: Config, dataset: Dataset) -> ClassifierFeatures:
    """Build the feature extractor for metrics of generated images from the classifier that ``task.classifier`` names.

    This is ``train`` to train one on the run's own data, a run directory, or the name of a run below ``run.root``.

    Raises:
        ConfigError: The data set has no classes, or the run did not classify images.
        StorageError: There is no such run.
        CheckpointError: The run has no usable weights.
    """
    if classifier != TRAIN:
        return _of_run(classifier, config, dataset)
    missing = [name for name in ("num_classes", "in_channels") if name not in dataset.facts()]
    if missing:
        raise ConfigError(
            f"task.classifier=train needs {', '.join(missing)}, which dataset={dataset.name} does not have",
            "choose images with classes, a run that trained a classifier, or task.classifier=null",
        )
    return ClassifierFeatures(functools.partial(train_classifier, dataset), None, labelled=True)


def _of_run(classifier: str, config: Config, dataset: Dataset) -> ClassifierFeatures:
    path = expanded(classifier)
    named = expanded(config.run.root) / classifier
    if not path.is_dir() and named.is_dir():
        path = named
    run = open_run(path)
    trained = reload(run.read_config(), allow=config.extensions.allow)
    try:
        card: dict[str, Any] = parse_strict(read_text(run.paths.data))
        preparation = Preparation.from_card(card["preparation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"task.classifier={classifier}: its data.json does not describe the preparation of images",
            "choose a run that trained an image classifier",
        ) from error
    store = CheckpointStore(run.paths.checkpoints, trained.checkpoint.keep)
    loaded = store.load("best" if store.best() else "last")
    require_same_schema(loaded.state)
    model: nn.Module = trained.model.build(**facts_in(card))
    fit = load_matching(model, plain_weights(loaded.state, average=True), str(path))
    if fit.fresh:
        raise CheckpointError(
            f"task.classifier={classifier}: its weights do not fit the model in its configuration",
            "train the classifier again with this version",
        )
    _require_classifier(model, card, classifier)
    own = dataset.card().get("labels") if hasattr(dataset, "card") else None
    labelled = bool(own) and own == card.get("labels")
    return ClassifierFeatures(model.to, preparation, labelled=labelled)


def _require_classifier(model: nn.Module, card: dict[str, Any], classifier: str) -> None:
    """Raise ConfigError if for one image of zeros the classifier does not return one logit per class."""
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, card["in_channels"], card["image_size"], card["image_size"]))
    except (RuntimeError, TypeError, ValueError, LookupError):
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, card.get("num_classes")):
        raise ConfigError(
            f"task.classifier={classifier} does not return one logit per class for an image",
            "choose a run that trained an image classifier",
        )
