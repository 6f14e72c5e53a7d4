"""The loop that accelerate's users write."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from benchmarks.loops.base import ByHand, Mode, Work, materials
from benchmarks.loops.fabric import LossModule, plain

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.workloads.base.batch import Batch


class Accelerate(ByHand):
    """Precision, device and backward pass by accelerate, the rest by hand; no log.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32``, ``amp`` or ``bf16``; on a CPU it refuses FP16.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # one process trains in several precisions here
        given = materials(work, mode)
        self.batches, self.device = given.batches, work.device
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.accelerator = Accelerator(
                cpu=work.device == "cpu",
                mixed_precision={"amp": "fp16", "bf16": "bf16"}.get(mode, "no"),
                step_scheduler_with_optimizer=False,
            )
            if mode == "amp" and not self.accelerator.native_amp:
                raise ValueError("it trains in FP32 on a CPU, whatever is asked for")
            self.model, self.optimizer = self.accelerator.prepare(LossModule(given), given.optimizer())

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(plain(batch))
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss
