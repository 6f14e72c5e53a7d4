"""The built run: its parts, its options and its progress."""

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
    """Parts of a built run.

    Attributes:
        model: The model, on its device and in its dtypes.
        kept: Modules that stay in FP32, by name.
        task: Losses and metrics.
        dataset: Source of the samples.
        policy: Dtypes of the precision mode.
        device: Training device.
        learners: One learner per objective of the task.
        plan: Settings that hold for every step.
        memory_format: Memory format of images.
        loaders: ``train``, and ``val`` and ``test`` if the data set has them.
        origin: Memory use before the model was built, and digest of the initial weights.
        probe: Observer of steps.
        fault: Injected fault.
        notes: Remarks for the user about how the run was built, one sentence each.
        warnings: Deviations from what the user asked for, one sentence each.
        comm: Communicator of all ranks.
        blank: The whole model on the meta device if its weights are sharded, else None.
        infinite: Names of the buffers that held inf when the model was built, such as attention masks.
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
        """Return a host batch on the device, in the input dtype of the model."""
        return self._transfer(lambda: self._prepared(batch).cast(input_dtype(self.policy)))

    def prepare_float32(self, batch: Batch) -> Batch:
        """Return a host batch on the device, in FP32."""
        return self._transfer(lambda: self._prepared(batch))

    def _prepared(self, batch: Batch) -> Batch:
        prepared = self.dataset.prepare(batch, self.device, self.memory_format)
        if batch.whole is None and not batch.is_dummy:
            return prepared
        return replace(prepared, whole=batch.whole, is_dummy=batch.is_dummy)  # data sets need not know these fields

    @functools.cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self.device, self.comm)

    def must_be_finite(self) -> dict[str, Tensor]:
        """Return full-precision parameters and floating-point buffers by name, except those in ``infinite``."""
        state = {**self.full_precision(), **dict(self.model.named_buffers())}
        return {name: value for name, value in state.items() if value.is_floating_point() and name not in self.infinite}

    def full_precision(self) -> dict[str, Tensor]:
        """Return the trained parameters in full precision, by name: master weights where there are any."""
        return {
            name: value for learner in self.learners for name, value in learner.weights.masters.full_precision().items()
        }

    def averages(self) -> dict[str, Tensor]:
        """Return the averaged parameters by name."""
        averages = [learner.average.values() for learner in self.learners if learner.average]
        return {name: value for values in averages for name, value in values.items()}

    def compile(self) -> None:
        """Compile the modules that the learners train with torch.compile.

        Each batch shape gets its own kernels. Dynamic-shape kernels would be used only after a second shape was seen,
        so a resumed run would not be bitwise equal to an uninterrupted one. For the same reason the compiler must not
        give up on a shape: all modules share one recompile limit, eight by default, and a GAN needs more.
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
        """Return a description of the data as JSON values, for people and programs that use the weights."""
        own = self.dataset.card() if hasattr(self.dataset, "card") else {}
        # Callables are for the task, not for a file; names of classes and speakers are in the card's labels.
        names = ("class_names", "speaker_names")
        facts = {n: fact for n, fact in self.dataset.facts().items() if not callable(fact) and n not in names}
        return {"name": self.dataset.name, **facts, **own}

    @functools.cached_property
    def labels_digest(self) -> str:
        """SHA-256 of the labels of the data, in hexadecimal; a data set without labels counts as an empty list."""
        return hashlib.sha256(json.dumps(self.data_card().get("labels", [])).encode()).hexdigest()

    def carried(self) -> dict[str, Tensor]:
        """Return the buffers that belong to the run and not to the weights: the non-persistent buffers of the model."""
        lasting = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in lasting}


@dataclass(frozen=True)
class Options:
    """The user's options for the run itself.

    Attributes:
        train: Length of the training, samples per update, limits.
        checkpoint: When to save.
        log: How often to read and show records.
    """

    train: TrainOptions
    checkpoint: CheckpointOptions
    log: LogOptions


@dataclass
class LearnerTotals:
    """Totals over one learner's steps.

    Attributes:
        epoch_loss: Sum of the finite losses of the current epoch.
        epoch_losses: Number of finite losses of the current epoch.
        epoch_skipped: Skipped updates of the current epoch.
        scale_path: First, smallest, largest and latest loss scale; empty before the first step.
    """

    epoch_loss: float = 0.0
    epoch_losses: int = 0
    epoch_skipped: int = 0
    scale_path: tuple[float, ...] = ()


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint.

    Attributes:
        step: Attempted steps.
        epoch: Completed epochs, including their evaluation.
        batch: Consumed batches of the current epoch; equal to the epoch's length during its evaluation.
        best: Best validation metric so far; None before the first evaluation or if the task has no metric.
        last: Metrics of the last evaluation, by split.
        intervals: 95 % CIs of the last evaluation, by split and metric, if requested.
        evaluated_at: Attempted steps at the last validation; -1 before the first.
        epoch_seconds: Wall time in training steps of the current epoch, over all attempts.
        epoch_terms: Loss terms (`mptrain.workloads.base.task.Task.term`) of the current epoch.
        seconds: Wall time in training steps, over all attempts.
        waited: Part of ``seconds`` spent waiting for data.
        steady_seconds: Part of ``seconds`` after the warm-up of each attempt (`mptrain.engine.clock.WARM_UP`).
        steady_terms: Loss terms consumed in ``steady_seconds``.
        steady_steps: Steps in ``steady_seconds``.
        joules: Energy of the device in training steps, over all attempts; None before the first, NaN if not reported.
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
        """Start the next epoch after ``completed`` epochs."""
        self.epoch, self.batch = completed, 0
        self.epoch_seconds, self.epoch_terms = 0.0, 0
        for totals in self.learners.values():
            totals.epoch_loss, totals.epoch_losses, totals.epoch_skipped = 0.0, 0, 0

    def become(self, other: Progress) -> None:
        """Copy all fields of another progress."""
        vars(self).update(vars(other))

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Progress:
        """Create a progress from the result of `state_dict`."""
        learners = {name: LearnerTotals(**totals) for name, totals in saved["learners"].items()}
        return cls(**{**saved, "learners": learners})
