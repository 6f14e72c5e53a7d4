"""Loops that a careful engineer writes with stock torch, and what of them nobody can leave out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from benchmarks.loops.base import AUTOCAST, ByHand, Mode, Work, cast_inputs, materials

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from mptrain.workloads.base.batch import Batch


def autocast(work: Work, mode: Mode) -> AbstractContextManager[object]:
    """Autocast of a mode, to be entered once a step; a context that does nothing where the mode has none."""
    return torch.autocast(work.device, dtype=AUTOCAST[mode]) if mode in AUTOCAST else contextlib.nullcontext()


class Bare(ByHand):
    """The loop of torch's own documentation: autocast and GradScaler where there is half precision, no record.

    Args:
        work: What to train.
        mode: ``fp32``, ``tf32``, ``amp`` or ``bf16``.
        best: With a fused optimizer, with which GradScaler does not wait for the host.
    """

    def __init__(self, work: Work, mode: Mode, *, best: bool = False) -> None:
        self.given = materials(work, mode)
        self.batches, self.device = self.given.batches, work.device
        self.optimizer = self.given.optimizer(fused=True if best else None)
        self.scaler = torch.amp.GradScaler(work.device) if mode == "amp" else None
        self.autocast = autocast(work, mode)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update."""
        given = self.given
        self.optimizer.zero_grad()
        with self.autocast:
            loss = given.objective.loss(given.model, batch)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return loss
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
            from mptrain.config.compose import compose
            from mptrain.run.build.parts import build

            self.parts, _ = build(compose(work.line("half")))
            self.model = self.parts.model.train()
            self.batches = cast_inputs(self.batches, torch.float16)
        else:
            self.model = self.given.model
        self.params = list(self.model.parameters())
        self.autocast = autocast(work, mode)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, and the gradients forgotten."""
        for parameter in self.params:
            parameter.grad = None
        with self.autocast:
            loss = self.given.objective.loss(self.model, batch)
        loss.backward()
        return loss
