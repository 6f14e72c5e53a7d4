"""What every loss scaler is: constants, a first state, and the state that follows a verdict.

A scaler holds no state of its own. Its state is a mapping of device tensors of shape (1,), ``scale`` among them, which
the engine keeps, saves whole, compares and replays. A rule reads tensors and returns tensors; it never asks the host
for their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mptrain.numerics.measures import Measure
    from mptrain.numerics.verdict import Verdict

ScalerState = Mapping[str, Tensor]
OnOverflow = Literal["skip", "apply"]


class Scaler(Protocol):
    """A loss scaling rule.

    One that must know more of the gradients than whether they are finite has a property ``measure`` besides, one of
    `mptrain.numerics.measures` or one of its own; then ``verdict.measured`` holds the measurement.
    """

    @property
    def on_overflow(self) -> OnOverflow:
        """What happens to an update whose gradients are not finite: ``skip`` or ``apply``."""

    @property
    def floor(self) -> float:
        """From this scale down the rule backs off no further; an overflow there is none that a lower scale would mend."""

    def initial(self, device: torch.device) -> ScalerState:
        """The state before the first step; ``scale`` is float32 of shape (1,)."""

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """The state to go on with after a restart.

        Args:
            saved: The state in a checkpoint, perhaps of another rule or of other constants.
            device: Where to go on.

        Returns:
            The state, and what of the saved one does not fit this rule's constants, one sentence each.
        """

    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """The state after a step; the argument is left as it was."""

    def describe(self) -> str:
        """The rule in one line, for the person at the terminal."""


def measure_of(scaler: Scaler) -> Measure | None:
    """What a rule asks to know of the gradients besides the verdict; None where it asks for nothing."""
    return getattr(scaler, "measure", None)


def reads_norms(scaler: Scaler) -> bool:
    """Return whether a rule may look at the norms of single gradients; those that come with mptrain do not."""
    return not type(scaler).__module__.startswith("mptrain.scaler.")
