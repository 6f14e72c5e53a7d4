"""Protocols of a probe that looks at a training step: it reads tensors on their way and changes none of them.

A probe is asked before each step of each learner for a watch. Most steps are not watched, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mptrain.numerics.verdict import Verdict
    from mptrain.optimizer.weights import Weights
    from mptrain.records import Record


class Watch(Protocol):
    """Looks at one step of one learner; its methods are called in this order."""

    def passes(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around the forward and backward passes of all micro-batches.

        Args:
            model: In training mode. Hooks that are put on it have to be taken off again.
        """

    def judged(self, weights: Weights, verdict: Verdict, scale: Tensor) -> None:
        """Once all gradients are gathered, before anything unscales them.

        Args:
            weights: `Weights.gradients` still carry the scale.
            verdict: What is known of them; device tensors.
            scale: The loss scale, float32 of shape (1,).
        """

    def updated(self, weights: Weights) -> None:
        """Once the weights have moved, or were left alone where the verdict refused the update."""

    def records(self) -> Sequence[Record]:
        """Return the records of what was seen; may wait for the device."""


class Probe(Protocol):
    """Decides which steps are looked at, and how."""

    @property
    def sees_modules(self) -> bool:
        """True where its watches hook modules, so that these may not be compiled into one piece."""

    def watch(self, learner: str, step: int) -> Watch | None:
        """The watch for one step of one learner; None for those that are left alone.

        Args:
            learner: Its name.
            step: Attempts, this one included, from 1.
        """


@dataclass(frozen=True)
class NoProbe:
    """Looks at no step; what every run puts on record about overflows costs nothing and needs no probe."""

    @property
    def sees_modules(self) -> bool:
        """It hooks nothing."""
        return False

    def watch(self, learner: str, step: int) -> None:
        """Never one that looks."""
