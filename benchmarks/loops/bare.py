"""Loops that a careful engineer writes with stock torch, and what of them nobody can leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.loops.base import ByHand, Mode, Work, cast_inputs, materials

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.dataset.batch import Batch


class Bare(ByHand):
    """The loop of torch's own documentation: autocast and GradScaler where there is half precision, no record.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32`` or ``amp``.
        best: With a fused optimizer, with which GradScaler does not wait for the host.
    """

    def __init__(self, work: Work, mode: Mode, *, best: bool = False) -> None:
        self.given = materials(work, mode)
        self.batches, self.device = self.given.batches, work.device
        self.optimizer = self.given.optimizer(fused=True if best else None)
        self.scaler = torch.amp.GradScaler(work.device) if mode == "amp" else None

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        given = self.given
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss = given.objective.loss(given.model, batch)
            loss.backward()
            self.optimizer.step()
            return loss
        with torch.autocast(self.device, dtype=given.dtype):
            loss = given.objective.loss(given.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


class Passes(ByHand):
    """Forward and backward alone: the floor of a step.

    Args:
        work: What to train.
        mode: ``half`` computes with FP16 weights, as they are stored then.
    """

    def __init__(self, work: Work, mode: Mode) -> None:
        self.given = materials(work, mode)
        self.device, self.mode = work.device, mode
        self.batches = self.given.batches
        if mode == "half":
            from mptrain.config.build import build
            from mptrain.config.compose import compose

            self.parts, _ = build(compose(work.line("half")))
            self.model = self.parts.model.train()
            self.batches = cast_inputs(self.batches, torch.float16)
        else:
            self.model = self.given.model
        self.params = list(self.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, and the gradients forgotten."""
        for parameter in self.params:
            parameter.grad = None
        with torch.autocast(self.device, dtype=self.given.dtype, enabled=self.mode == "amp"):
            loss = self.given.objective.loss(self.model, batch)
        loss.backward()
        return loss
