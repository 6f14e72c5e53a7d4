"""Regression task: numbers to predict for each sample. Losses are of standardised targets, metrics in the user's units.

Losses are in FP32 and their targets have mean 0 and deviation 1: in FP16, an output for a target of 100,000 would
overflow, and with several outputs the loss would be that of the one with the largest unit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.fields import PositiveFloat
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import OutputsTask, Table


@dataclass(frozen=True, kw_only=True)
class Regression(OutputsTask):
    """Task of K numbers to predict for each sample, its targets float ``[N]`` or ``[N, K]``.

    Attributes:
        target_mean: Mean of each output over the training targets.
        target_std: Their standard deviations.
        loss_of: Loss function: ``mse``, the mean squared error, ``mae``, the mean absolute one, or ``huber``.
        delta: Error at which Huber's loss (1964) turns from squares to a line, in units of the standardised target.
        standardise: Let the network return ``(target - mean) / deviation``, and not the target itself.
        metric: Metric that selects the best checkpoint. ``rmse`` is in the user's unit and defined for every split,
            which ``r2`` is not. For outputs of several units, ``loss`` gives all the same weight.
    """

    target_mean: tuple[float, ...]
    target_std: tuple[float, ...]
    loss_of: Literal["mse", "mae", "huber"] = "mse"
    delta: PositiveFloat = 1.0
    standardise: bool = True
    metric: Literal["rmse", "mae", "loss"] = "rmse"

    higher_is_better = False

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.standardise:
            mean, std = (_row(tuple(values), targets.device) for values in (self.target_mean, self.target_std))
            targets = (targets - mean) / std
        if self.loss_of == "huber":
            return F.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        return (F.mse_loss if self.loss_of == "mse" else F.l1_loss)(outputs, targets, reduction="none")

    @override
    def score_of(self, outputs: Table, targets: Table) -> dict[str, float]:
        """Return ``mse``, ``rmse``, ``mae`` and ``r2``, the means over outputs of those of scikit-learn.

        R² divides by the variance of the targets. Where all targets of an output are the same, it is 1 for exact
        predictions and 0 for others, as in scikit-learn: a number with which checkpoints can be compared. With one
        sample it is NaN.
        """
        errors = self._in_units(outputs) - targets
        squares, around = (errors**2).sum(0), ((targets - targets.mean(0)) ** 2).sum(0)
        around[(targets == targets[0]).all(0)] = 0.0  # and not what rounding of the mean leaves
        shares = np.where(around > 0, squares / np.where(around > 0, around, 1.0), squares != 0)
        return {
            "mse": float(squares.mean() / len(errors)),
            "rmse": float(np.sqrt(squares / len(errors)).mean()),
            "mae": float(np.abs(errors).mean()),
            "r2": float(1 - shares.mean()) if len(errors) > 1 else math.nan,
        }

    @override
    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """Return the ``value`` in the user's unit, or for several outputs the value of each by name."""
        values = self._in_units(self.outputs(model, batch).cpu().double().numpy()).tolist()
        names = self.names if self.num_outputs > 1 else ("value",)
        return [dict(zip(names, row, strict=True)) for row in values]

    def _in_units(self, outputs: Table) -> Table:
        return outputs * np.array(self.target_std) + np.array(self.target_mean) if self.standardise else outputs


@functools.lru_cache(maxsize=16)
def _row(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers on a device, float32 ``[K]``; kept, because a copy in every step would wait for the device."""
    return torch.tensor(values, dtype=torch.float32, device=device)
