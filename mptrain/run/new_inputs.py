"""New inputs of a trained network: their readers by kind, and what the ``data.json`` of a run says of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mptrain.config.targets import facts_in
from mptrain.runlog.strict_json import read_object
from mptrain.system.errors import ConfigError, DataError
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.new_tensors import NewTensors
from mptrain.workloads.detection.detection_images import NewScenes
from mptrain.workloads.enhancement.photo_dataset import NewPhotos
from mptrain.workloads.images.datasets.image_folder import NewPictures
from mptrain.workloads.language.language_dataset import NewPrompts
from mptrain.workloads.speech.speech_dataset import NewRecordings
from mptrain.workloads.tables.datasets.table import NewRows
from mptrain.workloads.text.labelled_dataset import NewTexts
from mptrain.workloads.translation.pair_dataset import NewSentences

#: Readers by the attribute ``inputs`` of data sets.
KINDS: dict[str, type[NewInputs]] = {
    "pictures": NewPictures,
    "scenes": NewScenes,
    "photos": NewPhotos,
    "texts": NewTexts,
    "sentences": NewSentences,
    "prompts": NewPrompts,
    "recordings": NewRecordings,
    "tensors": NewTensors,
    "rows": NewRows,
}


def open_new_inputs(file: Path, kind: str = "") -> NewInputs:
    """Return the reader of new inputs that the ``data.json`` of a run describes, or of a ``kind`` whatever it says.

    Raises:
        DataError: It describes none, because the data set has no such reader or the file is damaged.
        StorageError: It cannot be read.
    """
    card = read_object(file)
    kind = kind or card.get("inputs", "")
    if not isinstance(kind, str) or kind not in KINDS or (kind == "tensors" and "input_dtype" not in card):
        raise DataError(
            f"{file} does not say how new inputs are read: its data set is {card.get('name', 'unknown')}",
            "data sets of pictures, texts, recordings and tables that come with mptrain do, in runs whose end names "
            "predict; from Python Run.model() takes tensors",
        )
    try:
        return KINDS[kind](card, facts_in(card))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ConfigError) as error:
        raise DataError(
            f"{file} is damaged: {type(error).__name__}: {error}", "restore it from a copy, or train again"
        ) from error


def saved_facts(file: Path) -> dict[str, Any]:
    """Return the facts of the data in the ``data.json`` of a run, such as the number of classes, by name."""
    return facts_in(read_object(file))
