"""Finds the classifier that a task looks through: that of a run, or one trained on the task's own data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mptrain.config.compose import reload
from mptrain.config.targets import DATA_FACTS
from mptrain.engine.snapshot import require_same_schema
from mptrain.engine.weights_io import plain_weights, take_over
from mptrain.errors import CheckpointError, ConfigError
from mptrain.files import read_text
from mptrain.runlog import open_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.strict_json import parse_strict
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.classification.small_classifier import train_classifier
from mptrain.workloads.images.features import Features

if TYPE_CHECKING:
    from mptrain.config.schema import Config
    from mptrain.workloads.base.source import Dataset

#: The word that asks for a classifier of the task's own data.
TRAIN = "train"


def build_features(classifier: str, config: Config, dataset: Dataset) -> Features:
    """What ``task.classifier`` names.

    Args:
        classifier: ``train``, a run directory, or the name of a run below ``run.root``.
        config: Of the run that asks.
        dataset: Its data.

    Raises:
        ConfigError: The data have no classes, or the run was no classification of pictures.
        StorageError: There is no such run.
        CheckpointError: It has no usable weights.
    """
    if classifier != TRAIN:
        return _of_run(classifier, config, dataset)
    missing = [name for name in ("num_classes", "in_channels") if name not in dataset.facts()]
    if missing:
        raise ConfigError(
            f"task.classifier=train needs {', '.join(missing)}, which dataset={dataset.name} does not have",
            "choose pictures with classes, a run of a classifier, or task.classifier=null",
        )
    return Features(functools.partial(train_classifier, dataset), None, labelled=True)


def _of_run(classifier: str, config: Config, dataset: Dataset) -> Features:
    path = Path(classifier).expanduser()
    named = Path(config.run.root).expanduser() / classifier
    if not path.is_dir() and named.is_dir():
        path = named
    run = open_run(path)
    trained = reload(run.read_config(), allow=config.extensions.allow)
    try:
        card: dict[str, Any] = parse_strict(read_text(run.paths.data))
        preparation = _preparation(card["preparation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"task.classifier={classifier}: its data.json does not say how pictures become inputs",
            "choose a run that classified pictures",
        ) from error
    store = CheckpointStore(run.paths.checkpoints, trained.checkpoint.keep)
    loaded = store.load("best" if store.best() else "last")
    require_same_schema(loaded.state)
    model: nn.Module = trained.model.build(**{name: card[name] for name in DATA_FACTS if name in card})
    fit = take_over(model, plain_weights(loaded.state, average=True), str(path))
    if fit.fresh:
        raise CheckpointError(
            f"task.classifier={classifier}: its weights do not fit the model its configuration describes",
            "train it again with this version",
        )
    _require_classifier(model, card, classifier)
    own = dataset.card().get("labels") if hasattr(dataset, "card") else None
    labelled = bool(own) and own == card.get("labels")

    def make(device: torch.device) -> nn.Module:
        return model.to(device)

    return Features(make, preparation, labelled=labelled)


def _require_classifier(model: nn.Module, card: dict[str, Any], classifier: str) -> None:
    """Let it see a picture before anything is trained.

    Raises:
        ConfigError: It does not answer with a number for each class.
    """
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(1, card["in_channels"], card["image_size"], card["image_size"]))
    except (RuntimeError, TypeError, ValueError, LookupError):
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, card.get("num_classes")):
        raise ConfigError(
            f"task.classifier={classifier} does not answer a picture with a number for each class",
            "choose a run that classified pictures",
        )


def _preparation(card: dict[str, Any]) -> Preparation:
    """The inverse of `Preparation.card`."""
    return Preparation(
        mean=tuple(card["mean"]),
        std=tuple(card["std"]),
        image_size=card["resize"]["side"],
        channels=card["channels"],
        full_range=card["divide_by"],
    )
