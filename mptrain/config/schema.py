"""The one value that a command line and its YAML files become, and the options that no other package has.

Nothing after this border sees a DictConfig, and nothing here reads files or command lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import StringConstraints

from mptrain.config.targets import Target
from mptrain.config.value_checks import RangeDescription
from mptrain.engine.options import CheckpointOptions, InjectOptions, LogOptions, TrainOptions
from mptrain.errors import ConfigError
from mptrain.fields import PositiveInt
from mptrain.parallel.options import DistributedOptions
from mptrain.precision.policy import Policy
from mptrain.runlog.run_paths import check_run_name

Device = Annotated[
    str,
    StringConstraints(pattern=r"^(auto|cpu|mps(:0)?|(cuda|xpu)(:(0|[1-9][0-9]{0,2}))?)$"),
    RangeDescription("auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"),
]
#: torch takes seeds of 64 bits and counts those above half of them as negative.
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


#: Groups of which a learner may have another choice.
LEARNER_GROUPS = ("optimizer", "schedule", "scaler")


@dataclass(frozen=True)
class RunOptions:
    """Where the run directory is.

    Attributes:
        name: A stable directory, ``ROOT/NAME``; None makes a new one for each run.
        resume: What to do when ``ROOT/NAME`` exists: ``auto`` continues it or starts it, ``never`` refuses,
            ``must`` continues it and refuses to start.
        root: The folder in which run directories are made.
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
    """What may be called from YAML besides `mptrain.config.targets.PACKAGES`.

    Attributes:
        allow: Packages, or patterns of them (``mypkg.*``).
    """

    allow: tuple[TargetPattern, ...] = ()


@dataclass(frozen=True)
class GeneralOptions:
    """The keys at the top that belong to no section.

    Attributes:
        seed: Of initial weights, data order, augmentation and dropout.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``xpu``, ``xpu:N`` or ``mps``.
        threads: CPU threads of torch; None leaves torch's own choice.
    """

    seed: Seed = 0
    device: Device = "auto"
    threads: PositiveInt | None = None


#: Section of the configuration to the dataclass that checks it.
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
    """The parts of one learner.

    Attributes:
        optimizer: What moves its weights.
        schedule: Its learning rate as a function of its applied updates.
        scaler: How its gradients stay in range.
        clip_norm: Largest global L2 norm of its unscaled gradients; None does not clip.
    """

    optimizer: Target
    schedule: Target
    scaler: Target
    clip_norm: float | None


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    Attributes:
        task: What the workload's loss and metrics are.
        dataset: Where the samples come from.
        optimizer: What moves the weights.
        schedule: The learning rate as a function of applied updates.
        scaler: How gradients stay in range.
        logger: The experiment tracker that is shown the run.
        diagnostics: What looks at steps.
        model: The network; its ``defaults`` are in `model_defaults`.
        precision: Which dtype everything has.
        seed: Of initial weights, data order, augmentation and dropout.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``xpu``, ``xpu:N`` or ``mps``.
        threads: CPU threads of torch; None leaves torch's own choice.
        train: How long to train and what one update is.
        checkpoint: When to save and how much to keep.
        log: How often the host looks at the device's records.
        inject: A fault to put in on purpose.
        distributed: How the run is spread over processes.
        run: Where the run directory is.
        extensions: What else may be called from YAML.
        weights: A file of weights, or a run, that the model begins with; None draws them.
        learners: What differs from learner to learner, by name; see `for_learner`.
        yaml: The whole configuration, resolved; `mptrain.config.compose.reload` reads it again.
        overrides: The words of the command line that led to it.
        chosen: Group to the option chosen, e.g. ``{"model": "resnet50", "precision": "amp_dynamic"}``; where the words replaced
            the option's target, e.g. ``model._target_=torchvision.models.alexnet``, to the path of theirs.
        model_defaults: What the model's file says for other parts: rates, image size.
        warnings: What is allowed but probably not meant; one sentence each.
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
    learners: dict[str, LearnerChoices] = field(default_factory=dict)
    yaml: str = ""
    overrides: tuple[str, ...] = ()
    chosen: dict[str, str] = field(default_factory=dict)
    model_defaults: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def for_learner(self, name: str) -> LearnerChoices:
        """The parts of a learner: its own where ``learners.NAME`` says so, else those that all share."""
        shared = LearnerChoices(self.optimizer, self.schedule, self.scaler, self.train.clip_norm)
        return self.learners.get(name, shared)

    def for_dataset(self) -> dict[str, Any]:
        """Return what a data set is told about the run, where it has parameters for it."""
        return {"seed": self.seed, "batch_size": self.train.batch_size}
