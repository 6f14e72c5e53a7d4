"""Base classes of loss scaling rules, which choose the factor that multiplies the loss of each training step.

A scaler holds the constants of its rule and no state. The state is a mapping of device tensors of shape (1,), one of
them ``scale``; the engine keeps it and saves it in checkpoints. A rule copies no value from a device to the host.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mptrain.numerics.formats import FLOAT32
from mptrain.system.errors import ConfigError, Problem, instance
from mptrain.system.fields import PositiveFloat
from mptrain.system.words import scale_in_words

if TYPE_CHECKING:
    from mptrain.numerics.overflow_check import Measure, Verdict

ScalerState = Mapping[str, Tensor]
OnOverflow = Literal["skip", "apply"]

#: The lowest and the highest value of a state tensor; None means no limit.
Limits = tuple[float | None, float | None]


def with_scale(state: ScalerState) -> ScalerState:
    """Return the state of a scaler; raise ConfigError if its ``scale`` is no float32 tensor."""
    scale = state.get("scale")
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float32:
        raise ConfigError(
            f"the scaler's state has as scale {instance(scale) if not isinstance(scale, Tensor) else scale.dtype}",
            "initial() and after() return a mapping with scale, a float32 tensor of shape (1,)",
        )
    return state


class Scaler(abc.ABC):
    """Loss scaling rule, which computes the next loss scale after each training step.

    An overflow is a step with inf or NaN in its gradients; a clean step is one without.

    Attributes:
        on_overflow: Treatment of an update whose gradients have inf or NaN: ``skip`` or ``apply``.
        reads_norms: `after` reads the norms of a clean step, which ``verdict.norms`` has only if this is True. A class
            with its own `after` that does not must say so.
        is_identity: The scale is always 1, so that gradients need no division. A class of which this holds must say so.
    """

    on_overflow: OnOverflow = "skip"
    reads_norms: bool = True
    is_identity: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.is_identity = vars(cls).get("is_identity", False)
        if "after" in vars(cls):
            cls.reads_norms = vars(cls).get("reads_norms", True)

    @property
    def measure(self) -> Measure | None:
        """Measure of the gradients that `after` gets as ``verdict.measured``, or None if it needs none."""
        return None

    @property
    @abc.abstractmethod
    def floor(self) -> float:
        """Loss scale at or below which the rule backs off no further; there, no lower scale can fix an overflow."""

    @abc.abstractmethod
    def initial(self, device: torch.device) -> ScalerState:
        """Return the state before the first training step: ``scale`` (float32) and other tensors of the rule."""

    @abc.abstractmethod
    def after(self, state: ScalerState, verdict: Verdict) -> ScalerState:
        """Return the state for the next training step from an overflow check; ``state`` is not modified."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return one line that describes the rule with its constants, such as ``static 2^10, on overflow skip``."""

    def limits(self) -> Mapping[str, Limits]:
        """Return the range to which a resumed run clamps tensors of the saved state, by name."""
        return {}

    def resume(self, saved: ScalerState, device: torch.device) -> tuple[ScalerState, list[str]]:
        """Return the state of a resumed run, and a sentence for the user about each difference from the saved one.

        The saved state is kept bit for bit within the `limits`. If another rule saved it (its tensors have other
        names), the rule starts again.
        """
        own, limits = self.initial(device), self.limits()
        if own.keys() != saved.keys():
            scale = float(own["scale"])
            return own, [f"the checkpoint was saved with another scaler: the loss scale starts again at {scale:g}"]
        state = {key: saved[key].to(own[key].dtype).to(device) for key in own}
        for key, (low, high) in limits.items():
            if low is not None or high is not None:
                state[key] = state[key].clamp(low, high)
        notes = [
            f"the scaler's {key} continues at {float(state[key]):g}; it was {float(saved[key]):g} in the checkpoint"
            for key in state
            if float(state[key]) != float(saved[key])
        ]
        return state, notes


@dataclass(frozen=True)
class RangedScaler(Scaler):
    """Loss scaling rule whose scale starts at ``init_scale`` and stays within ``min_scale`` to ``max_scale``.

    Without ``min_scale`` the scale may fall to 0, without ``max_scale`` it may grow to the largest FP32 number.
    """

    init_scale: PositiveFloat = 65536.0
    min_scale: PositiveFloat | None = None
    max_scale: PositiveFloat | None = None
    on_overflow: OnOverflow = "skip"

    def __post_init__(self) -> None:
        problems = []
        lowest = FLOAT32.smallest_normal if self.min_scale is None else self.min_scale
        if not lowest <= self.init_scale <= self.ceiling:
            floor = "the smallest normal FP32 number" if self.min_scale is None else f"scaler.min_scale={lowest:g}"
            highest = "the largest FP32 number" if self.max_scale is None else f"scaler.max_scale={self.max_scale:g}"
            problems.append(
                Problem(
                    f"scaler.init_scale={self.init_scale:g} is outside {floor} to {highest}",
                    "set scaler.init_scale to a value between scaler.min_scale and scaler.max_scale",
                )
            )
        if self.ceiling > FLOAT32.max:
            problems.append(
                Problem(
                    f"scaler.max_scale={self.max_scale:g} is above the largest FP32 number, {FLOAT32.max:g}",
                    "the scale is an FP32 number: set scaler.max_scale to one, for example 2^24",
                )
            )
        if lowest < FLOAT32.smallest_normal:
            problems.append(
                Problem(
                    f"scaler.min_scale={lowest:g} is below the smallest normal FP32 number",
                    "gradients cannot be unscaled with a scale near 0; the usual floor is 1",
                )
            )
        if problems:
            raise ConfigError(problems)

    @property
    def floor(self) -> float:
        """Lowest loss scale: ``min_scale``, or 0 without one."""
        return 0.0 if self.min_scale is None else self.min_scale

    @property
    def ceiling(self) -> float:
        """Highest loss scale: ``max_scale``, or the largest FP32 number without one."""
        return FLOAT32.max if self.max_scale is None else self.max_scale

    def initial(self, device: torch.device) -> ScalerState:
        """Return ``scale``, float32 of shape (1,)."""
        return {"scale": torch.tensor([self.init_scale], dtype=torch.float32, device=device)}

    def limits(self) -> Mapping[str, Limits]:
        """Return the range of ``scale``."""
        return {"scale": (self.min_scale, self.max_scale)}

    def range_in_words(self) -> str:
        """Return the range for `describe`, such as ``within 1 to 2^24``."""
        if self.min_scale is None:
            return "without floor" + (
                " or ceiling" if self.max_scale is None else f", at most {scale_in_words(self.max_scale)}"
            )
        if self.max_scale is None:
            return f"at least {scale_in_words(self.min_scale)}, without ceiling"
        return f"within {scale_in_words(self.min_scale)} to {scale_in_words(self.max_scale)}"
