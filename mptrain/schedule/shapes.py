"""Learning rate schedules: pure functions from the number of an update to a factor of the base learning rate.

A skipped step is not an update and does not advance a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from mptrain.fields import Fraction, NonNegativeInt, PositiveFloat, PositiveInt


class Schedule(Protocol):
    """Learning rate schedule."""

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate for update number ``update`` (from 0) of ``planned``."""


def warmup_factor(update: int, warmup: int) -> float:
    """Return the factor of a linear warm-up: 1/warmup at the first update, 1 from update ``warmup - 1`` on."""
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def progress(update: int, planned: int, warmup: int) -> float:
    """Return the progress of the part after the warm-up, 0 to 1; it reaches 1 only after the last planned update."""
    return min(1.0, max(0.0, (update - warmup) / max(1, planned - warmup)))


@dataclass(frozen=True)
class Constant:
    """Constant learning rate after an optional warm-up.

    Attributes:
        warmup: Updates of linear warm-up.
    """

    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return 1 after the warm-up."""
        return warmup_factor(update, self.warmup)


@dataclass(frozen=True)
class Step:
    """Decay by a factor at each milestone (He et al. 2015 divide by 10 at 30, 60 and 80 of 90 epochs).

    Attributes:
        milestones: Fractions of the planned updates, each from 0 to 1.
        gamma: Factor of the rate at each milestone.
        warmup: Updates of linear warm-up.
    """

    milestones: tuple[Fraction, ...] = (0.333333, 0.666667, 0.888889)
    gamma: PositiveFloat = 0.1
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return ``gamma`` to the power of the number of milestones passed."""
        # In floating point 0.55 * 100 is 55.00000000000001; the milestone is 55.
        passed = sum(update >= round(milestone * planned) for milestone in self.milestones)
        return warmup_factor(update, self.warmup) * self.gamma**passed


@dataclass(frozen=True)
class Cosine:
    """Cosine decay without restarts (Loshchilov and Hutter 2017).

    Attributes:
        final: Factor of the base rate at the end.
        warmup: Updates of linear warm-up.
    """

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return a factor that falls from 1 after the warm-up to ``final`` after the last planned update."""
        wave = 0.5 * (1 + math.cos(math.pi * progress(update, planned, self.warmup)))
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * wave)


@dataclass(frozen=True)
class Linear:
    """Linear decay.

    Attributes:
        final: Factor of the base rate at the end.
        warmup: Updates of linear warm-up.
    """

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return a factor that falls from 1 after the warm-up to ``final`` after the last planned update."""
        line = 1 - progress(update, planned, self.warmup)
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * line)


@dataclass(frozen=True)
class InverseSqrt:
    """Decay with the inverse square root of the update's number after the warm-up (Vaswani et al. 2017, equation 3).

    The rate at the end of the warm-up is the base rate; in the paper it is width^-0.5 * warmup^-0.5.

    Attributes:
        warmup: Updates of linear warm-up.
    """

    warmup: PositiveInt = 4000

    def factor(self, update: int, planned: int) -> float:
        """Return the factor: 1 at update ``warmup - 1``, less before and after."""
        return min(warmup_factor(update, self.warmup), math.sqrt(self.warmup / (update + 1)))
