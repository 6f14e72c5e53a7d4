"""Learning rate schedules: pure functions from the number of an update to a factor of the base learning rate.

A training step whose update is skipped (for an overflow) does not count as an update. ``warmup`` is the number of
updates with linear warm-up of the rate, ``final`` that after the last planned update, as a fraction of the base rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from mptrain.system.fields import AtLeastOne, Fraction, NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt


@runtime_checkable
class Schedule(Protocol):
    """Interface of a learning rate schedule."""

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the base learning rate in an update (from 0) of a run of ``planned`` updates."""


@runtime_checkable
class TabulatedSchedule(Protocol):
    """Interface of a learning rate schedule that returns all rates of a run at once, not factors of the base rate."""

    def rates(self, lr: float, planned: int, steps_per_epoch: int) -> list[float]:
        """Return ``planned + 1`` learning rates: entry u is that of the update after u applied ones."""


def warmup_factor(update: int, warmup: int) -> float:
    """Return the factor from a linear warm-up, 1/warmup to 1 at update ``warmup - 1``; then, or without one, 1."""
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def progress(update: int, planned: int, warmup: int) -> float:
    """Return the share of the updates after the warm-up that were applied: 1 only after the last planned update."""
    return min(1.0, max(0.0, (update - warmup) / max(1, planned - warmup)))


@dataclass(frozen=True)
class Constant:
    """Schedule with a constant learning rate after an optional warm-up."""

    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the factor of the warm-up, then 1."""
        return warmup_factor(update, self.warmup)


@dataclass(frozen=True)
class Step:
    """Schedule that multiplies the learning rate by ``gamma`` at each milestone, a fraction of the planned updates.

    He et al. 2015 divide it by 10 after 30, 60 and 80 of 90 epochs.
    """

    milestones: tuple[Fraction, ...] = (0.333333, 0.666667, 0.888889)
    gamma: PositiveFloat = 0.1
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor times ``gamma`` to the power of the number of milestones passed."""
        # In floating point 0.55 * 100 is 55.00000000000001; the milestone is 55.
        passed = sum(update >= round(milestone * planned) for milestone in self.milestones)
        return warmup_factor(update, self.warmup) * self.gamma**passed


@dataclass(frozen=True)
class Cosine:
    """Schedule with cosine decay of the learning rate, without restarts (Loshchilov and Hutter 2017)."""

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then half a cosine wave from 1 to ``final``."""
        wave = 0.5 * (1 + math.cos(math.pi * progress(update, planned, self.warmup)))
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * wave)


@dataclass(frozen=True)
class Linear:
    """Schedule with linear decay of the learning rate."""

    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then a linear decay from 1 to ``final``."""
        line = 1 - progress(update, planned, self.warmup)
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * line)


@dataclass(frozen=True)
class InverseSqrt:
    """Schedule with decay of the learning rate by the inverse square root of the update's number (Vaswani et al. 2017).

    This is their equation 3, with the base rate at the end of the warm-up in place of width^-0.5 * warmup^-0.5.
    """

    warmup: PositiveInt = 4000

    def factor(self, update: int, planned: int) -> float:
        """Return a linear rise to 1 at update ``warmup - 1``, then ``sqrt(warmup / (update + 1))``."""
        return min(warmup_factor(update, self.warmup), math.sqrt(self.warmup / (update + 1)))


@dataclass(frozen=True)
class Polynomial:
    """Schedule with polynomial decay of the rate (``PolynomialLR`` of torch; DeepLab, Chen et al. 2017, has 0.9)."""

    power: PositiveFloat = 0.9
    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then ``(1 - progress) ** power``, scaled to fall from 1 to ``final``."""
        left = math.pow(1 - progress(update, planned, self.warmup), self.power)
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * left)


@dataclass(frozen=True)
class Exponential:
    """Schedule that multiplies the rate by ``gamma`` after every update, as ``ExponentialLR`` of torch.

    Without ``gamma`` the rate reaches ``final`` after the last planned update.
    """

    final: PositiveFraction = 0.01
    gamma: PositiveFraction | None = None
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then ``final ** progress``, or ``gamma`` to the power of the updates since."""
        decay, times = self.final, progress(update, planned, self.warmup)
        if self.gamma is not None:
            decay, times = self.gamma, max(0, update - self.warmup)
        return warmup_factor(update, self.warmup) * math.pow(decay, times)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Schedule with warm-up, a constant learning rate, and a decay at the end of the run (Hu et al. 2024, MiniCPM).

    ``decay`` is the length of the decay as a fraction of the planned updates. Over its progress p it falls as
    ``linear`` (1 - p), ``cosine`` (half a wave) or ``sqrt`` (1 - sqrt(p), the "1-sqrt" of Hägele et al. 2024).
    """

    warmup: NonNegativeInt = 100
    decay: Fraction = 0.2
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    final: Fraction = 0.0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then 1, then the decay to ``final``, reached after the last planned update."""
        done = progress(update, planned, planned - round(self.decay * planned))
        left = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "sqrt": 1 - math.sqrt(done)}
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * left[self.shape])


@dataclass(frozen=True)
class OneCycle:
    """Schedule of the one-cycle policy (Smith and Topin 2018), with the rates of ``OneCycleLR`` of torch in two phases.

    The base learning rate is the peak, ``max_lr`` of torch. The momentum stays constant. ``pct_start`` is the length of
    the rise as a fraction of the planned updates. The shape of rise and fall is ``cos`` (half a wave) or ``linear``.
    """

    pct_start: Fraction = 0.3
    div_factor: AtLeastOne = 25.0
    final_div_factor: AtLeastOne = 1e4
    anneal_strategy: Literal["cos", "linear"] = "cos"

    def factor(self, update: int, planned: int) -> float:
        """Return a rise from ``1 / div_factor`` to 1, then a fall to ``1 / (div_factor * final_div_factor)``."""
        peak, last, first = self.pct_start * planned - 1, planned - 1, 1 / self.div_factor
        if update < peak:
            start, end, done = first, 1.0, update / peak
        else:
            start, end = 1.0, first / self.final_div_factor
            done = min(1.0, (update - peak) / (last - peak)) if last > peak else 0.0
        if self.anneal_strategy == "cos":
            done = 0.5 * (1 - math.cos(math.pi * done))
        return start + (end - start) * done


@dataclass(frozen=True)
class CosineRestarts:
    """Schedule with cosine decay of the learning rate and warm restarts (SGDR, Loshchilov and Hutter 2017).

    ``period`` is the length of the first decay as a fraction of the planned updates, ``multiplier`` the factor of the
    length of each decay after it. The rate is ``final`` at the end of each decay.
    """

    period: PositiveFraction = 0.25
    multiplier: PositiveInt = 1
    final: Fraction = 0.0
    warmup: NonNegativeInt = 0

    def factor(self, update: int, planned: int) -> float:
        """Return the warm-up's factor, then in each period half a cosine wave from 1 to ``final``."""
        length, since = max(1, round(self.period * planned)), max(0, update - self.warmup)
        if self.multiplier == 1:
            since %= length
        while since >= length:
            since -= length
            length *= self.multiplier
        wave = 0.5 * (1 + math.cos(math.pi * since / length))
        return warmup_factor(update, self.warmup) * (self.final + (1 - self.final) * wave)


@dataclass(frozen=True)
class RangeTest:
    """Schedule of a learning rate range test (Smith 2017): the rate rises exponentially over the planned updates.

    ``first`` and ``last`` are the factors of the base rate in the first and the last update.
    """

    first: PositiveFloat = 1e-4
    last: PositiveFloat = 100.0

    def factor(self, update: int, planned: int) -> float:
        """Return ``first`` times the power of ``last / first`` that the progress is."""
        return self.first * math.pow(self.last / self.first, progress(update, planned - 1, 0))
