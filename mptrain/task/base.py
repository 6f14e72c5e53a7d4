"""The interface between a workload and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from mptrain.dataset.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Objective:
    """One loss and the parameters it trains; the engine makes a learner of it, with a scaler of its own.

    Attributes:
        learner: The learner's name in records; ``main`` where there is only one.
        modules: Names of the modules, or parameters, that it trains; an empty name means the whole model.
        loss: From the model and a micro-batch on the device to the mean loss over its terms, a float32 scalar.
    """

    learner: str
    modules: tuple[str, ...]
    loss: Callable[[nn.Module, Batch], Tensor]


class Task(Protocol):
    """A workload.

    Attributes:
        metric: The name of the metric that decides which checkpoint is best.
        higher_is_better: Its direction.
    """

    metric: str
    higher_is_better: bool

    def objectives(self) -> tuple[Objective, ...]:
        """The losses, in the order in which they are stepped."""

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over a batch's terms, float64 scalars on the device; called in evaluation mode without gradients."""

    def summarise(self, sums: Mapping[str, float], terms: int) -> dict[str, float]:
        """Metrics from the sums over a whole split; ``loss`` is always among them."""
