"""Learning rate schedules: pure functions from the number of an update to a factor of the base learning rate.

A training step whose update is skipped (for an overflow) does not count as an update and does not advance a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from mptrain.fields import Fraction, NonNegativeInt, PositiveFloat, PositiveInt


class Schedule(Protocol):
    """Interface of a learning rate schedule."""

    def factor(self, update: int, planned: int) -> float:
        """Return the factor by which the base learning rate is multiplied in one update.

        Args:
            update: Number of the update, from 0.
            planned: Number of planned updates of the run.
        """


def warmup_factor(update: int, warmup: int) -> float:
    """Return the factor of the learning rate from a linear warm-up.

    Args:
        update: Number of the update, from 0.
        warmup: Number of updates with warm-up; 0 for none.

    Returns:
        1/warmup at the first update, rising linearly to 1 at update ``warmup - 1``, then 1.
    """
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def progress(update: int, planned: int, warmup: int) -> float:
    """Return the progress of a run after the warm-up of the learning rate, from 0 to 1.

    Args:
        update: Number of the update, from 0.
        planned: Number of planned updates, including those with warm-up.
        warmup: Number of updates with warm-up, during which the progress is 0.

    Returns:
        The share of the remaining updates that were applied; it reaches 1 only after the last planned update.
    """
    return min(1.0, max(0.0, (update - warmup) / max(1, planned - warmup)))


@dataclass(frozen=True)
class Constant:
    """Schedule with a constant learning rate after an optional warm-up.

    Attributes:
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update: that of the warm-up, then 1.

        See `Schedule.factor`.
        """
        return warmup_factor(update, self.warmup)


@dataclass(frozen=True)
class Step:
    """Schedule that multiplies the learning rate by a factor at each milestone of the run.

    He et al. 2015 divide it by 10 after 30, 60 and 80 of 90 epochs.

    Attributes:
        milestones: Points of the run at which the rate changes, as fractions of the planned updates, each from 0 to 1.
        gamma: Factor of the learning rate at each milestone.
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    milestones: tuple[Fraction, ...] = (0.333333, 0.666667, 0.888889)
    gamma: PositiveFloat = 0.1
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update; see `Schedule.factor`.

        It is the warm-up's factor times ``gamma`` to the power of the number of milestones passed.
        """
        # In floating point 0.55 * 100 is 55.00000000000001; the milestone is 55.
        passed = sum(update >= round(milestone * planned) for milestone in self.milestones)
        return warmup_factor(update, self.warmup) * self.gamma**passed


@dataclass(frozen=True)
class Cosine:
    """Schedule with cosine decay of the learning rate, without restarts (Loshchilov and Hutter 2017).

    Attributes:
        final: Learning rate after the last planned update, as a fraction of the base rate.
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update; see `Schedule.factor`.

        After the warm-up it falls along half a cosine wave from 1 to ``final``, which it reaches after the last planned
        update.
        """
        wave = 0.5 * (1 + math.cos(math.pi * progress(update, planned, self.warmup)))
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * wave)


@dataclass(frozen=True)
class Linear:
    """Schedule with linear decay of the learning rate.

    Attributes:
        final: Learning rate after the last planned update, as a fraction of the base rate.
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update; see `Schedule.factor`.

        After the warm-up it falls linearly from 1 to ``final``, which it reaches after the last planned update.
        """
        line = 1 - progress(update, planned, self.warmup)
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * line)


@dataclass(frozen=True)
class InverseSqrt:
    """Schedule with decay of the learning rate by the inverse square root of the update's number (Vaswani et al. 2017).

    The rule is their equation 3, but the rate at the end of the warm-up is the base rate; in the paper it is width^-0.5
    * warmup^-0.5.

    Attributes:
        warmup: Number of updates with linear warm-up of the learning rate.
    """

    warmup: PositiveInt = 4000

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update; see `Schedule.factor`.

        It rises linearly to 1 at update ``warmup - 1`` and then falls as ``sqrt(warmup / (update + 1))``.
        """
        return min(warmup_factor(update, self.warmup), math.sqrt(self.warmup / (update + 1)))
