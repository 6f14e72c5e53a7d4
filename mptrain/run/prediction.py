"""Predictions of a trained network for new inputs, in the precision and with the preparation of its evaluation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from mptrain.config.compose import reload
from mptrain.config.targets import DATA_FACTS, parameters
from mptrain.engine.evaluate import measuring
from mptrain.engine.parts import Parts
from mptrain.run.evaluation import built
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.runlog.strict_json import read_object
from mptrain.system.device import capabilities
from mptrain.system.errors import ConfigError, DataError, UsageError
from mptrain.system.process_state import settings_restored
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.task import Task
from mptrain.workloads.detection.detection_images import NewScenes
from mptrain.workloads.enhancement.photo_dataset import NewPhotos
from mptrain.workloads.images.datasets.image_folder import NewPictures
from mptrain.workloads.language.language_dataset import NewPrompts
from mptrain.workloads.speech.speech_dataset import NewRecordings
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
}


def open_new_inputs(file: Path) -> NewInputs:
    """Return the reader of new inputs that the ``data.json`` of a run describes.

    Raises:
        DataError: It describes none, because the data set has no such reader or the file is damaged.
        StorageError: It cannot be read.
    """
    card = read_object(file)
    kind = card.get("inputs")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(
            f"{file} does not say how new inputs are read: its data set is {card.get('name', 'unknown')}",
            "data sets of pictures, texts and recordings that come with mptrain do, in runs whose end names predict; "
            "from Python Run.model() takes tensors",
        )
    try:
        return KINDS[kind](card, _facts(card))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ConfigError) as error:
        raise DataError(
            f"{file} is damaged: {type(error).__name__}: {error}", "restore it from a copy, or train again"
        ) from error


def saved_facts(file: Path) -> dict[str, Any]:
    """Return the facts of the data in the ``data.json`` of a run, such as the number of classes, by name."""
    return _facts(read_object(file))


def _facts(card: Mapping[str, Any]) -> dict[str, Any]:
    return {name: card[name] for name in (*DATA_FACTS, "tokenizer_padding") if name in card}


#: Inputs that are known at a time, so that endless ones need no memory.
_AT_A_TIME = 4096


@dataclass(frozen=True)
class Prediction:
    """Answer of a network to one input.

    Attributes:
        given: The input: the path of a file, or a text.
        answer: JSON values by name, as the task's ``predict`` describes them; empty if the input is unusable.
        error: Reason why it is unusable; empty if it is not.
        remark: Conversion that the input needed; empty for none.
    """

    given: str
    answer: dict[str, Any]
    error: str = ""
    remark: str = ""

    @property
    def picture(self) -> Tensor | None:
        """Picture that is the answer, uint8 ``[C, H, W]``; None for other answers."""
        return self.answer.get("picture")


@dataclass(frozen=True)
class Predictor:
    """Trained network of a run, ready for new inputs.

    Attributes:
        source: Reader of the inputs.
        step: Training steps attempted before its checkpoint.
    """

    parts: Parts
    source: NewInputs
    step: int
    average: bool

    def predict(self, inputs: Iterable[str]) -> Generator[Prediction]:
        """Yield the answer to each input, texts or paths of files, in their order; unusable ones have an error."""
        waiting = iter(inputs)
        with measuring(self.parts, average=self.average) as (model, prepare, autocast):
            while some := list(itertools.islice(waiting, _AT_A_TIME)):
                loader = self._loader(some)
                size, faults = loader.batch_size, loader.split.faults
                try:
                    for number, batch in enumerate(loader.batches(epoch=0)):
                        given = some[number * size : (number + 1) * size]
                        answers: Iterator[dict[str, Any]] = iter(())
                        if not batch.is_dummy:
                            prepared = prepare(batch)  # in full precision
                            with autocast:
                                answers = iter(self.parts.task.predict(model, prepared))
                        for sample in given:
                            error = faults.unusable.get(sample, "")
                            yield Prediction(
                                sample, {} if error else next(answers), error, faults.remarks.get(sample, "")
                            )
                finally:
                    loader.close()

    def _loader(self, inputs: Sequence[str]) -> Loader:
        split = self.source.split(inputs)
        size = self.source.batch_size or min(self.parts.loaders["train"].batch_size, len(inputs))
        workers = self.source.workers if len(inputs) > size else 0
        pin = capabilities(self.parts.device).pinned
        return Loader(split, size, 0, shuffle=False, workers=workers, pin=pin)


@contextlib.contextmanager
def predictor(
    run: str,
    overrides: Sequence[str] = (),
    which: Literal["last", "best"] = "last",
    *,
    average: bool = True,
    writing: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[Predictor]:
    """Load the network of a run for predictions, and restore torch's settings afterwards.

    Args:
        run: The run directory, or ``last`` for the run that was started last. Its data need not be there.
        overrides: Changes of the run's configuration, such as ``device=cpu`` or ``precision.eval=fp32``.
        which: Checkpoint.
        average: Whether to take the average of the weights if there is one.
        writing: Arguments of a task that writes text: ``length``, ``temperature`` and ``seed``.

    Raises:
        UsageError: The task has nothing to predict, or an override is about the data.
        MptrainError: There is no usable checkpoint, or the run does not say how its inputs are read.
    """
    if odd := [word for word in overrides if word.lstrip("+~").startswith("dataset")]:
        raise UsageError(f"{odd[0]} has no effect on predictions: data.json says how inputs are read", "leave it out")
    directory = find_run(run)
    config = reload(directory.read_config(), overrides)
    if getattr(config.task.resolve(), "predict", Task.predict) is Task.predict:
        raise UsageError(
            f"task={config.chosen.get('task', config.task.path)} predicts nothing from new inputs",
            "mptrain report shows what its network makes",
        )
    if odd := sorted(writing.keys() - parameters(config.task.resolve())[0]):
        raise UsageError(f"--{odd[0]} is about written text, and this run writes none", "leave it out")
    config = replace(config, task=replace(config.task, arguments={**config.task.arguments, **writing}))
    source = open_new_inputs(directory.paths.data)
    loaded = CheckpointStore(directory.paths.checkpoints, config.checkpoint.keep).load(which)
    with settings_restored():
        parts = built(config, loaded, source)
        yield Predictor(parts, source, loaded.state["progress"]["step"], average)
