"""Options of a training run itself: the configuration's sections ``train``, ``checkpoint``, ``log`` and ``inject``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from mptrain.system.errors import ConfigError
from mptrain.system.fields import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from torch import nn

    from mptrain.optimizer.updater import Updater
    from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class EarlyStopping:
    """Options that end training when a validation metric no longer improves (``train.early_stopping``).

    Attributes:
        patience: Number of consecutive validations without improvement that end training.
        min_delta: Change of the metric that is not yet an improvement.
        metric: Name of the validation metric. None means the metric of the task, or else the validation loss.
        mode: ``max`` if a higher metric is better. None means the direction of the task's metric, and lower for a loss.
    """

    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0
    metric: str | None = None
    mode: Literal["min", "max"] | None = None


@dataclass(frozen=True)
class TrainOptions:
    """Options of the length of training and of one update (configuration section ``train``).

    ``deterministic`` and ``cudnn_benchmark`` together raise ConfigError; None leaves torch's setting.

    Attributes:
        max_steps: Maximum number of attempted steps, skipped ones included. With None, only ``epochs`` limits training.
        batch_size: Number of samples per update, over all micro-batches and ranks.
        accumulate: Number of micro-batches per update, over all ranks; each of N ranks runs 1/N of them, rounded up.
        clip_norm: Maximum global L2 norm of the unscaled gradients. None disables clipping.
        channels_last: Use the channels-last memory format for images and convolution kernels.
        max_consecutive_overflows: Number of consecutive steps with non-finite gradients that ends a run.
        max_minutes: Maximum minutes of training steps, over all attempts of the run. None means no limit.
        ema_decay: Maximum decay of an exponential moving average of the weights, which is evaluated in their place.
        one_batch: Train on the first batch only; it makes up each epoch.
        engine: ``eager`` launches each operator; ``graph`` captures the step in a CUDA graph.
        deterministic: torch refuses operators that may give other bits each time
            (`torch.use_deterministic_algorithms`).
        cudnn_benchmark: cuDNN times its convolutions and takes the fastest.
    """

    epochs: PositiveInt = 10
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    clip_norm: PositiveFloat | None = None
    channels_last: bool = True
    max_consecutive_overflows: PositiveInt = 100
    max_minutes: PositiveFloat | None = None
    early_stopping: EarlyStopping | None = None
    ema_decay: BelowOne | None = None
    one_batch: bool = False
    compile: bool = False
    engine: Literal["eager", "graph"] = "eager"
    deterministic: bool | None = None
    cudnn_benchmark: bool | None = None

    def __post_init__(self) -> None:
        if self.deterministic and self.cudnn_benchmark:
            what = "train.deterministic=true with train.cudnn_benchmark=true, which chooses convolutions by their time"
            raise ConfigError(what, "remove one of them")

    def planned(self, steps_per_epoch: int) -> int:
        """Return the number of training steps to attempt, if the time limit allows."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints: when to save them and how many to keep (configuration section ``checkpoint``).

    Attributes:
        every_epochs: Number of epochs between checkpoints. With None, only at the end and on a signal.
        every_steps: Number of attempted steps between checkpoints, in addition to ``every_epochs``. None adds none.
        keep: Number of newest checkpoints to keep, in addition to the best one.
        async_save: Continue training while a copy of the state is written. With False, each save blocks.
    """

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2
    async_save: bool = True


@dataclass(frozen=True)
class LogOptions:
    """Options of records: how often the host reads and shows the device's values (configuration section ``log``).

    Attributes:
        ring: Number of steps whose loss, scale and norms are kept on the device before the host reads them.
        seconds: Maximum seconds between two reads of these values and between refreshes of the display.
        lines: Seconds between two lines of output if there is no terminal.
        stall_report_after: Seconds without progress after which all thread stacks are written to a file, or None.
    """

    ring: PositiveInt = 32
    seconds: NonNegativeFloat = 1.0
    lines: NonNegativeFloat = 10.0
    stall_report_after: PositiveFloat | None = 600.0


@dataclass(frozen=True)
class InjectOptions:
    """Options of a fault to inject on purpose, to test overflow handling (configuration section ``inject``).

    Attributes:
        step: Number of the first attempted step with the fault, from 1. None injects no fault.
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


#: Function of a Python program that gets the metrics of a validation by name, with ``epoch`` and ``step``, and returns
#: whether training is to end: False or None to go on, True, or the reason in words.
StopFunction: TypeAlias = Callable[[dict[str, float]], bool | str | None]


@dataclass(frozen=True)
class StepView:
    """View of an attempted training step, which a Python program's function gets (``on_step=``).

    All are references, without a transfer to the host: to read a value, the host waits for the device, and the next
    step overwrites it, so clone what is to be kept.

    Attributes:
        step: Number of attempted steps so far, skipped ones included: that of the step's record.
        epoch: Passes over the training data completed before this step, from 0.
        model: The network that is trained, in training mode, as it is after the step: parameters in their training
            dtypes, rounded from their FP32 copies if there are any; with sharded weights, this rank's shards. A task of
            several networks has them as its children. It is no wrapper of torch.compile or DDP. What ``grad`` of a
            parameter holds is not promised.
        batch: This rank's part of the batch as the step was given it, on the device, in the input dtype; no memory of a
            CUDA graph.
        optimizers: Optimizer of each learner by name, ``main`` if there is only one: ``step`` is the number of applied
            updates (float32, shape (1,), on the device) and ``state_dict()["state"]`` has moments by parameter name.
        reasons: Reasons given to `stop`.
    """

    step: int
    epoch: int
    model: nn.Module
    batch: Batch
    optimizers: Mapping[str, Updater]
    reasons: list[str] = field(default_factory=list)

    def stop(self, why: str) -> None:
        """End training after this step, on all ranks, for a reason that goes on record; the first one counts."""
        self.reasons.append(str(why) or "on_step= ended training")


#: Function of a Python program that is called after each attempted step, on every rank.
OnStep: TypeAlias = Callable[[StepView], object]


@dataclass(frozen=True)
class Options:
    """User's options for a run itself, apart from the parts that it is built from."""

    train: TrainOptions
    checkpoint: CheckpointOptions
    log: LogOptions
    stop: StopFunction | None = None
    on_step: OnStep | None = None
