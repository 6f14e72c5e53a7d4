"""Learning rates of a schedule as a tensor, indexed on the device by the number of updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mptrain.schedule.shapes import Schedule


def rate_table(schedule: Schedule, lr: float, planned: int, device: torch.device) -> Tensor:
    """Return the learning rate of every planned update.

    Args:
        schedule: The schedule.
        lr: The base learning rate.
        planned: Number of planned updates.
        device: The device of the result.

    Returns:
        float32, shape (planned + 1,): entry u is the rate of the update after u applied ones. The last entry is for a
        caller that reads the rate once more after the last update.
    """
    rates = [lr * schedule.factor(update, planned) for update in range(planned + 1)]
    return torch.tensor(rates, dtype=torch.float32, device=device)
