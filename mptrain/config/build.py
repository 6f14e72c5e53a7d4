"""Construction of a training run from a checked configuration: model, data, optimizers, loaders and so on."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mptrain.config.build_workload import (
    build_dataset,
    build_task,
    describe_statistics,
    describe_untold,
    require_facts,
    require_known_learners,
)
from mptrain.config.parallelism import (
    apply_parallel_strategy,
    check_parallelism,
    device_of,
    is_sharded_by,
    require_own_devices,
    require_same_weights,
    warnings_about_parallelism,
)
from mptrain.config.schedules import build_schedule, schedule_notes
from mptrain.config.schema import Config
from mptrain.config.targets import Target
from mptrain.config.value_checks import first_line, show
from mptrain.device import capabilities, untried, use
from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.evaluate import gather_model
from mptrain.engine.fault_injection import Injection
from mptrain.engine.fingerprints import StartFingerprints, digest_of_weights
from mptrain.engine.memory import keep_freed_memory, memory_in_use
from mptrain.engine.monitor import require_monitored
from mptrain.engine.parts import Options, Parts
from mptrain.engine.snapshot import require_same_schema
from mptrain.engine.step import Learner, Plan
from mptrain.engine.weights_io import has_averages, load_matching, plain_weights, read_weights
from mptrain.errors import CheckpointError, ConfigError, EnvironmentRefused, Problem, instance, out_of_memory
from mptrain.optimizer.average import WeightAverage
from mptrain.optimizer.freezing import freeze
from mptrain.optimizer.parameter_groups import (
    ParameterGroup,
    ParameterOptions,
    layer_factors,
    parameter_options,
    require_matches,
)
from mptrain.optimizer.rules import Rule
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.optimizer.weights import Weights
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
from mptrain.precision.support import require_support
from mptrain.precision.upcast import products, uses_upcast
from mptrain.pretrained import ATTRIBUTE, FIT, Fit, PretrainedWeights
from mptrain.random_state import seed_everything
from mptrain.runlog import open_run
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.scaler import Scaler
from mptrain.schedule.plateau import Plateau, RateReduction
from mptrain.schedule.rate_table import rate_table
from mptrain.torch_private import BatchNorm
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.loader import Loader
from mptrain.workloads.base.task import Objective


def build(
    config: Config,
    *,
    weights: bool = True,
    comm: Communicator = SINGLE_PROCESS,
    micro_batches: int = 1,
    trains: bool = True,
    labels: tuple[str, ...] | None = None,
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
        labels: Labels of a run that is evaluated on other data than its own (`build_dataset`).

    Raises:
        EnvironmentRefused: The device does not support the precision.
        DataError: The data is missing or unusable.
        CheckpointError: ``model.weights`` cannot be used.
        ConfigError: Parts are incompatible.
    """
    policy, device = config.precision, _ready(config, comm)
    memory_before = memory_in_use(device)
    check_parallelism(config, comm.world_size)
    with comm.main_process_first():
        dataset = build_dataset(config, labels)
    task = build_task(config, dataset)
    model = build_model(config, dataset)
    notes, doubts = _initial_weights(model, config.weights) if weights else ((), ())
    model.float()
    origin = StartFingerprints(digest_of_weights(model) if weights else "", memory_before)
    require_same_weights(origin.initial_weights, comm)
    if config.distributed.sync_batchnorm and comm.world_size > 1:
        model = convert_sync_batchnorm(model, comm)
    freeze(model, config.freeze)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # sums, norms and updates are of dense gradients, which have the same values
    clamped = clamp_to_range(model, policy)
    warnings = (
        *doubts,
        *getattr(dataset, "warnings", ()),
        *warnings_about_parallelism(config, comm.world_size),
        *describe_untold(config.model, dataset),
        *(describe_statistics(model, dataset) if config.weights is None else ()),
    )
    if unproven := untried(device):
        warnings = (*warnings, unproven)
    if clamped and weights:  # a resumed run replaces these weights
        warnings = (*warnings, describe_clamped(clamped, input_dtype(policy)))
    drawn = model.named_parameters() if policy.parameters != "float32" else ()
    initial = {name: value.detach().clone() for name, value in drawn}  # before they are cast, for master weights
    model.to(device)
    kept = cast_model(model, policy)
    memory_format = torch.channels_last if config.train.channels_last else torch.contiguous_format
    if not is_sharded_by(config, comm.world_size):  # sharding needs contiguous weights
        model.to(memory_format=memory_format)
    _require_copies(config, model, sharded=is_sharded_by(config, comm.world_size))
    loaders = build_loaders(config, dataset, device, comm)
    strategy, blank = apply_parallel_strategy(config, model, kept, initial, comm, len(task.objectives()))
    plan = Plan(
        accumulate=-(-max(config.train.accumulate, micro_batches) // comm.world_size),
        products=products(policy, device, compiled=config.train.compile),
        autocast=autocast(policy, device),
        guard=BufferGuard(model),
        asked=config.train.accumulate,
    )
    learners = _build_learners(config, task.objectives(), model, initial, loaders["train"].steps_per_epoch, strategy)
    plan.guard.masters = tuple(learner.weights.masters for learner in learners)
    trained = {name for learner in learners for name in learner.weights.names}
    halves = () if blank is not None else model.named_parameters()
    frozen = {name: initial[name] for name, p in halves if name in initial.keys() - trained and p.dtype.itemsize == 2}
    fault, planned = (
        Injection(config.inject, model, learners, comm),
        config.train.planned(loaders["train"].steps_per_epoch),
    )
    parts = Parts(
        model=model,
        kept=kept,
        task=task,
        dataset=dataset,
        policy=policy,
        device=device,
        learners=learners,
        plan=plan,
        memory_format=memory_format,
        loaders=loaders,
        origin=origin,
        probe=config.diagnostics.build(),
        fault=fault,
        notes=(
            *notes,
            *fault.describe(),
            *schedule_notes(config, task.objectives(), planned),
            *_batch_notes(config, dataset),
        ),
        warnings=warnings,
        comm=comm,
        blank=blank,
        frozen=frozen,
        infinite=frozenset(name for name, buffer in model.named_buffers() if buffer.isinf().any()),
    )
    _refuse_hooks_in_compiled(config, parts)
    _refuse_single_samples(config, parts, trains=trains)
    if trains:
        require_monitored(parts, config.train)
    seed_everything(config.seed)
    return parts, Options(config.train, config.checkpoint, config.log)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Restore afterwards what keys of a run set for the whole process: torch's threads and its choice of kernels."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    mode = torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.get_deterministic_debug_mode() != mode:  # setting it imports torch's compiler
            torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark


def _ready(config: Config, comm: Communicator) -> torch.device:
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


def _initial_weights(model: nn.Module, path: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load weights from a file or from the last checkpoint of a run, preferring averaged weights.

    Without a path, the model's own pretrained weights are loaded, if it has any. Return notes and warnings.
    """
    if path is None:
        own: PretrainedWeights | None = getattr(model, ATTRIBUTE, None)
        return ((), ()) if own is None else _load(model, own.read(), own.source)
    path = path.expanduser()
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


def _build_learners(
    config: Config,
    objectives: tuple[Objective, ...],
    model: nn.Module,
    initial: dict[str, torch.Tensor],
    steps_per_epoch: int,
    strategy: ParallelStrategy | None = None,
) -> tuple[Learner, ...]:
    require_known_learners(config, objectives)
    parts = {objective.learner: _parameters(model, objective, config) for objective in objectives}
    _refuse_shared(model, objectives)
    learners = []
    for objective in objectives:
        choices, trained = config.for_learner(objective.learner), parts[objective.learner]
        rule: Rule | TorchRule = choices.optimizer.build()
        if not isinstance(rule, TorchRule) and not hasattr(rule, "apply"):
            raise ConfigError(
                f"{choices.optimizer.path} is no optimizer: it takes no params, as a torch.optim.Optimizer does, and "
                "has no apply(), as an update rule of mptrain has",
                "choose one that mptrain list optimizer shows",
            )
        weights = Weights(
            trained,
            rule,
            master_weights=config.precision.master_weights,
            state_in_half=config.precision.optimizer_state == "parameters",
            clip_norm=choices.clip_norm,
            initial=initial,
            options=_options_of(choices.optimizer, rule, model, trained),
        )
        device, decay = next(iter(trained.values())).device, config.train.ema_decay
        schedule, planned = build_schedule(choices.schedule), config.train.planned(steps_per_epoch)
        rates = rate_table(schedule, rule.lr, planned, device, steps_per_epoch)
        reduction = RateReduction(schedule, rule.lr, rates) if isinstance(schedule, Plateau) else None
        average = WeightAverage(weights, decay) if decay is not None else None
        others = [p for name, p in model.named_parameters() if p.requires_grad and name not in trained]
        scaler = choices.scaler.build()
        if not isinstance(scaler, Scaler):
            raise ConfigError(
                f"{choices.scaler.path} is no loss scaling rule: it makes no mptrain.scaler.Scaler",
                "derive the class from mptrain.scaler.Scaler, or choose one that mptrain list scaler shows",
            )
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


def _options_of(
    optimizer: Target, rule: Rule | TorchRule, model: nn.Module, named: dict[str, nn.Parameter]
) -> dict[str, ParameterOptions]:
    """Return learning rate factor and weight decay of each parameter, by the groups and layer decay of an optimizer."""
    groups: tuple[ParameterGroup, ...] = optimizer.beside.get("groups", ())
    for group in groups:
        require_matches("optimizer.groups", group.patterns, [name for name, _ in model.named_parameters()])
    decay = optimizer.beside.get("layer_decay")
    factors = None if decay is None else layer_factors(model, list(named), decay)
    return parameter_options(named, rule, groups, factors)


def _refuse_shared(model: nn.Module, objectives: tuple[Objective, ...]) -> None:
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
    found = {name: parameter for name, parameter in model.named_parameters() if _is_in(name, objective.modules)}
    if not found:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ConfigError(
            f"the learner {objective.learner} trains {', '.join(objective.modules)}, but {config.model.path} has only "
            f"the modules {children}",
            "choose a model that works with this task, or choose only a model, and its file sets a task for it",
        )
    return found


def _is_in(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter belongs to one of the modules; ``layer1`` does not match ``layer10``."""
    return any(not module or parameter == module or parameter.startswith(f"{module}.") for module in modules)


def _refuse_hooks_in_compiled(config: Config, parts: Parts) -> None:
    """Refuse diagnostics and fault injection that hook into modules if ``train.compile`` is on."""
    asked = {"diagnostics": parts.probe.sees_modules, "inject.tensor": parts.fault.in_modules}
    problems = [
        Problem(
            f"{key} needs hooks on single modules, which train.compile=true compiles into one graph",
            "set train.compile=false",
        )
        for key, needed in asked.items()
        if needed and config.train.compile
    ]
    if problems:
        raise ConfigError(problems)


def _refuse_single_samples(config: Config, parts: Parts, *, trains: bool) -> None:
    """Refuse batch sizes that leave a micro-batch of one sample if a BatchNorm then has one value per channel.

    Without this check, torch raises only at the end of the first epoch.
    """
    size, world_size = config.train.batch_size, parts.comm.world_size
    accumulate = parts.plan.accumulate * world_size
    single = [
        (name, loader.split)
        for name, loader in parts.loaders.items()
        if trains or name != "train"
        for rest in {min(size, len(loader.split)), len(loader.split) % size} - {0}
        if rest // min(rest, accumulate if name == "train" else world_size) == 1
    ]
    if not any(isinstance(module, BatchNorm) for module in parts.model.modules()):
        return
    for name, split in single:
        trial = cast("Any", copy.deepcopy(gather_model(parts))).train(name == "train")
        sample = parts.prepare(split.fetch([0], 0, config.seed))
        try:
            with torch.no_grad(), parts.plan.products.context, parts.plan.autocast:
                for learner in parts.learners if name == "train" else ():
                    learner.objective.loss(trial, sample)
                if name != "train":
                    parts.task.measure(trial, sample)
        except ValueError as error:
            with_accumulation = f" in {accumulate} micro-batches" if name == "train" and accumulate > 1 else ""
            what = "micro-batch" if name == "train" else "batch"
            raise ConfigError(
                f"train.batch_size={size}{with_accumulation} leaves a {what} of one sample out of {len(split)} in "
                f"{name}, and BatchNorm cannot normalise one value per channel ({error})",
                "choose a batch size that divides differently, or accumulate less",
            ) from error


def _require_copies(config: Config, model: nn.Module, *, sharded: bool) -> None:
    """Refuse a model that cannot be copied if evaluations need a copy; must run before the model is sharded.

    Such models hold tensors computed from parameters, as the older weight and spectral norms do.
    """
    policy = config.precision
    copied = {
        "train.ema_decay": config.train.ema_decay is not None,
        "precision.eval=fp32": policy.eval == "fp32" and policy.parameters != "float32",
        "distributed=fsdp2": sharded,
    }
    key = next((key for key, needed in copied.items() if needed), "")
    if not key:
        return
    try:
        copy.deepcopy(model)
    except RuntimeError as error:
        raise ConfigError(
            f"{key} evaluates a copy of the model, and {config.model.path} cannot be copied: {first_line(error)}",
            "use torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm",
        ) from error
