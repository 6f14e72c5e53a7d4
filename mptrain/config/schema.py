"""`Config`, the checked configuration of a run, and the dataclasses of options that belong to no other package.

Code that receives a `Config` never sees a DictConfig. Nothing here reads files or command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from omegaconf import OmegaConf
from pydantic import StringConstraints

from mptrain.config.targets import Target
from mptrain.engine.options import CheckpointOptions, InjectOptions, LogOptions, OnStep, StopFunction, TrainOptions
from mptrain.parallel.torchrun import DistributedOptions
from mptrain.precision.policy import Policy
from mptrain.runlog.run_paths import check_run_name
from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt, RangeDescription

Device = Annotated[
    str,
    StringConstraints(pattern=r"^(auto|cpu|mps(:0)?|(cuda|xpu)(:(0|[1-9][0-9]{0,2}))?)$"),
    RangeDescription("auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"),
]
#: torch accepts 64-bit seeds and treats those of 2^63 and above as negative.
Seed = Annotated[int, Ge(0), Le(2**63 - 1), RangeDescription("a whole number from 0 to 2^63-1 (9223372036854775807)")]
FolderPath = Annotated[
    str, StringConstraints(pattern=r"^[^\x00]*[^\x00\s][^\x00]*$"), RangeDescription("the path of a folder")
]
TargetPattern = Annotated[
    str,
    StringConstraints(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*(\.\*)?$"),
    RangeDescription("a package, or a pattern such as mypkg.*"),
]

#: Groups whose node names a callable with ``_target_``.
TARGET_GROUPS = ("task", "dataset", "optimizer", "schedule", "scaler", "logger", "diagnostics", "model")


#: Groups that a learner may override.
LEARNER_GROUPS = ("optimizer", "schedule", "scaler")


@dataclass(frozen=True)
class RunOptions:
    """Options of the run directory; section ``run`` of the configuration.

    Attributes:
        name: Name of a fixed run directory ``ROOT/NAME``; None creates a new directory for each run.
        resume: Treatment of an existing ``ROOT/NAME``: ``auto`` resumes it if it exists and starts it otherwise,
            ``never`` refuses an existing one, ``must`` resumes it and never starts a new run.
        root: Folder in which run directories are created.
    """

    name: str | None = None
    resume: Literal["auto", "never", "must"] = "never"
    root: FolderPath = "outputs"

    def __post_init__(self) -> None:
        if any(letter < " " or letter == "\x7f" for letter in self.root):
            raise ConfigError(
                f"run.root={self.root!r} has a line end or another control character", "choose another folder"
            )
        if self.name is not None:
            check_run_name(self.name)


@dataclass(frozen=True)
class ExtensionOptions:
    """Code of the user that YAML may call; section ``extensions``.

    Attributes:
        allow: Packages, or patterns (``mypkg.*``), whose code YAML may call besides mptrain's own.
        sinks: Classes, ``mypkg.module.Name``, that receive the records of a run (`mptrain.runlog.record_writer.Sink`).
    """

    allow: tuple[TargetPattern, ...] = ()
    sinks: tuple[TargetPattern, ...] = ()


@dataclass(frozen=True)
class GeneralOptions:
    """Top-level keys of the configuration, which belong to no section.

    Attributes:
        seed: Seed of initial weights, data order, augmentation and dropout.
        device: Training device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``xpu``, ``xpu:N`` or ``mps``.
        threads: Number of CPU threads of torch; None keeps torch's default.
    """

    seed: Seed = 0
    device: Device = "auto"
    threads: PositiveInt | None = None


#: Maps each section of the configuration to the dataclass that checks it.
SECTIONS: dict[str, type] = {
    "train": TrainOptions,
    "checkpoint": CheckpointOptions,
    "log": LogOptions,
    "inject": InjectOptions,
    "run": RunOptions,
    "extensions": ExtensionOptions,
    "precision": Policy,
    "distributed": DistributedOptions,
}


@dataclass(frozen=True)
class LearnerChoices:
    """Optimizer, schedule, loss scaler and clipping of one learner.

    The schedule is a function of the learner's applied updates. ``clip_norm`` is the largest global L2 norm of the
    learner's unscaled gradients; None disables clipping.
    """

    optimizer: Target
    schedule: Target
    scaler: Target
    clip_norm: float | None


@dataclass(frozen=True)
class Config:
    """The checked configuration of a training run.

    A `Target` is a class or function with its arguments, which is called when the run is built.

    Attributes:
        task: The task: losses and metrics.
        schedule: Learning rate as a function of applied updates.
        logger: The experiment tracker, such as TensorBoard.
        diagnostics: The probe that records tensors (activations, gradients, weights) of single steps.
        model: The network; its ``defaults`` are in `model_defaults`.
        precision: The precision policy: dtypes of parameters, compute, state and so on.
        seed: Seed of the run; ``seed``, ``device`` and ``threads`` are those of `GeneralOptions`.
        inject: A fault to inject on purpose.
        extensions: Further packages whose code the configuration may call.
        weights: File or run with the initial weights; None draws them from the seed.
        freeze: Patterns of the parameters that are not trained.
        learners: Settings of single learners, by name; see `for_learner`.
        tree: The whole configuration as plain dicts, lists and values, resolved, with secrets masked.
        overrides: The ``KEY=VALUE`` words of the command line.
        flags: The flags that name further folders or another top-level file, as words; empty for a saved configuration.
        chosen: Maps group to the chosen option, e.g. ``{"model": "resnet50", "precision": "amp_dynamic"}``. If an
            override replaces the target, e.g. ``model._target_=torchvision.models.alexnet``, it maps to that path.
        model_defaults: Values in the model's file for other parts, such as learning rates and image size.
        warnings: Warnings about values that are valid but probably unintended; one sentence each.
        stop: Function of a Python program that is asked after each validation if training is to end.
        on_step: Function of a Python program that is called after each attempted step.
    """

    task: Target
    dataset: Target
    optimizer: Target
    schedule: Target
    scaler: Target
    logger: Target
    diagnostics: Target
    model: Target
    precision: Policy
    seed: int
    device: str
    threads: int | None
    train: TrainOptions
    checkpoint: CheckpointOptions
    log: LogOptions
    inject: InjectOptions
    distributed: DistributedOptions
    run: RunOptions
    extensions: ExtensionOptions
    weights: Path | None = None
    freeze: tuple[str, ...] = ()
    learners: dict[str, LearnerChoices] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    chosen: dict[str, str] = field(default_factory=dict)
    model_defaults: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    stop: StopFunction | None = field(default=None, compare=False, repr=False)
    on_step: OnStep | None = field(default=None, compare=False, repr=False)

    @cached_property
    def yaml(self) -> str:
        """The `tree` as YAML text, as `mptrain.config.compose.reload` reads it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.tree))

    @property
    def model_title(self) -> str:
        """Chosen option of the model, with its argument ``name`` if that is another: ``timm resnet10t``."""
        chosen = self.chosen.get("model", self.model.path)
        return " ".join(dict.fromkeys([chosen, str(self.model.arguments.get("name") or chosen)]))

    def for_learner(self, name: str) -> LearnerChoices:
        """Return the settings of a learner: those in ``learners.NAME``, or else the ones that all learners share."""
        shared = LearnerChoices(self.optimizer, self.schedule, self.scaler, self.train.clip_norm)
        return self.learners.get(name, shared)

    def for_dataset(self) -> dict[str, Any]:
        """Return the run's ``seed`` and ``batch_size``, which are passed to a data set that has such parameters."""
        return {"seed": self.seed, "batch_size": self.train.batch_size}
