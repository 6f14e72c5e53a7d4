"""Predictions of a trained network for new inputs, in the precision and with the preparation of its evaluation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from mptrain.config.compose import reload
from mptrain.config.targets import Given, parameters
from mptrain.engine.evaluate import measuring
from mptrain.engine.parts import Parts
from mptrain.run.consistency import changed_code
from mptrain.run.evaluation import built
from mptrain.run.new_inputs import open_new_inputs
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.runlog.directory import find_run
from mptrain.system.device import capabilities
from mptrain.system.errors import UsageError
from mptrain.system.process_state import settings_restored
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.new_inputs import NewInputs
from mptrain.workloads.base.task import Task

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
        notes: Differences between the network and the trained one, one sentence each.
    """

    parts: Parts
    source: NewInputs
    step: int
    average: bool
    notes: tuple[str, ...] = ()

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
    given: Mapping[str, Given] = MappingProxyType({}),
) -> Iterator[Predictor]:
    """Load the network of a run for predictions, and restore torch's settings afterwards.

    Args:
        run: The run directory, or ``last`` for the run that was started last. Its data need not be there.
        overrides: Changes of the run's configuration, such as ``device=cpu`` or ``precision.eval=fp32``.
        which: Checkpoint.
        average: Whether to take the average of the weights if there is one.
        writing: Arguments of a task that writes text: ``length``, ``temperature`` and ``seed``.
        given: What a Python program gives in place of what the configuration names, by group.

    Raises:
        UsageError: The task has nothing to predict, or an override is about the data.
        MptrainError: There is no usable checkpoint, or the run does not say how its inputs are read.
    """
    if odd := [word for word in overrides if word.lstrip("+~").startswith("dataset")]:
        raise UsageError(f"{odd[0]} has no effect on predictions: data.json says how inputs are read", "leave it out")
    directory = find_run(run)
    config = reload(directory.read_config(), overrides, given=given)
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
        step = loaded.state["progress"]["step"]
        yield Predictor(parts, source, step, average, changed_code(directory.root, parts))
