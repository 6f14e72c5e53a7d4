"""Interface of a probe, which observes training steps and changes no tensor.

Before each step of each learner (a model with its optimizer; a GAN has two) the trainer asks the probe for a watch, an
observer of that step. A step without a watch costs nothing.
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
    from mptrain.records import Record


class Watch(Protocol):
    """Interface of an observer of one training step of one learner.

    A learner is a model with its optimizer; a GAN has two. The trainer calls the methods in the order below.
    """

    def passes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager that the trainer enters around the forward and backward passes of all micro-batches.

        Args:
            model: The model in training mode. The watch removes any hooks it adds.
        """

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Observe the step's accumulated gradients, after the overflow check and before they are unscaled.

        Args:
            weights: Weights of the learner; `Weights.gradients` are still scaled.
            verdict: Result of the overflow check on the gradients, as device tensors.
            scale: Loss scale, float32 of shape (1,).
        """

    def updated(self, weights: Weights) -> None:
        """Observe the weights after the step's update, or after the overflow check has skipped it.

        Args:
            weights: Weights of the learner.
        """

    def records(self) -> Sequence[Record]:
        """Return the records of the step to write to the run's files; may wait for the device."""


class Probe(Protocol):
    """Interface of a probe: it chooses the training steps to observe and creates an observer for each."""

    @property
    def sees_modules(self) -> bool:
        """True if the observers hook modules, which must then not be compiled into one graph."""

    def watch(self, learner: str, step: int) -> Watch | None:
        """Return an observer for one training step of one learner, or None if the step is not observed.

        Args:
            learner: Name of the learner.
            step: Number of the step, from 1; skipped steps count.
        """


@dataclass(frozen=True)
class NoProbe:
    """Probe that observes no training step; overflows are recorded without a probe."""

    @property
    def sees_modules(self) -> bool:
        """False, because it hooks no module."""
        return False

    def watch(self, learner: str, step: int) -> None:
        """Return None, because no step is observed; see `Probe.watch`."""
