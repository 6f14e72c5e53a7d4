"""What a user chooses about the run itself, not its parts: the ``train``, ``checkpoint``, ``log``, ``inject`` keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptrain.fields import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class TrainOptions:
    """How long to train and what one update is.

    Attributes:
        epochs: Passes over the training data.
        max_steps: End after so many attempted steps; None leaves it to ``epochs``.
        batch_size: Samples of one update, over all its micro-batches.
        accumulate: Micro-batches that make up one update, over all ranks: each of N has a N-th of them, rounded up.
        clip_norm: Largest global L2 norm of the unscaled gradients; None does not clip.
        channels_last: Memory layout of images and convolution kernels.
        max_consecutive_overflows: Refused steps in a row that end a run.
        max_minutes: End after so many minutes of training steps, over all attempts; None sets no limit.
        ema_decay: Largest decay of an exponential moving average of the weights, which is evaluated in their place
            (see `mptrain.optimizer.average`); None keeps none.
        one_batch: Train on the first batch again and again; an epoch is that batch.
        compile: Let torch.compile make kernels for the model.
        engine: ``eager`` launches a step operator by operator, ``graph`` captures it in a CUDA graph.
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
        """How many steps will be attempted, if time allows."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class CheckpointOptions:
    """When to save and how much to keep.

    Attributes:
        every_epochs: Epochs between checkpoints; None saves only at the end and on a signal.
        every_steps: Attempted steps between checkpoints, besides those of ``every_epochs``; None adds none.
        keep: How many of the newest checkpoints to keep, besides the best one.
        async_save: Train on while a copy of the state is written; False waits for the disk at each save.
    """

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2
    async_save: bool = True


@dataclass(frozen=True)
class LogOptions:
    """How often the host looks at what the device recorded.

    Attributes:
        ring: Steps kept on the device before the host reads them.
        seconds: The host reads the ring, and refreshes the display, at least this often.
        lines: Seconds between two lines of output where there is no terminal.
        stall_report_after: Seconds without progress after which it is written down where every thread stands; None never.
    """

    ring: PositiveInt = 32
    seconds: NonNegativeFloat = 1.0
    lines: NonNegativeFloat = 10.0
    stall_report_after: PositiveFloat | None = 600.0


@dataclass(frozen=True)
class InjectOptions:
    """A fault to put in on purpose (`mptrain.engine.fault_injection`).

    Attributes:
        step: The first attempted step that has it, from 1; None puts in none.
        count: How many steps in a row have it; None means all from the first on.
        tensor: ``input``, ``activation:MODULE``, ``activation_gradient:MODULE``, ``gradient:PARAMETER``,
            ``reduced_gradient:PARAMETER`` (as it is judged, summed over micro-batches and ranks) or ``weight:PARAMETER``.
        value: What the first element of that tensor becomes: ``inf``, ``-inf``, ``nan`` or a number.
        rank: Which of several ranks has it; None means all.
    """

    step: PositiveInt | None = None
    count: PositiveInt | None = 1
    tensor: str | None = None
    value: float | Literal["inf", "-inf", "nan"] = "inf"
    rank: NonNegativeInt | None = None
