"""Construction of a training run from a checked configuration: its model, learners, loaders and all other parts."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mptrain.config.allowed_targets import PACKAGES, is_allowed
from mptrain.config.learner_checks import build_schedule, schedule_notes
from mptrain.config.schema import Config
from mptrain.config.targets import Target
from mptrain.config.value_checks import first_line, show
from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.checkpointing import require_same_schema
from mptrain.engine.fault_injection import Injection
from mptrain.engine.fingerprints import StartFingerprints, digest_of_code, digest_of_weights
from mptrain.engine.options import Options
from mptrain.engine.parts import Parts
from mptrain.engine.resources import keep_freed_memory, memory_in_use
from mptrain.engine.step import Learner, Plan
from mptrain.engine.validation import require_monitored
from mptrain.engine.weights_io import has_averages, load_matching, plain_weights, read_weights
from mptrain.optimizer.masters import Rounding
from mptrain.optimizer.parameter_groups import ParameterGroup, freeze, layer_factors, parameter_options, require_matches
from mptrain.optimizer.rules import ParameterOptions, Rule
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.optimizer.weights import WeightAverage, Weights
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.parallel.strategy import ParallelStrategy
from mptrain.parallel.sync_batchnorm import convert_sync_batchnorm
from mptrain.precision.apply import (
    autocast,
    cast_model,
    clamp_to_range,
    describe_clamped,
    input_dtype,
    set_matmul_precision,
)
from mptrain.precision.emulation import products_of
from mptrain.precision.support import require_support
from mptrain.precision.upcast import uses_upcast
from mptrain.run.build.parallelism import (
    apply_parallel_strategy,
    check_parallelism,
    device_of,
    is_sharded_by,
    refuse_hooks_in_compiled,
    refuse_single_samples,
    require_copies,
    require_own_devices,
    require_same_weights,
    require_still_shared,
    sharing_memory,
    warnings_about_parallelism,
)
from mptrain.run.build.workload import (
    build_dataset,
    build_task,
    describe_statistics,
    describe_untold,
    require_facts,
    require_known_learners,
)
from mptrain.runlog import open_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.scaler import Scaler
from mptrain.schedule.plateau import Plateau, RateReduction
from mptrain.schedule.rate_table import rate_table
from mptrain.system.device import capabilities, untried, use
from mptrain.system.errors import CheckpointError, ConfigError, EnvironmentRefused, instance, out_of_memory
from mptrain.system.files import expanded
from mptrain.system.pretrained import ATTRIBUTE, FIT, Fit, PretrainedWeights
from mptrain.system.process_state import seed_everything
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.task import Objective


def build_learners(
    config: Config,
    objectives: tuple[Objective, ...],
    model: nn.Module,
    initial: dict[str, torch.Tensor],
    steps_per_epoch: int,
    strategy: ParallelStrategy | None = None,
) -> tuple[Learner, ...]:
    """Build a learner for each objective of the task, with its own optimizer, scaler and schedule.

    ``initial`` has FP32 values of half-precision parameters by name, and ``strategy`` None is that of one rank.

    Raises:
        ConfigError: A learner trains nothing, or what another one trains; or a part is of the wrong kind.
    """
    names = [objective.learner for objective in objectives]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(f"the task has two objectives of the learner {twice[0]}", "give each a name of its own")
    require_known_learners(config, objectives)
    parts = {objective.learner: _parameters(model, objective, config) for objective in objectives}
    refuse_shared(model, objectives)
    learners = []
    for objective in objectives:
        choices, trained = config.for_learner(objective.learner), parts[objective.learner]
        rule = _build_rule(choices.optimizer)
        weights = Weights(
            trained,
            rule,
            master_weights=config.precision.master_weights,
            state_in_half=config.precision.optimizer_state == "parameters",
            clip_norm=choices.clip_norm,
            initial=initial,
            rounding=Rounding(config.precision.rounding, config.seed),
            options=_options_of(choices.optimizer, rule, model, trained),
        )
        device, decay = next(iter(trained.values())).device, config.train.ema_decay
        schedule, planned = build_schedule(choices.schedule), config.train.planned(steps_per_epoch)
        rates = rate_table(schedule, rule.lr, planned, device, steps_per_epoch)
        reduction = RateReduction(schedule, rule.lr, rates) if isinstance(schedule, Plateau) else None
        average = WeightAverage(weights, decay) if decay is not None else None
        others = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained]
        scaler = build_scaler(choices.scaler)
        learners.append(
            Learner(
                objective,
                weights,
                scaler,
                rates,
                device,
                average=average,
                others=others,
                strategy=strategy,
                reduction=reduction,
            )
        )
    return tuple(learners)


def _build_rule(target: Target) -> Rule | TorchRule:
    """Build the rule of an optimizer, or raise ConfigError if the target makes something else."""
    rule: Rule | TorchRule = target.build()
    if not isinstance(rule, TorchRule) and not hasattr(rule, "apply"):
        raise ConfigError(
            f"{target.path} is no optimizer: it takes no params, as a torch.optim.Optimizer does, and has no apply(), "
            "as an update rule of mptrain has",
            "choose one that mptrain list optimizer shows",
        )
    return rule


def build_scaler(target: Target) -> Scaler:
    """Build a loss scaling rule, or raise ConfigError if the target makes something else."""
    scaler = target.build()
    if not isinstance(scaler, Scaler):
        raise ConfigError(
            f"{target.path} is no loss scaling rule: it makes no mptrain.scaler.Scaler",
            "derive the class from mptrain.scaler.Scaler, or choose one that mptrain list scaler shows",
        )
    return scaler


def _options_of(
    optimizer: Target, rule: Rule | TorchRule, model: nn.Module, named: dict[str, nn.Parameter]
) -> dict[str, ParameterOptions]:
    """Return learning rate factor and weight decay of each parameter, by the groups and layer decay of an optimizer."""
    groups: tuple[ParameterGroup, ...] = optimizer.options.get("groups", ())
    for group in groups:
        require_matches("optimizer.groups", group.patterns, [name for name, _ in model.named_parameters()])
    decay = optimizer.options.get("layer_decay")
    factors = None if decay is None else layer_factors(model, list(named), decay)
    return parameter_options(named, rule, groups, factors)


def refuse_shared(model: nn.Module, objectives: tuple[Objective, ...]) -> None:
    """Refuse a parameter that two learners train: each would overwrite the other's updates from its master weights."""
    owners: dict[int, tuple[str, str]] = {}
    for objective in objectives:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad or not _is_in(name, objective.modules):
                continue
            first, learner = owners.setdefault(id(parameter), (name, objective.learner))
            if learner != objective.learner:
                also = name if name == first else f"{first}, which is also {name}"
                raise ConfigError(
                    f"the learners {learner} and {objective.learner} both train {also}",
                    "assign each parameter to one learner: the task's objectives list the modules of each learner",
                )


def _parameters(model: nn.Module, objective: Objective, config: Config) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if _is_in(name, objective.modules)}
    if not trained:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ConfigError(
            f"the learner {objective.learner} trains {', '.join(objective.modules)}, but {config.model.path} has only "
            f"the modules {children}",
            "choose a model that works with this task, or choose only a model, and its file sets a task for it",
        )
    return trained


def _is_in(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter belongs to one of the modules; ``layer1`` does not match ``layer10``."""
    return any(not module or parameter == module or parameter.startswith(f"{module}.") for module in modules)


@dataclass(frozen=True)
class DrawnModel:
    """Model in FP32 on the CPU with its initial weights.

    Attributes:
        digest: Digest of the initial weights; empty if a checkpoint replaces them.
        code: Digest of a model of the user's own; None for others.
        notes: Sentences for the user about loaded weights; ``warnings`` are those that doubt them.
    """

    model: nn.Module
    digest: str
    code: str | None
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
    # A model may make parameters in half precision, and the digest, equal in all precision modes, covers dtypes.
    model.float()
    own = config.model.given is not None or not is_allowed(config.model.path, PACKAGES["model"])
    code = digest_of_code(model) if own else None
    digest = digest_of_weights(model) if load else ""
    require_same_weights(digest, comm)
    if config.distributed.sync_batchnorm and comm.world_size > 1:
        model = convert_sync_batchnorm(model, comm)
    freeze(model, config.freeze)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # sums, norms and updates are of dense gradients, which have the same values
    return DrawnModel(model, digest, code, notes, doubts)


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
        made = f"the class {model.__name__}" if isinstance(model, type) else instance(model)
        hint = f"let it return an object: {model.__name__}()" if isinstance(model, type) else "let it return one"
        raise ConfigError(f"{config.model.path} returned {made}, not a torch.nn.Module", hint)
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
        weights = plain_weights(loaded.state, average=True)
        averaged = ", averaged" if has_averages(loaded.state) else ""
        source = f"{path} (step {loaded.manifest.step:,}{averaged})"
    else:
        weights, source = read_weights(path), str(path)
    fit: Fit | None = getattr(model, FIT, None)
    return _load(model, weights if fit is None else fit(model, weights), source)


def _load(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    report = load_matching(model, state, source)
    messages = (report.describe(source),)
    return ((), messages) if report.is_doubtful else (messages, ())


def build(
    config: Config,
    *,
    weights: bool = True,
    comm: Communicator = SINGLE_PROCESS,
    micro_batches: int = 1,
    trains: bool = True,
    dataset: Dataset | None = None,
) -> tuple[Parts, Options]:
    """Build all parts of a training run: model, data loaders, learners and so on, and its options.

    One seed gives the same initial weights in every precision mode: they are drawn in FP32 on the CPU from the seed
    alone, then moved to the device and cast. The generators are seeded again afterwards, so dropout does not depend on
    how many numbers the model's construction drew.

    Args:
        config: The checked configuration.
        weights: Whether to load ``model.weights``; False for a resumed run, which loads its checkpoint.
        comm: Communicator of the ranks; all ranks build at the same time.
        micro_batches: Smallest number of micro-batches in an update, summed over all ranks.
        trains: Whether the run is to train; False to evaluate it, which needs no validation data and no training data.
        dataset: Data set, such as that of a run that is evaluated on other data than its own; None for the configured
            one.

    Raises:
        EnvironmentRefused: The device does not support the precision.
        DataError: The data is missing or unusable.
        CheckpointError: ``model.weights`` cannot be used.
        ConfigError: Parts are incompatible.
    """
    device = _prepare_process(config, comm)
    memory_before = memory_in_use(device)
    check_parallelism(config, comm.world_size)
    with comm.main_process_first():
        dataset = dataset or build_dataset(config)
    task = build_task(config, dataset)
    drawn, placed = _draw_and_place_model(config, dataset, device, comm, load=weights)
    model, loaders = placed.model, build_loaders(config, dataset, device, comm)
    objectives, steps_per_epoch = task.objectives(), loaders["train"].steps_per_epoch
    strategy, blank = apply_parallel_strategy(config, model, placed.kept, placed.initial, comm, len(objectives))
    learners = build_learners(config, objectives, model, placed.initial, steps_per_epoch, strategy)
    plan = _build_plan(config, placed, learners, device, comm, micro_batches)
    fault = Injection(config.inject, model, learners, comm)
    parts = Parts(
        model=model,
        kept=placed.kept,
        task=task,
        dataset=dataset,
        policy=config.precision,
        device=device,
        learners=learners,
        plan=plan,
        memory_format=placed.memory_format,
        loaders=loaders,
        origin=StartFingerprints(drawn.digest, memory_before, drawn.code),
        probe=config.diagnostics.build(),
        fault=fault,
        notes=(
            *drawn.notes,
            *fault.describe(),
            *schedule_notes(config, objectives, config.train.planned(steps_per_epoch)),
            *_batch_notes(config, dataset),
        ),
        warnings=_warnings(config, dataset, drawn, placed, device, comm, weights=weights),
        comm=comm,
        blank=blank,
        frozen={} if blank is not None else placed.frozen_halves(learners),
        infinite=frozenset(name for name, buffer in model.named_buffers() if buffer.isinf().any()),
    )
    _require_compatible(config, parts, trains=trains)
    # Again: the construction of the model drew as many numbers as its layers needed.
    seed_everything(config.seed)
    return parts, Options(config.train, config.checkpoint, config.log, config.stop, config.on_step)


def _prepare_process(config: Config, comm: Communicator) -> torch.device:
    """Set up this process as configured (threads, device, precision and choice of kernels) and return the device."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    policy, device = config.precision, device_of(config.device, comm)
    require_support(policy, device)
    require_own_devices(device, comm)
    comm.use(device)
    if config.train.compile and uses_upcast(policy, device):
        raise EnvironmentRefused(
            f"train.compile=true with precision={policy.name}: this CPU has no {policy.compute} arithmetic, and matrix "
            "products that compute in FP32 and round once cannot be compiled",
            "set train.compile=false, choose precision=fp32, or add precision.cpu_kernels=native",
        )
    use(device)
    if device.type == "cpu":
        keep_freed_memory()
    set_matmul_precision(policy)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch demands it; cuBLAS reads it when it begins
    if config.train.deterministic is not None:
        torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = config.train.cudnn_benchmark
    return device


def _draw_and_place_model(
    config: Config, dataset: Dataset, device: torch.device, comm: Communicator, *, load: bool
) -> tuple[DrawnModel, PlacedModel]:
    """Build the model with its initial weights and place it.

    Raises as `draw_model` and `place_model`; ConfigError if placing it separates parameters that share memory.
    """
    drawn = draw_model(config, dataset, comm, load=load)
    # Found before it is placed: a cast or another device gives each parameter memory of its own.
    shared = sharing_memory(drawn.model)
    placed = place_model(config, drawn, device, comm)
    require_still_shared(shared, sharded=is_sharded_by(config, comm.world_size))
    return drawn, placed


def _build_plan(
    config: Config,
    placed: PlacedModel,
    learners: Sequence[Learner],
    device: torch.device,
    comm: Communicator,
    micro_batches: int,
) -> Plan:
    """Build the settings of every step, with at least ``micro_batches`` in an update, summed over all ranks."""
    return Plan(
        accumulate=-(-max(config.train.accumulate, micro_batches) // comm.world_size),
        products=products_of(config.precision, placed.model, placed.kept, device, compiled=config.train.compile),
        autocast=autocast(config.precision, device),
        guard=BufferGuard(placed.model, [learner.weights.masters for learner in learners]),
        accumulate_in_all=config.train.accumulate,
    )


def _warnings(
    config: Config,
    dataset: Dataset,
    drawn: DrawnModel,
    placed: PlacedModel,
    device: torch.device,
    comm: Communicator,
    *,
    weights: bool,
) -> tuple[str, ...]:
    """Return deviations from what the user asked for, one sentence each; ``weights`` is that of `build`."""
    return (
        *drawn.warnings,
        *getattr(dataset, "warnings", ()),
        *warnings_about_parallelism(config, comm.world_size),
        *describe_untold(config.model, dataset),
        *(describe_statistics(placed.model, dataset) if config.weights is None else ()),
        # A checkpoint replaces weights that were clamped.
        *filter(None, (untried(device), placed.clamped if weights else "")),
    )


def _require_compatible(config: Config, parts: Parts, *, trains: bool) -> None:
    """Raise ConfigError for parts that cannot work together; all ranks must call this."""
    refuse_hooks_in_compiled(config, parts)
    refuse_single_samples(config, parts, trains=trains)
    if trains:
        require_monitored(parts, config.train, stop=config.stop is not None)


def build_loaders(
    config: Config, dataset: Dataset, device: torch.device, comm: Communicator = SINGLE_PROCESS
) -> dict[str, Loader]:
    """Build a run's data loaders of this rank: ``train``, and ``val`` and ``test`` if the data set has these splits.

    The samples are divided among the ranks. The device decides if batches are in pinned memory.
    """
    make = functools.partial(
        Loader,
        batch_size=config.train.batch_size,
        seed=config.seed,
        workers=dataset.workers,
        pin=capabilities(device).pinned,
        rank=comm.rank,
        world_size=comm.world_size,
        here=comm.local_world_size,
    )
    loaders = {"train": make(dataset.train, shuffle=True, one_batch=config.train.one_batch)}
    loaders |= {
        name: make(split, shuffle=False) for name, split in (("val", dataset.val), ("test", dataset.test)) if split
    }
    return loaders


def _batch_notes(config: Config, dataset: Dataset) -> tuple[str, ...]:
    size, samples = config.train.batch_size, len(dataset.train)
    if size <= samples or config.train.one_batch:
        return ()
    return (f"train.batch_size={size} is more than the {samples:,} training samples: an epoch is one step with all",)
