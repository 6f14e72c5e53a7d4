"""Protocol of a task (the losses, metrics and exhibits of a workload), as the training engine uses it.

Exhibits are pictures, texts and sounds of a model, such as generated images.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.device import widest
from mptrain.system.errors import ConfigError, instance
from mptrain.system.fields import PositiveInt
from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class Pictures:
    """Grid of pictures that a task shows after a validation, with an explanation of their colours or columns.

    ``pixels`` are floats ``[N, C, H, W]`` from 0 to 1, grey or RGB; values outside are clipped. ``columns`` is the
    number of pictures per row; None makes the grid square.
    """

    pixels: Tensor
    caption: str = ""
    columns: int | None = None


@dataclass(frozen=True)
class Texts:
    """Table of sentences that a task shows after a validation: input, expected output and output of the model."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sounds:
    """Recordings that a task shows after a validation, float32 ``[N, T]`` from -1 to 1; values outside are clipped.

    ``rate`` is in hertz; ``captions`` has N sentences, or none.
    """

    samples: Tensor
    rate: int
    captions: tuple[str, ...] = ()


#: Numbers of a split on the host, ``[N, K]``.
Table: TypeAlias = NDArray[np.float64]

Exhibit: TypeAlias = Pictures | Texts | Sounds


@dataclass(frozen=True)
class Objective:
    """Loss of a task, with the parameters that it trains; the engine creates a learner for each objective.

    Attributes:
        learner: Name of the learner in records; ``main`` if there is only one.
        modules: Names of the trained modules or parameters; an empty name means the whole model. No other parameters
            get gradients from this loss.
        loss: Function of the model and a micro-batch on the device: the mean loss over the terms, a float32 scalar.
    """

    learner: str
    modules: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], Tensor]


class Task(Protocol):
    """Protocol of a task: how a model is trained and judged, with its losses, metrics and exhibits.

    Attributes:
        metric: Name of the metric that selects the best checkpoint; None if there is no such metric.
        term: Plural noun for the terms of the loss, such as ``tokens``; throughput is counted in these.
        shares: Names of metrics that are fractions of samples, each right or wrong. Their 95 % CI is Wilson's.
        refuses: Names of data set facts, such as ``boxes``, that mark targets of a kind that the task cannot take.
    """

    metric: str | None
    higher_is_better: bool
    term: str = "samples"
    shares: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()

    def objectives(self) -> tuple[Objective, ...]:
        """Return the losses of the task, each with the parameters it trains, in the order of their steps on a batch."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the loss and other quantities of each evaluated sample, sums over its terms, by name, float64 ``[N]``.

        The engine calls this in evaluation mode, without gradients, with separate random numbers that are the same in
        every evaluation, and sums up the quantities over a split. A scalar, the sum over the whole batch, is accepted
        too, but then no confidence interval can be computed. A mean over the batch is wrong: an evaluation warns of it.
        """
        ...

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return the metrics of a split by name, from the sums of `measure` over it and its number of terms.

        ``loss``, if present, is the mean over all terms.
        """
        ...

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """Return N host values for a batch, for metrics that are not sums, such as BLEU; none by default.

        The engine calls this after `measure`, under the same conditions, and passes the results of a split to `score`.
        """
        return ()

    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of a split by name that need the results of all its samples together; none by default.

        They add to those of `summarise`. The bootstrap of a confidence interval calls this many times on lists of the
        same length, in any order and with repetitions, so work per sample belongs in `answers`.
        """
        return {}

    def predict(self, model: nn.Module, batch: Batch) -> Sequence[dict[str, Any]]:
        """Return the network's answer to each input of a batch, JSON values by name; none by default.

        The engine calls this like `measure`, with new inputs, whose targets mean nothing. The value ``picture`` is a
        uint8 tensor ``[C, H, W]`` on the host.
        """
        return ()

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return pictures, texts and sounds of the model to show after each validation, by name; nothing by default.

        The engine calls this like `measure`, with the first batch of the validation split.
        """
        return {}


class OneNetworkTask(Task):
    """Base class of a task that trains one network with one loss, and whose metrics are means over the terms."""

    @override
    def objectives(self) -> tuple[Objective, ...]:
        return (Objective(learner="main", modules=("",), loss=self.loss),)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch over its terms, a float32 scalar."""

    @override
    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        return {name: total / terms for name, total in sums.items()}


@dataclass(frozen=True, kw_only=True)
class OutputsTask(OneNetworkTask):
    """Base class of a task whose network returns K numbers for each sample, for targets ``[N]`` or ``[N, K]``.

    All metrics come from `score`, so that an evaluation calls the network once: `measure` returns nothing.

    Attributes:
        num_outputs: K.
        output_names: Names of the outputs in predictions; if empty, their numbers.
    """

    num_outputs: PositiveInt
    output_names: tuple[str, ...] = ()

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each output of each sample, float32 ``[N, K]`` as both arguments."""

    @abstractmethod
    def score_of(self, outputs: Table, targets: Table) -> dict[str, float]:
        """Return the metrics of a split by name, from the network's outputs and the targets, both ``[N, K]``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the outputs, or else their numbers."""
        return self.output_names or tuple(map(str, range(self.num_outputs)))

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what the network returns, float32 ``[N, K]``; for one output it may return ``[N]``.

        Raises:
            ConfigError: It returns another shape, which is never broadcast against the targets.
        """
        output: Any = model(batch.inputs)
        shape = (batch.samples, self.num_outputs)
        if not isinstance(output, Tensor) or output.shape not in (
            shape,
            shape[: -1 if self.num_outputs == 1 else None],
        ):
            made = str(list(output.shape)) if isinstance(output, Tensor) else instance(output)
            what = f"{type(model).__name__} returns {made}, and {list(shape)} are wanted: {shape[1]} for each sample"
            raise ConfigError(what, "let it return the data set's fact num_outputs numbers a sample, as model=mlp does")
        return output.float().reshape(shape)

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses(self.outputs(model, batch), self._targets(batch)).mean()

    @override
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {}

    @override
    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Table]:
        """Return the mean loss of each sample, its K outputs and its K targets, float64 ``[1 + 2 K]``."""
        outputs, targets = self.outputs(model, batch), self._targets(batch)
        columns = torch.cat([self.losses(outputs, targets).mean(1, keepdim=True), outputs, targets], 1)
        return list(columns.cpu().double().numpy())

    @override
    def score(self, answers: Sequence[Table]) -> dict[str, float]:
        table = np.stack(answers)
        outputs, targets = np.split(table[:, 1:], 2, axis=1)
        return {"loss": float(table[:, 0].mean()), **self.score_of(outputs, targets)}

    def _targets(self, batch: Batch) -> Tensor:
        return batch.targets.float().reshape(batch.samples, self.num_outputs)


def token_sums(losses: Tensor, best: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return each sample's ``loss`` and right guesses, ``top1``, ``[N]`` in the device's widest dtype, of its tokens.

    The losses, the most probable tokens and the targets are ``[N, T]``.
    """
    dtype = widest(losses.device)
    return {"loss": losses.sum(1, dtype=dtype), "top1": (best == targets).sum(1, dtype=dtype)}


def perplexity(loss: float) -> float:
    """Return the number of equally likely tokens that gives the same mean loss per token in nats, its exponential.

    It is infinity above 709 nats, where a double overflows.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
