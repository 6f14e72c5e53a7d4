"""Interface of a probe, which observes training steps and changes no tensor.

Before each step of each learner the trainer asks the probe for a watch, an observer of that step. A step without a
watch costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mptrain.numerics.overflow_check import Verdict
    from mptrain.optimizer.weights import Weights
    from mptrain.system.records import Record


class Watch(Protocol):
    """Interface of an observer of one training step of one learner; the methods are called in the order below."""

    def passes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the passes of all micro-batches of a model in training mode; it removes its hooks."""

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Observe the accumulated gradients after the overflow check, still multiplied by ``scale`` of shape (1,)."""

    def updated(self, weights: Weights) -> None:
        """Observe the weights after the step's update, or after the overflow check has skipped it."""

    def records(self) -> Sequence[Record]:
        """Return the records of the step to write to the run's files; may wait for the device."""


class Probe(Protocol):
    """Interface of a probe: it chooses the training steps to observe and creates an observer for each."""

    @property
    def sees_modules(self) -> bool:
        """True if the observers hook modules, which must then not be compiled into one graph."""

    def watch(self, learner: str, step: int) -> Watch | None:
        """Return an observer for a learner's step (from 1; skipped steps count), or None if it is not observed."""


@dataclass(frozen=True)
class NoProbe:
    """Probe that observes no training step; overflows are recorded without a probe."""

    @property
    def sees_modules(self) -> bool:
        """False, because it hooks no module."""
        return False

    def watch(self, learner: str, step: int) -> None:
        """Return None."""
