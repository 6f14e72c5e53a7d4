"""Table of a schedule's learning rates as a device tensor, indexed in each step by the number of applied updates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mptrain.schedule.shapes import TabulatedSchedule
from mptrain.system.errors import ConfigError

if TYPE_CHECKING:
    from mptrain.schedule.shapes import Schedule


def rate_table(
    schedule: Schedule | TabulatedSchedule, lr: float, planned: int, device: torch.device, steps_per_epoch: int = 1
) -> Tensor:
    """Return the learning rate of every planned update, float32 of shape (planned + 1,), on a device.

    Entry u is the rate of the update after u applied ones. The last entry is for a caller that reads the rate once more
    after the last update. ``steps_per_epoch`` counts updates. Raises ConfigError if a rate is not finite.
    """
    if isinstance(schedule, TabulatedSchedule):
        rates = list(schedule.rates(lr, planned, steps_per_epoch))
    else:
        factors = [schedule.factor(update, planned) for update in range(planned + 1)]
        rates = [lr * factor if isinstance(factor, int | float) else factor for factor in factors]
    if len(rates) != planned + 1:
        raise ConfigError(
            f"schedule: {type(schedule).__name__} gives {len(rates)} learning rates for {planned} updates",
            "return one for each, and one more",
        )
    numbers = (isinstance(rate, int | float) and math.isfinite(rate) for rate in rates)
    if (bad := next((update for update, fine in enumerate(numbers) if not fine), None)) is not None:
        raise ConfigError(
            f"schedule: {type(schedule).__name__} gives update {bad + 1} of {planned} the learning rate {rates[bad]}",
            "correct what factor() or rates() returns",
        )
    return torch.tensor(rates, dtype=torch.float32, device=device)
