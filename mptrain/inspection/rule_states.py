"""The states that a loss scaling rule goes through when it runs over records, each of them computed once.

A rule computes with tensors, some twenty operators for a step. Its state after a step follows from the state before and from the
verdict alone, and the states of most rules come back: a scale and a count of clean steps below its window. So a state is kept with those
that followed it, and the rule itself is asked only about what did not happen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mptrain.numerics.verdict import Verdict
from mptrain.scaler.base import Scaler, ScalerState

_CPU = torch.device("cpu")

#: States that are kept at most, and ways from one to the next; fairseq's rule has a window of 16,384 steps, at each of a few scales.
_MOST: Final = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A rule's state.

    Attributes:
        tensors: As the rule has it.
        scale: Its loss scale.
    """

    tensors: ScalerState
    scale: float


class States:
    """The states of one rule.

    Args:
        scaler: The rule; it sees tensors of the CPU.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._known: dict[str, State] = {}
        self._following: dict[tuple[State, bool, float], State] = {}
        self.first = self._state(scaler.initial(_CPU))

    def after(self, state: State, overflow: bool, grad_norm: float, measured: float) -> State:
        """Return the state after a step, exactly as the rule computes it.

        Args:
            state: Before the step.
            overflow: Whether the step overflowed.
            grad_norm: Norm of its unscaled gradients, if it did not.
            measured: What the rule measured of its gradients; `math.nan` where it measured nothing.
        """
        found = self._following.get((state, overflow, measured))
        if found is None:
            verdict = _verdict(overflow, math.inf if overflow else grad_norm, state.scale, measured)
            if _MOST in (len(self._known), len(self._following)):  # let go of all but the one in use
                self._known.clear()
                self._following.clear()
            found = self._state(self._scaler.after(state.tensors, verdict))
            if not verdict.norm_was_read:  # else what follows depends on more than what it is kept by
                self._following[state, overflow, measured] = found
        return found

    def _state(self, tensors: ScalerState) -> State:
        name = repr([(key, value.dtype, value.tolist()) for key, value in tensors.items()])
        return self._known.setdefault(name, State(tensors, float(tensors["scale"])))


class _Verdict(Verdict):
    """A verdict that notes whether the norms, which are others at every step, were read."""

    norm_was_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("grad_norm", "norms"):
            self.norm_was_read = True
        return super().__getattribute__(name)

    def __getitem__(self, place: Any) -> Any:
        self.norm_was_read = True
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        self.norm_was_read = True
        return super().__iter__()


def _verdict(overflow: bool, grad_norm: float, scale: float, measured: float) -> _Verdict:
    """As the step would have judged it; of the gradients' norms only the one of all is on record."""
    return _Verdict(
        *_JUDGED[overflow], grad_norm=_one(grad_norm), norms=_one(grad_norm * scale), measured=_one(measured)
    )


def _one(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=_CPU)


#: Overflow, applied and skip of a clean step and of one that overflowed.
_JUDGED: Final = {
    overflow: (_one(overflow, torch.bool), _one(not overflow, torch.bool), _one(overflow, torch.float32))
    for overflow in (False, True)
}
