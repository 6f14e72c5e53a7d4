"""Construction of a training run from a checked configuration: model, data, optimizers, loaders and so on."""

from __future__ import annotations

import functools
import os

import torch

from mptrain.config.schedules import schedule_notes
from mptrain.config.schema import Config
from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.evaluate import require_monitored
from mptrain.engine.fault_injection import Injection
from mptrain.engine.fingerprints import StartFingerprints
from mptrain.engine.parts import Options, Parts
from mptrain.engine.resources import keep_freed_memory, memory_in_use
from mptrain.engine.step import Plan
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator
from mptrain.precision.apply import autocast, set_matmul_precision
from mptrain.precision.support import require_support
from mptrain.precision.upcast import products, uses_upcast
from mptrain.run.build.learners import build_learners
from mptrain.run.build.model import draw_model, place_model
from mptrain.run.build.parallelism import (
    apply_parallel_strategy,
    check_parallelism,
    device_of,
    is_sharded_by,
    require_own_devices,
    warnings_about_parallelism,
)
from mptrain.run.build.refusals import (
    refuse_hooks_in_compiled,
    refuse_single_samples,
    require_still_shared,
    sharing_memory,
)
from mptrain.run.build.workload import (
    build_dataset,
    build_task,
    describe_statistics,
    describe_untold,
)
from mptrain.system.device import capabilities, untried, use
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.process_state import seed_everything
from mptrain.workloads.base.dataset import Dataset
from mptrain.workloads.base.loader import Loader


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
    drawn = draw_model(config, dataset, comm, load=weights)
    shared = sharing_memory(drawn.model)
    network = place_model(config, drawn, device, comm)
    require_still_shared(shared, sharded=is_sharded_by(config, comm.world_size))
    model = network.model
    loaders = build_loaders(config, dataset, device, comm)
    objectives, steps_per_epoch = task.objectives(), loaders["train"].steps_per_epoch
    strategy, blank = apply_parallel_strategy(config, model, network.kept, network.initial, comm, len(objectives))
    plan = Plan(
        accumulate=-(-max(config.train.accumulate, micro_batches) // comm.world_size),
        products=products(config.precision, device, compiled=config.train.compile),
        autocast=autocast(config.precision, device),
        guard=BufferGuard(model),
        accumulate_in_all=config.train.accumulate,
    )
    learners = build_learners(config, objectives, model, network.initial, steps_per_epoch, strategy)
    plan.guard.masters = tuple(learner.weights.masters for learner in learners)
    fault = Injection(config.inject, model, learners, comm)
    planned = config.train.planned(steps_per_epoch)
    parts = Parts(
        model=model,
        kept=network.kept,
        task=task,
        dataset=dataset,
        policy=config.precision,
        device=device,
        learners=learners,
        plan=plan,
        memory_format=network.memory_format,
        loaders=loaders,
        origin=StartFingerprints(drawn.digest, memory_before),
        probe=config.diagnostics.build(),
        fault=fault,
        notes=(
            *drawn.notes,
            *fault.describe(),
            *schedule_notes(config, objectives, planned),
            *_batch_notes(config, dataset),
        ),
        warnings=(
            *drawn.warnings,
            *getattr(dataset, "warnings", ()),
            *warnings_about_parallelism(config, comm.world_size),
            *describe_untold(config.model, dataset),
            *(describe_statistics(model, dataset) if config.weights is None else ()),
            *filter(None, (untried(device), network.clamped if weights else "")),  # a checkpoint replaces them
        ),
        comm=comm,
        blank=blank,
        frozen={} if blank is not None else network.frozen_halves(learners),
        infinite=frozenset(name for name, buffer in model.named_buffers() if buffer.isinf().any()),
    )
    refuse_hooks_in_compiled(config, parts)
    refuse_single_samples(config, parts, trains=trains)
    if trains:
        require_monitored(parts, config.train)
    seed_everything(config.seed)
    return parts, Options(config.train, config.checkpoint, config.log)


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
