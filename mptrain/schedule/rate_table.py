"""A schedule as a table on the device, so that the number of updates, itself a device value, can look up its rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mptrain.schedule.shapes import Schedule


def rate_table(schedule: Schedule, lr: float, planned: int, device: torch.device) -> Tensor:
    """The learning rate of every planned update.

    Args:
        schedule: The shape.
        lr: The base rate.
        planned: How many updates are planned.
        device: Where the table will be read.

    Returns:
        float32, shape (planned + 1,): entry u is the rate of the update after u applied ones. The last entry serves a
        caller that asks once more after the end.
    """
    rates = [lr * schedule.factor(update, planned) for update in range(planned + 1)]
    return torch.tensor(rates, dtype=torch.float32, device=device)
