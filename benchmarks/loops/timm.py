"""The step of timm's training script."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.loops.base import ByHand, Mode, Work, materials

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.dataset.batch import Batch


class Timm(ByHand):
    """autocast and timm's ``NativeScaler``, which its script calls once a step; no log.

    Args:
        work: What to train.
        mode: ``amp``; in FP32 the script has no scaler.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        from timm.utils import NativeScaler

        self.given = materials(work, mode)
        self.batches, self.device = self.given.batches, work.device
        self.optimizer = self.given.optimizer()
        self.scaler = NativeScaler(device=work.device) if mode == "amp" else None
        self.parameters = list(self.given.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        with torch.autocast(self.device, dtype=self.given.dtype, enabled=self.scaler is not None):
            loss = self.given.objective.loss(self.given.model, batch)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler(loss, self.optimizer, parameters=self.parameters)
        self.optimizer.zero_grad()
        return loss
