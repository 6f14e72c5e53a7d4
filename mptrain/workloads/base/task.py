"""The interface between a workload and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.exhibits import Exhibit


@dataclass(frozen=True)
class Objective:
    """One loss and the parameters it trains; the engine makes a learner of it, with a scaler of its own.

    Attributes:
        learner: The learner's name in records; ``main`` where there is only one.
        modules: Names of the modules, or parameters, that it trains; an empty name means the whole model. Only they
            get gradients from this loss, whatever else it flows through.
        loss: From the model and a micro-batch on the device to the mean loss over its terms, a float32 scalar.
    """

    learner: str
    modules: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], Tensor]


class Task(Protocol):
    """A workload. Derive from this class, then only what differs has to be written.

    Attributes:
        metric: The name of the metric that decides which checkpoint is best; None where none can.
        higher_is_better: Its direction.
        term: What one term of the loss is, in the plural; throughput is counted in these.
        shares: Names of metrics that are shares of samples: right or wrong, one by one. What a test set can tell about
            them follows from how many samples it has.
        refuses: Facts of data sets that it does not go with: targets are something else there.
    """

    metric: str | None
    higher_is_better: bool
    term: str = "samples"
    shares: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()

    def objectives(self) -> tuple[Objective, ...]:
        """The losses, in the order in which they are stepped on each batch."""
        ...

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """What is summed up over a split, by name: float64 ``[N]``, the sum over the terms of each sample.

        A scalar, the sum over the whole batch, will do too, but then nothing tells how far the metrics would
        move on other samples of the same kind. Called in evaluation mode, without gradients, with random numbers of its own that are the same in every
        evaluation.
        """
        ...

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Metrics from the sums over a whole split; ``loss``, where there is one, is the mean over all terms."""
        ...

    def answers(self, model: nn.Module, batch: Batch) -> Sequence[Any]:
        """What the model says of each sample, N host values, for metrics that are no sums; none by default.

        Called as `measure` is, behind it.
        """
        return ()

    def score(self, answers: Sequence[Any]) -> dict[str, float]:
        """Metrics from the answers to a whole split, in any order; and some may be there twice.

        They stand beside those of `summarise`. Called again and again where an interval is wanted, on lists of the same
        length, so what can be done for one sample at a time belongs into `answers`.
        """
        return {}

    def exhibits(self, model: nn.Module, batch: Batch) -> dict[str, Exhibit]:
        """What to show after each validation, by name: pictures, texts, sounds; nothing by default.

        Called as `measure` is, with the first batch of the validation split.
        """
        return {}
