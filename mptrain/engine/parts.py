"""A run as it was built, before and while it trains: its parts, its options, and how far it has come."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.engine.transfer import Transfer
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.precision.apply import input_dtype

if TYPE_CHECKING:
    from mptrain.engine.fault_injection import Injection
    from mptrain.engine.fingerprints import StartFingerprints
    from mptrain.engine.options import CheckpointOptions, LogOptions, TrainOptions
    from mptrain.engine.step import Learner, Plan
    from mptrain.precision.policy import Policy
    from mptrain.probe.probe import Probe
    from mptrain.workloads.base.batch import Batch
    from mptrain.workloads.base.dataset import Dataset
    from mptrain.workloads.base.loader import Loader
    from mptrain.workloads.base.task import Task


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        model: On its device, in its dtypes.
        kept: Its modules that stay in FP32, by name.
        task: Losses and metrics.
        dataset: Where samples come from.
        policy: Which dtype everything has.
        device: Where it trains.
        learners: One for each objective of the task.
        plan: What holds for every step.
        memory_format: Of images.
        loaders: ``train``, and ``val`` and ``test`` where the data set has them.
        origin: What was so before it was built, and how its weights began.
        probe: What looks at its steps.
        fault: What is put in on purpose.
        notes: What the user should know about how it was built, one sentence each.
        warnings: What was not built as it was asked for, one sentence each.
        comm: The processes that train it.
        blank: The whole model without values, where ranks hold parts of its weights; else None.
        infinite: Names of the buffers that held inf when the model was built, as masks of attention do.
    """

    model: nn.Module
    kept: dict[str, nn.Module]
    task: Task
    dataset: Dataset
    policy: Policy
    device: torch.device
    learners: tuple[Learner, ...]
    plan: Plan
    memory_format: torch.memory_format
    loaders: dict[str, Loader]
    origin: StartFingerprints
    probe: Probe
    fault: Injection
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    comm: Communicator = SINGLE_PROCESS
    blank: nn.Module | None = None
    infinite: frozenset[str] = frozenset()

    def prepare(self, batch: Batch) -> Batch:
        """A host batch, on the device and in the dtype the model takes."""
        return self._transfer(lambda: self._prepared(batch).cast(input_dtype(self.policy)))

    def prepare_float32(self, batch: Batch) -> Batch:
        """A host batch, on the device, in FP32."""
        return self._transfer(lambda: self._prepared(batch))

    def _prepared(self, batch: Batch) -> Batch:
        prepared = self.dataset.prepare(batch, self.device, self.memory_format)
        if batch.whole is None and not batch.is_dummy:
            return prepared
        return replace(prepared, whole=batch.whole, is_dummy=batch.is_dummy)  # of which no data set has to know

    @functools.cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self.device, self.comm)

    def must_be_finite(self) -> dict[str, Tensor]:
        """Parameters in their best copies and floating-point buffers by name, without those of ``infinite``."""
        state = {**self.full_precision(), **dict(self.model.named_buffers())}
        return {name: value for name, value in state.items() if value.is_floating_point() and name not in self.infinite}

    def full_precision(self) -> dict[str, Tensor]:
        """The best copy of each trained parameter by name."""
        return {
            name: value for learner in self.learners for name, value in learner.weights.masters.full_precision().items()
        }

    def averages(self) -> dict[str, Tensor]:
        """The average of each parameter that has one, by name."""
        averages = [learner.average.values() for learner in self.learners if learner.average]
        return {name: value for values in averages for name, value in values.items()}

    def compile(self) -> None:
        """Let torch.compile make kernels for the modules that the learners train.

        Each shape of batch gets kernels of its own: kernels for any shape would come into use only after a second shape
        was seen, and a resumed run would compute other bits than an undisturbed one. For the same reason the compiler must
        not give up on a shape: all modules share one allowance of shapes, eight by default, and a GAN needs more.
        """
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.accumulated_recompile_limit = 1024
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        modules = dict(self.model.named_modules())
        for name in {name for learner in self.learners for name in learner.objective.modules}:
            if name in modules:
                modules[name].compile(dynamic=False)

    def data_card(self) -> dict[str, Any]:
        """What the data are, for people and programs that use the weights: JSON values."""
        own = self.dataset.card() if hasattr(self.dataset, "card") else {}
        # What is called is for the task, not for a file, and the names of classes and speakers are the card's labels.
        names = ("class_names", "speaker_names")
        facts = {n: fact for n, fact in self.dataset.facts().items() if not callable(fact) and n not in names}
        return {"name": self.dataset.name, **facts, **own}

    @functools.cached_property
    def labels_digest(self) -> str:
        """SHA-256 of the labels of the data, in hexadecimal; those of a data set without any are an empty list."""
        return hashlib.sha256(json.dumps(self.data_card().get("labels", [])).encode()).hexdigest()

    def carried(self) -> dict[str, Tensor]:
        """Buffers that belong to the run and not to the weights: those that the model's state_dict leaves out."""
        lasting = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in lasting}


@dataclass(frozen=True)
class Options:
    """What a user chose about the run itself.

    Attributes:
        train: How long, how many samples an update, when to give up.
        checkpoint: When to save.
        log: How often to look.
    """

    train: TrainOptions
    checkpoint: CheckpointOptions
    log: LogOptions


@dataclass
class LearnerTotals:
    """What is added up of one learner's steps.

    Attributes:
        epoch_loss: Sum of the finite losses of the current epoch's steps.
        epoch_losses: How many there were.
        epoch_skipped: Refused updates of the current epoch.
        scale_path: First, smallest, largest and newest loss scale; empty before any step.
    """

    epoch_loss: float = 0.0
    epoch_losses: int = 0
    epoch_skipped: int = 0
    scale_path: tuple[float, ...] = ()


@dataclass
class Progress:
    """How far a run has come; saved with every checkpoint.

    Attributes:
        step: Attempted steps.
        epoch: Completed epochs, their evaluation included.
        batch: Batches of the current epoch that were consumed; equal to the epoch's length while it is evaluated.
        best: Best validation metric so far; None before the first evaluation, or where the task has no metric.
        last: Metrics of the last evaluation by split.
        intervals: Ends of the 95 % intervals of the last evaluation, by split and metric, where they were asked for.
        evaluated_at: Attempted steps at the last validation; -1 before the first.
        epoch_seconds: Wall time spent in training steps of the current epoch, over all attempts.
        epoch_terms: Loss terms (`mptrain.workloads.base.task.Task.term`) of the current epoch.
        seconds: Wall time spent in training steps, over all attempts.
        waited: How much of it went into waiting for data.
        steady_seconds: How much of it lies behind the warm-up of its attempt (`mptrain.engine.clock.WARM_UP`).
        steady_terms: Loss terms consumed in that time.
        steady_steps: Steps in that time.
        joules: Energy that the device used in training steps, over all attempts; None before the first, NaN where it did not say.
        samples: Training samples consumed, over all attempts.
        terms: Loss terms consumed, over all attempts.
        learners: Totals of each learner, by name.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float | None = None
    last: dict[str, dict[str, float]] = field(default_factory=dict)
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    evaluated_at: int = -1
    epoch_seconds: float = 0.0
    epoch_terms: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    steady_seconds: float = 0.0
    steady_terms: int = 0
    steady_steps: int = 0
    joules: float | None = None
    samples: int = 0
    terms: int = 0
    learners: dict[str, LearnerTotals] = field(default_factory=dict)

    def begin_epoch(self, completed: int) -> None:
        """Begin the epoch behind so many completed ones."""
        self.epoch, self.batch = completed, 0
        self.epoch_seconds, self.epoch_terms = 0.0, 0
        for totals in self.learners.values():
            totals.epoch_loss, totals.epoch_losses, totals.epoch_skipped = 0.0, 0, 0

    def become(self, other: Progress) -> None:
        """Take over the fields of another."""
        vars(self).update(vars(other))

    def state_dict(self) -> dict[str, Any]:
        """All fields, plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """The progress that `state_dict` described."""
        learners = {name: LearnerTotals(**totals) for name, totals in saved["learners"].items()}
        return cls(**{**saved, "learners": learners})
