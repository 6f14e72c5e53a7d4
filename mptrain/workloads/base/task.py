"""Protocol of a task (the losses, metrics and exhibits of a workload), as the training engine uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.exhibits import Exhibit


@dataclass(frozen=True)
class Objective:
    """Loss of a task, with the parameters that it trains.

    For each objective the engine creates a learner (the trained weights with their optimizer, loss scaler and learning
    rate schedule). Most tasks have one objective; a GAN has two.

    Attributes:
        learner: Name of the learner in records; ``main`` if there is only one.
        modules: Names of the trained modules or parameters; an empty name means the whole model. No other parameters
            get gradients from this loss.
        loss: Function of the model and a micro-batch on the device that returns the mean loss over the terms (samples
            or tokens), a float32 scalar.
    """

    learner: str
    modules: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], Tensor]


class Task(Protocol):
    """Protocol of a task: how a model is trained and judged, with its losses, metrics and exhibits.

    Subclasses inherit the default methods. A *term* is one of the values that a loss is averaged over, such as a sample
    or a token.

    Attributes:
        metric: Name of the metric that selects the best checkpoint; None if there is no such metric.
        higher_is_better: Whether a higher metric is better.
        term: Plural noun for the terms of the loss, such as ``tokens``; throughput is counted in these.
        shares: Names of metrics that are fractions of samples, each right or wrong. Their 95 % CI is Wilson's, from the
            number of samples.
        refuses: Names of data set facts (see `mptrain.workloads.base.dataset.Dataset.facts`), such as ``boxes``. Data
            sets with one of these have targets of another kind, and the task is incompatible with them.
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
        """Return the loss and other quantities of one evaluation batch, by name; the engine sums them over a split.

        The engine calls this method in evaluation mode, without gradients, with separate random numbers that are the
        same in every evaluation.

        Args:
            model: Model on the device, in evaluation mode.
            batch: Prepared batch of N samples on the device.

        Returns:
            For each name float64 ``[N]``, each sample's sum over its terms. A scalar, the sum over the whole batch, is
            accepted too, but then no confidence interval can be computed.
        """
        ...

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return the metrics of a split by name, computed from the sums of `measure` over all its batches.

        Args:
            sums: Sum of each quantity over the whole split, by name.
            terms: Number of loss terms (samples or tokens) of the split; ``loss``, if present, is the mean over all of
                them.
        """
        ...

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """Return the model's results for one batch, for metrics that are not sums, such as BLEU; none by default.

        The engine calls this method after `measure`, under the same conditions, and passes the results of a whole split
        to `score`.

        Returns:
            N host values, one per sample.
        """
        return ()

    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of a split by name that need the results of all its samples together; none by default.

        The metrics add to those of `summarise`. The bootstrap of a confidence interval calls this method many times on
        lists of the same length, so work per sample belongs in `answers`.

        Args:
            answers: Results of `answers` for all samples, which come in any order and may repeat.
        """
        return {}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return pictures, texts and sounds of the model to show after each validation, by name; nothing by default.

        The engine calls this method like `measure`, with the first batch of the validation split.
        """
        return {}
