"""The loop that Lightning Fabric's users write."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from benchmarks.loops.base import ByHand, Materials, Mode, Work, materials
from mptrain.workloads.base.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


#: What Lightning calls a mode; the others are ``32-true``.
PRECISIONS = {"amp": "16-mixed", "bf16": "bf16-mixed"}


def plain(batch: Batch) -> tuple[Any, ...]:
    """A batch as a tuple: frameworks take apart what they are given, and refuse a frozen dataclass."""
    return batch.inputs, batch.targets, batch.counts, dict(batch.extras)


class LossModule(nn.Module):
    """A model with its loss, as frameworks want a forward pass to be: under their precision."""

    def __init__(self, given: Materials) -> None:
        super().__init__()
        self.model = given.model
        self._objective = given.objective

    def forward(self, given: tuple[Any, ...]) -> Tensor:
        """The loss of what `plain` made of a batch."""
        return self._objective.loss(self.model, Batch(*given))


class Fabric(ByHand):
    """Precision, device and backward pass by Fabric, the rest by hand; no log.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32``, ``amp`` or ``bf16``.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        import lightning

        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
        given = materials(work, mode)
        self.batches, self.device = given.batches, work.device
        kind = PRECISIONS.get(mode, "32-true")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plugins: list[Any] = []
            precision: Any = kind
            if mode == "amp" and work.device == "cpu":  # by itself it would compute in BF16 there
                import torch
                from lightning.fabric.plugins import MixedPrecision

                plugins, precision = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))], None
            self.fabric = lightning.Fabric(
                accelerator="cpu" if work.device == "cpu" else "cuda", devices=1, precision=precision, plugins=plugins
            )
            self.model, self.optimizer = self.fabric.setup(LossModule(given), given.optimizer())

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(plain(batch))
        self.fabric.backward(loss)
        self.optimizer.step()
        return loss
