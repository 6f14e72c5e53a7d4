"""Protocol of a loss scaler.

A scaler holds the constants of its rule and no state. The state is a mapping of device tensors of shape (1,), one of
them ``scale``; the engine keeps it and saves it in checkpoints. A rule reads tensors and returns tensors, and never
copies their values to the host.
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
    """Loss scaling rule.

    A rule that needs to know more about the gradients than whether they are finite also has a property ``measure``: one
    of `mptrain.numerics.measures` or one of its own. ``verdict.measured`` then holds the measurement.
    """

    @property
    def on_overflow(self) -> OnOverflow:
        """Treatment of an update whose gradients are not finite: ``skip`` or ``apply``."""

    @property
    def floor(self) -> float:
        """Scale at or below which the rule backs off no further, so that no lower scale can fix an overflow there."""

    def initial(self, device: torch.device) -> ScalerState:
        """Return the state before the first step; ``scale`` is float32 of shape (1,)."""

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the state of a resumed run.

        Args:
            saved: The state in a checkpoint, possibly of another rule or of other constants.
            device: The device of the resumed run.

        Returns:
            The state, and one sentence for each saved value that does not fit this rule's constants.
        """

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state after a step. ``state`` is not modified."""

    def describe(self) -> str:
        """Return a one-line description of the rule, for display."""


def measure_of(scaler: Scaler) -> Measure | None:
    """Return the measure of the gradients that a rule needs, or None if it needs none."""
    return getattr(scaler, "measure", None)


def reads_norms(scaler: Scaler) -> bool:
    """Return whether a rule may read the norms of single gradients. The rules of mptrain itself do not."""
    return not type(scaler).__module__.startswith("mptrain.scaler.")
