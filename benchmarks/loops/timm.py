"""The step of timm's training script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.loops.bare import autocast
from benchmarks.loops.base import ByHand, Mode, Work, materials

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.batch import Batch


class Timm(ByHand):
    """autocast and timm's ``NativeScaler``, which its script calls once a step; no log.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32``, ``amp`` or ``bf16``; only FP16 has a scaler.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        from timm.utils import NativeScaler

        self.given = materials(work, mode)
        self.batches, self.device = self.given.batches, work.device
        self.optimizer = self.given.optimizer()
        self.scaler = NativeScaler(device=work.device) if mode == "amp" else None
        self.autocast = autocast(work, mode)
        self.parameters = list(self.given.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        with self.autocast:
            loss = self.given.objective.loss(self.given.model, batch)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler(loss, self.optimizer, parameters=self.parameters)
        self.optimizer.zero_grad()
        return loss
