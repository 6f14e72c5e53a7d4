"""Options of the run itself, apart from its parts: the keys ``train``, ``checkpoint``, ``log`` and ``inject``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptrain.fields import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class TrainOptions:
    """Length of the training and contents of one update.

    Attributes:
        epochs: Passes over the training data.
        max_steps: Maximum number of attempted steps. With None, only ``epochs`` limits training.
        batch_size: Samples per update, over all micro-batches and ranks.
        accumulate: Micro-batches per update, over all ranks; each of N ranks runs 1/N of them, rounded up.
        clip_norm: Maximum global L2 norm of the unscaled gradients. None disables clipping.
        channels_last: Use the channels-last memory format for images and convolution kernels.
        max_consecutive_overflows: Number of consecutive overflows that end a run.
        max_minutes: Maximum minutes of training steps, over all attempts. None means no limit.
        ema_decay: Maximum decay of an exponential moving average of the weights, which is evaluated in their place
            (see `mptrain.optimizer.average`). None keeps no average.
        one_batch: Train on the first batch only; it makes up each epoch.
        compile: Compile the model with torch.compile.
        engine: ``eager`` launches each operator of a step; ``graph`` captures the step in a CUDA graph.
    """

    epochs: PositiveInt = 10
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    clip_norm: PositiveFloat | None = None
    channels_last: bool = True
    max_consecutive_overflows: PositiveInt = 100
    max_minutes: PositiveFloat | None = None
    ema_decay: BelowOne | None = None
    one_batch: bool = False
    compile: bool = False
    engine: Literal["eager", "graph"] = "eager"

    def planned(self, steps_per_epoch: int) -> int:
        """Return the number of steps to attempt, if the time limit allows."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints: when to save them and how many to keep.

    Attributes:
        every_epochs: Epochs between checkpoints. With None, only at the end and on a signal.
        every_steps: Attempted steps between checkpoints, in addition to ``every_epochs``. None adds none.
        keep: Number of newest checkpoints to keep, in addition to the best one.
        async_save: Continue training while a copy of the state is written. With False, each save blocks.
    """

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2
    async_save: bool = True


@dataclass(frozen=True)
class LogOptions:
    """Options of records: how often the host reads and shows those on the device.

    Attributes:
        ring: Number of steps kept on the device before the host reads them.
        seconds: Maximum seconds between two reads of the ring and refreshes of the display.
        lines: Seconds between two lines of output if there is no terminal.
        stall_report_after: Seconds without progress after which all thread stacks are written. None disables this.
    """

    ring: PositiveInt = 32
    seconds: NonNegativeFloat = 1.0
    lines: NonNegativeFloat = 10.0
    stall_report_after: PositiveFloat | None = 600.0


@dataclass(frozen=True)
class InjectOptions:
    """A fault to inject on purpose (`mptrain.engine.fault_injection`).

    Attributes:
        step: First attempted step with the fault, from 1. None injects no fault.
        count: Number of consecutive steps with the fault. None means all from ``step`` on.
        tensor: ``input``, ``activation:MODULE``, ``activation_gradient:MODULE``, ``gradient:PARAMETER``,
            ``reduced_gradient:PARAMETER`` (summed over micro-batches and ranks) or ``weight:PARAMETER``.
        value: New value of the tensor's first element: ``inf``, ``-inf``, ``nan`` or a number.
        rank: Rank that has the fault. None means all ranks.
    """

    step: PositiveInt | None = None
    count: PositiveInt | None = 1
    tensor: str | None = None
    value: float | Literal["inf", "-inf", "nan"] = "inf"
    rank: NonNegativeInt | None = None
