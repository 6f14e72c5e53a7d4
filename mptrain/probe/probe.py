"""Protocols of a probe, which observes training steps and changes no tensor.

Before each step of each learner the trainer asks the probe for a watch. A step without a watch costs nothing.
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
    """Observer of one step of one learner. The trainer calls its methods in the order below."""

    def passes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager for the forward and backward passes of all micro-batches.

        Args:
            model: The model in training mode. The watch removes any hooks it adds.
        """

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Observe the gradients after accumulation and before unscaling.

        Args:
            weights: The weights; `Weights.gradients` are still scaled.
            verdict: The verdict on the gradients, as device tensors.
            scale: The loss scale, float32 of shape (1,).
        """

    def updated(self, weights: Weights) -> None:
        """Observe the weights after the update, or after the verdict skipped it."""

    def records(self) -> Sequence[Record]:
        """Return the records of the step; may wait for the device."""


class Probe(Protocol):
    """Choice of the steps to observe, and of how to observe them."""

    @property
    def sees_modules(self) -> bool:
        """True if its watches hook modules, which must then not be compiled into one graph."""

    def watch(self, learner: str, step: int) -> Watch | None:
        """Return the watch for one step of one learner, or None if the step is not observed.

        Args:
            learner: Name of the learner.
            step: Number of the step, from 1; skipped steps count.
        """


@dataclass(frozen=True)
class NoProbe:
    """Probe that observes no step. The overflow records of every run do not need a probe."""

    @property
    def sees_modules(self) -> bool:
        """False, because it hooks nothing."""
        return False

    def watch(self, learner: str, step: int) -> None:
        """Return None."""
