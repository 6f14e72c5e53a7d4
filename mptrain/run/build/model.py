"""Model of a run: drawn from the seed in FP32 or loaded, then placed on its device in its precision mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mptrain.config.schema import Config
from mptrain.config.value_checks import first_line, show
from mptrain.engine.checkpointing import require_same_schema
from mptrain.engine.fingerprints import digest_of_weights
from mptrain.engine.step import Learner
from mptrain.engine.weights_io import has_averages, load_matching, plain_weights, read_weights
from mptrain.optimizer.parameter_groups import freeze
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.sync_batchnorm import convert_sync_batchnorm
from mptrain.precision.apply import cast_model, clamp_to_range, describe_clamped, input_dtype
from mptrain.run.build.parallelism import is_sharded_by, require_same_weights
from mptrain.run.build.refusals import require_copies
from mptrain.run.build.workload import require_facts
from mptrain.runlog import open_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.system.errors import CheckpointError, ConfigError, instance, out_of_memory
from mptrain.system.files import expanded
from mptrain.system.pretrained import ATTRIBUTE, FIT, Fit, PretrainedWeights
from mptrain.system.process_state import seed_everything
from mptrain.workloads.base.dataset import Dataset


@dataclass(frozen=True)
class DrawnModel:
    """Model in FP32 on the CPU with its initial weights.

    Attributes:
        digest: Digest of the initial weights; empty if a checkpoint replaces them.
        notes: Sentences for the user about loaded weights; ``warnings`` are those that doubt them.
    """

    model: nn.Module
    digest: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PlacedModel:
    """Model on its device, in the dtypes of its precision mode.

    Attributes:
        kept: Modules that compute in FP32, by name.
        initial: FP32 values of all parameters by name, before the cast; empty if the mode keeps parameters in FP32.
        clamped: Warning about weights beyond the range of the dtype; empty without any.
    """

    model: nn.Module
    kept: dict[str, nn.Module]
    initial: dict[str, torch.Tensor]
    memory_format: torch.memory_format
    clamped: str

    def frozen_halves(self, learners: Sequence[Learner]) -> dict[str, torch.Tensor]:
        """Return the FP32 values of half-precision parameters that no learner trains, by name."""
        frozen = self.initial.keys() - {name for learner in learners for name in learner.weights.names}
        halves = {name for name, parameter in self.model.named_parameters() if parameter.dtype.itemsize == 2}
        return {name: self.initial[name] for name in self.initial if name in frozen & halves}


def draw_model(config: Config, dataset: Dataset, comm: Communicator, *, load: bool) -> DrawnModel:
    """Build the model of a run, load initial weights unless a checkpoint will, and freeze what is not trained.

    Raises as `build_model`; CheckpointError if ``model.weights`` cannot be used; ConfigError if ranks drew different
    weights.
    """
    model = build_model(config, dataset)
    notes, doubts = load_initial_weights(model, config.weights) if load else ((), ())
    model.float()
    digest = digest_of_weights(model) if load else ""
    require_same_weights(digest, comm)
    if config.distributed.sync_batchnorm and comm.world_size > 1:
        model = convert_sync_batchnorm(model, comm)
    freeze(model, config.freeze)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # sums, norms and updates are of dense gradients, which have the same values
    return DrawnModel(model, digest, notes, doubts)


def place_model(config: Config, drawn: DrawnModel, device: torch.device, comm: Communicator) -> PlacedModel:
    """Move a model to the device, cast it as the precision mode says, and lay its weights out in memory.

    Raises ConfigError if the model is to be sharded and cannot be copied.
    """
    model, policy, sharded = drawn.model, config.precision, is_sharded_by(config, comm.world_size)
    clamped = clamp_to_range(model, policy)
    in_half = model.named_parameters() if policy.parameters != "float32" else ()
    initial = {name: value.detach().clone() for name, value in in_half}  # before they are cast, for master weights
    model.to(device)
    kept = cast_model(model, policy)
    memory_format = torch.channels_last if config.train.channels_last else torch.contiguous_format
    if not sharded:  # sharding needs contiguous weights
        model.to(memory_format=memory_format)
    require_copies(config, model, sharded=sharded)
    warning = describe_clamped(clamped, input_dtype(policy)) if clamped else ""
    return PlacedModel(model, kept, initial, memory_format, warning)


def build_model(config: Config, dataset: Dataset) -> nn.Module:
    """Build the configured model in FP32 on the CPU, with initial weights drawn from the seed.

    Facts of the data set, such as the number of classes, are passed to the model.

    Raises:
        ConfigError: The model cannot be built, is no `torch.nn.Module`, has parameters without a shape (lazy modules),
            or needs a fact that the data set lacks.
        EnvironmentRefused: There is not enough memory.
    """
    require_facts(config, "model", config.model, dataset)
    seed_everything(config.seed)
    try:
        model = config.model.build(**dataset.facts())
    except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
        if refused := out_of_memory(error, f"building {config.model.path}"):
            raise refused from error
        given = ", ".join(f"model.{name}={show(value)}" for name, value in config.model.arguments.items())
        raise ConfigError(
            f"{config.model.path} cannot be built with {given or 'its defaults'}: {first_line(error)}",
            "--traceback shows where it failed",
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{config.model.path} returned {instance(model)}, not a torch.nn.Module")
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ConfigError(
            f"{config.model.path} returned a model whose parameter {lazy[0]} has no shape yet",
            "give lazy modules their input size, so that a seed draws the same weights in every precision mode",
        )
    return model


def load_initial_weights(model: nn.Module, path: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load weights from a file or from the last checkpoint of a run, preferring averaged weights.

    Without a path, the model's own pretrained weights are loaded, if it has any. Return notes and warnings.
    """
    if path is None:
        own: PretrainedWeights | None = getattr(model, ATTRIBUTE, None)
        return ((), ()) if own is None else _load(model, own.read(), own.source)
    path = expanded(path)
    if path.is_dir():
        store = CheckpointStore(open_run(path).paths.checkpoints, keep=1)
        loaded = store.load_latest()
        if loaded is None:
            raise CheckpointError(f"model.weights={path} is a run without a checkpoint", "choose another run")
        require_same_schema(loaded.state)
        found = plain_weights(loaded.state, average=True)
        averaged = ", averaged" if has_averages(loaded.state) else ""
        source = f"{path} (step {loaded.manifest.step:,}{averaged})"
    else:
        found, source = read_weights(path), str(path)
    fit: Fit | None = getattr(model, FIT, None)
    return _load(model, found if fit is None else fit(model, found), source)


def _load(model: nn.Module, found: Mapping[str, torch.Tensor], source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    report = load_matching(model, found, source)
    said = (report.describe(source),)
    return ((), said) if report.is_doubtful else (said, ())
