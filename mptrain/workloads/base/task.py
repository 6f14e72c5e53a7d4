"""Interface between a workload and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.exhibits import Exhibit


@dataclass(frozen=True)
class Objective:
    """Loss and the parameters that it trains; the engine creates a learner with its own scaler for each objective.

    Attributes:
        learner: Name of the learner in records; ``main`` if there is only one.
        modules: Names of the trained modules or parameters; an empty name means the whole model. No other parameters
            get gradients from this loss.
        loss: Function of the model and a micro-batch on the device that returns the mean loss over the terms, a
            float32 scalar.
    """

    learner: str
    modules: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], Tensor]


class Task(Protocol):
    """Workload: losses, metrics and exhibits. Subclasses inherit the default methods.

    Attributes:
        metric: Name of the metric that selects the best checkpoint; None if there is no such metric.
        higher_is_better: Whether a higher metric is better.
        term: Plural noun for one term of the loss; throughput is counted in these.
        shares: Names of metrics that are fractions of samples, each right or wrong. Their 95 % CI is Wilson's, from
            the number of samples.
        refuses: Facts of data sets with which the task is incompatible, because their targets are of another kind.
    """

    metric: str | None
    higher_is_better: bool
    term: str = "samples"
    shares: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()

    def objectives(self) -> tuple[Objective, ...]:
        """Return the losses in the order of their steps on each batch."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the quantities to sum over a split, by name: float64 ``[N]``, each sample's sum over its terms.

        A scalar, the sum over the whole batch, is accepted too, but then no confidence interval can be computed.
        The engine calls this method in evaluation mode, without gradients, with separate random numbers that are
        the same in every evaluation.
        """
        ...

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Return metrics from the sums over a whole split; ``loss``, if present, is the mean over all terms."""
        ...

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """Return N host values, one per sample, for metrics that are not sums; none by default.

        The engine calls this method after `measure`, under the same conditions.
        """
        return ()

    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """Return metrics from the answers to a whole split, which come in any order and may repeat.

        The metrics add to those of `summarise`. The bootstrap of a confidence interval calls this method many times
        on lists of the same length, so work per sample belongs in `answers`.
        """
        return {}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """Return pictures, texts and sounds to show after each validation, by name; nothing by default.

        The engine calls this method like `measure`, with the first batch of the validation split.
        """
        return {}
