"""Interface of a loss scaling rule, which chooses the factor that multiplies the loss of each training step.

A scaler holds the constants of its rule and no state. The state is a mapping of device tensors of shape (1,), one of
them ``scale``; the engine keeps it and saves it in checkpoints. A rule never copies tensor values to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mptrain.numerics.measures import Measure
    from mptrain.numerics.overflow_check import Verdict

ScalerState = Mapping[str, Tensor]
OnOverflow = Literal["skip", "apply"]


class Scaler(Protocol):
    """Interface of a loss scaling rule, which computes the next loss scale after each training step.

    A rule that needs to know more about the gradients than whether they are finite also has a property ``measure``: one
    of `mptrain.numerics.measures` or one of its own. The ``verdict`` that `after` gets then has the result as
    ``measured``. An overflow is a step with inf or NaN in its gradients; a clean step is one without.
    """

    @property
    def on_overflow(self) -> OnOverflow:
        """Treatment of an update whose gradients have inf or NaN: ``skip`` leaves it out, ``apply`` applies it."""

    @property
    def floor(self) -> float:
        """Loss scale at or below which the rule backs off no further; there, no lower scale can fix an overflow."""

    def initial(self, device: torch.device) -> ScalerState:
        """Return the state before the first training step: ``scale`` (float32) and other tensors of the rule."""

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the state of a resumed run from any rule's saved one, and sentences for the user on differences."""

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state for the next training step from an overflow check; ``state`` is not modified."""

    def describe(self) -> str:
        """Return one line that describes the rule with its constants, such as ``static 2^10, on overflow skip``."""


def measure_of(scaler: Scaler) -> Measure | None:
    """Return the measure of the gradients that a loss scaling rule needs in each step, or None if it needs none."""
    return getattr(scaler, "measure", None)


def reads_norms(scaler: Scaler) -> bool:
    """Return whether a rule may read the norms of single parameters' gradients: False for those of mptrain itself."""
    return not type(scaler).__module__.startswith("mptrain.scaler.")
