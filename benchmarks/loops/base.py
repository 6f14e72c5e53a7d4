"""What all loops share: the same weights, batches, loss and hyper-parameters."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from mptrain.config.compose import compose
from mptrain.run.build.parts import build

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.task import Objective

#: FP32, autocast to FP16 with loss scaling, autocast to BF16 without, FP16 storage with FP32 masters and loss scaling.
Mode = Literal["fp32", "tf32", "amp", "bf16", "half"]

PRECISION = {"fp32": "fp32", "tf32": "tf32", "amp": "amp_dynamic", "bf16": "amp_bf16", "half": "fp16_dynamic"}

#: What autocast computes in, by mode.
AUTOCAST = {"amp": torch.float16, "bf16": torch.bfloat16}

#: Steps for which there are learning rates.
STEPS = 1_000_000


@dataclass(frozen=True)
class Work:
    """What is to be trained.

    Attributes:
        words: Model, data and batch size, as on the command line.
        optimizer: ``sgd`` (momentum 0.9) or ``adam``, without weight decay, or ``torch.AdamW``, torch's class by name.
        device: ``cpu`` or ``cuda``.
        lr: Small, so that long measurements train on numbers like those of the first step.
        more: Words for our loop alone, that change no arithmetic of others' loops.
        agree_lr: Learning rate at which the loops must agree over their first steps; the losses change visibly.
        batches: How many take turns: on a single one a network would soon have gradients of zero.
    """

    words: tuple[str, ...]
    optimizer: Literal["sgd", "adam", "torch.AdamW"] = "sgd"
    device: str = "cpu"
    lr: float = 1e-6
    more: tuple[str, ...] = ()
    agree_lr: float = 0.05
    batches: int = 32

    def line(self, mode: Mode) -> tuple[str, ...]:
        """The words of the command line."""
        return (
            *self.words,
            f"precision={PRECISION[mode]}",
            f"scaler={'none' if mode == 'bf16' else 'dynamic'}",
            *(
                ("optimizer=torch", "optimizer.name=AdamW")
                if self.optimizer == "torch.AdamW"
                else (f"optimizer={self.optimizer}",)
            ),
            f"optimizer.lr={self.lr}",
            "optimizer.weight_decay=0",
            "schedule=constant",
            f"device={self.device}",
            f"train.epochs={STEPS}",
            f"train.max_steps={STEPS}",
            *(("threads=1",) if self.device == "cpu" else ()),
            *self.more,
        )


@dataclass(frozen=True)
class Materials:
    """What a loop written by hand begins with.

    Attributes:
        model: On the device, with FP32 weights as the seed draws them, in training mode.
        objective: Its loss: ``objective.loss(model, batch)``.
        batches: On the device, prepared, floating-point inputs in FP32.
        work: Where they come from.
    """

    model: nn.Module
    objective: Objective
    batches: list[Batch]
    work: Work

    def optimizer(
        self, *, fused: bool | None = None, params: list[nn.Parameter] | None = None
    ) -> torch.optim.Optimizer:
        """torch's, with the hyper-parameters of the work."""
        chosen = list(self.model.parameters()) if params is None else params
        if self.work.optimizer == "sgd":
            return torch.optim.SGD(chosen, lr=self.work.lr, momentum=0.9, fused=fused)
        if self.work.optimizer == "torch.AdamW":
            return torch.optim.AdamW(chosen, lr=self.work.lr, weight_decay=0.0, fused=fused)
        return torch.optim.Adam(chosen, lr=self.work.lr, fused=fused)


class Loop(Protocol):
    """A training loop that is driven from outside."""

    def block(self, steps: int) -> float:
        """Train for some steps; the seconds that they took, the device's work included."""

    def losses(self, steps: int) -> list[float]:
        """Train for some steps; the loss of each."""

    def close(self) -> None:
        """Let go of files and processes."""


def materials(work: Work, mode: Mode = "fp32") -> Materials:
    """Model and batches as our own loop would build them, before any cast."""
    parts, _ = build(compose(work.line("tf32" if mode == "tf32" else "fp32")))
    return Materials(parts.model.train(), parts.task.objectives()[0], list(batches(work)), work)


@functools.lru_cache(maxsize=1)  # drawing large images takes longer than training on them
def batches(work: Work) -> tuple[Batch, ...]:
    """The batches of the work, in the order in which a run would train on them."""
    parts, _ = build(compose(work.line("fp32")))
    loader, epoch = parts.loaders["train"], 0
    found: list[Batch] = []
    while len(found) < work.batches:
        found += [parts.prepare_float32(batch) for batch in loader.batches(epoch)]
        epoch += 1
    return tuple(found[: work.batches])


class ByHand(ABC):
    """A loop of which only the step is written: its timing and its losses.

    Subclasses set ``batches`` and ``device`` and define `step`, which returns the loss.
    """

    batches: list[Batch]
    device: str

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """One step; the unscaled loss, a device tensor."""

    def block(self, steps: int) -> float:
        """See `Loop.block`."""
        from benchmarks.timing import timed

        if not hasattr(self, "_block"):
            batches, count = self.batches, len(self.batches)
            wait = torch.cuda.synchronize if self.device != "cpu" else lambda: None
            self._block = timed(lambda index: self.step(batches[index % count]), wait)
        return self._block(steps)

    def losses(self, steps: int) -> list[float]:
        """See `Loop.losses`."""
        return [float(self.step(self.batches[index % len(self.batches)]).detach()) for index in range(steps)]

    def close(self) -> None:  # noqa: B027 - whoever has something to let go of overrides it
        """Nothing to let go of."""


def cast_inputs(found: list[Batch], dtype: torch.dtype) -> list[Batch]:
    """The batches with floating-point inputs in a dtype."""
    return [copy.copy(batch).cast(dtype) for batch in found]
