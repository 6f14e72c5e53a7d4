"""Distribution of a built run over its ranks (DDP or FSDP2), and refusal of parts that do not work together."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.config.value_checks import first_line
from mptrain.engine.evaluate import gather_model, without_storage
from mptrain.engine.parts import Parts
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.strategy import LossModule, ParallelStrategy, shard, strategy_of
from mptrain.precision.apply import DTYPES
from mptrain.precision.support import resolve_device
from mptrain.system.device import count_of, properties_of, use
from mptrain.system.errors import ConfigError, EnvironmentRefused, Problem
from mptrain.system.torch_private import BatchNorm, storage_key


def device_of(name: str, comm: Communicator) -> torch.device:
    """Return the torch device that this rank of a run trains on, for the value of ``device`` in the configuration.

    With several ranks, each uses the CUDA device with its local rank as index among those that it sees, counted round
    (a launcher such as ``srun --gpus-per-task=1`` shows each rank its own as the only one), which becomes the current
    device; or all use the CPU. No rank is asked: rank 0 resolves its device alone, before the others begin to build.
    `require_own_devices` refuses ranks that share a device.

    Raises:
        EnvironmentRefused: There is no such device.
        ConfigError: One device is named for several ranks, or its kind supports no collective communication.
    """
    if comm.world_size == 1:
        return resolve_device(name)
    if ":" in name:
        raise ConfigError(
            f"device={name} names one device for {comm.world_size} ranks",
            "set device=cuda: each rank uses a device of its own",
        )
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device={name} with {comm.world_size} ranks: several ranks need CUDA devices or CPUs",
            "set device=cpu, or distributed.procs=1",
        )
    count = count_of("cuda")
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    device = resolve_device(f"cuda:{comm.local_rank % count}" if count else "cuda")
    use(device)
    return device


def require_own_devices(device: torch.device, comm: Communicator) -> None:
    """Check that the ranks of a run have a CUDA device each, or all the CPU. All ranks must call this.

    Raise EnvironmentRefused if two ranks have the same CUDA device, or only some ranks have one.
    """
    devices = comm.all_gather_object(str(properties_of(device).uuid) if device.type == "cuda" else "")
    for rank, uuid in enumerate(devices):
        what = f"ranks {devices.index(uuid)} and {rank} have the same GPU" if uuid in devices[:rank] else ""
        if any(devices) and (what or not uuid):
            raise EnvironmentRefused(
                what if uuid else f"rank {rank} sees no GPU, and other ranks do",
                "start one rank for each GPU (distributed.procs=N, or srun with --gpus-per-task=1), or set device=cpu",
            )


def check_parallelism(config: Config, count: int) -> None:
    """Check that the settings of a run work with its number of ranks, such as one sample per rank in every batch."""
    if count == 1:
        return
    problems = []
    if config.train.batch_size < count:
        what = f"train.batch_size={config.train.batch_size} with {count} ranks: some ranks would have no sample"
        problems.append(Problem(what, f"set train.batch_size={count} or more"))
    if config.inject.rank is not None and config.inject.rank >= count:
        problems.append(
            Problem(f"inject.rank={config.inject.rank}: there are {count} ranks", f"write a rank from 0 to {count - 1}")
        )
    problems += _refused_optimizers(config, sharded=is_sharded_by(config, count))
    if is_sharded_by(config, count):
        refused = {
            "train.compile=true": config.train.compile,
            "diagnostics that hook into modules": not config.diagnostics.path.endswith(".NoProbe"),
        }
        problems += [
            Problem(f"distributed=fsdp2 with {what}: the weights are sharded over the ranks", "choose distributed=ddp")
            for what, there in refused.items()
            if there
        ]
    if problems:
        raise ConfigError(problems)


def _refused_optimizers(config: Config, *, sharded: bool) -> list[Problem]:
    """Return the problems of optimizers with torch's interface that cannot run on several ranks, or not on shards."""
    problems = []
    for target in (config.optimizer, *(choices.optimizer for choices in config.learners.values())):
        rule = target.instance
        if isinstance(rule, TorchRule) and rule.draws:
            what = f"{rule.name} on several ranks: its updates draw random numbers, which differ between ranks"
            problems.append(Problem(what, "set optimizer.deterministic=true"))
        if isinstance(rule, TorchRule) and sharded and not rule.elementwise:
            what = (
                f"distributed=fsdp2 with {rule.name}: it is not known to update each element on its own, and a rank "
                "has only parts of the weights"
            )
            problems.append(Problem(what, "choose distributed=ddp, or an optimizer such as RAdam or lion"))
    return list(dict.fromkeys(problems))


def warnings_about_parallelism(config: Config, count: int) -> tuple[str, ...]:
    """Return a warning if ``distributed=fsdp2`` is chosen for a single rank, which shards nothing; else nothing."""
    if count > 1 or config.distributed.kind != "fsdp2":
        return ()
    return (
        "distributed=fsdp2 with one rank shards nothing: set distributed.procs=2 or more, or start the ranks with "
        "torchrun",
    )


def is_sharded_by(config: Config, count: int) -> bool:
    """Return whether a run shards its weights over the ranks: with ``distributed=fsdp2`` and more than one rank."""
    return count > 1 and config.distributed.kind == "fsdp2"


def require_same_weights(digest: str, comm: Communicator) -> None:
    """Check that all ranks have the same digest of initial weights; raise EnvironmentRefused if two differ."""
    digests = comm.all_gather_object(digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0])
        raise EnvironmentRefused(
            f"ranks 0 and {other} have different initial weights",
            "use the same versions of all packages, and the same weights file, on all machines",
        )


def apply_parallel_strategy(
    config: Config,
    model: nn.Module,
    kept: dict[str, nn.Module],
    initial: dict[str, torch.Tensor],
    comm: Communicator,
    learners: int,
) -> tuple[ParallelStrategy, nn.Module | None]:
    """Shard the model over the ranks if FSDP2 is configured, and return the strategy that combines their gradients.

    The second result is a copy of the whole model without storage if it was sharded, else None. Raise ConfigError if
    the model cannot be sharded.

    Args:
        config: Configuration of the run.
        model: The model on its device, in its dtypes. With FSDP2 it is sharded in place.
        kept: Modules of the model that stay in FP32, by name.
        initial: Parameters of the model before the cast, by name.
        comm: Communicator of the ranks.
        learners: Number of learners that train the model.
    """
    options = config.distributed
    wide = options.reduce == "float32"
    if not is_sharded_by(config, comm.world_size):
        find, meeting = options.find_unused_parameters, options.sync_batchnorm
        return strategy_of(comm, None, wide=wide, meeting=meeting, find_unused=find), None
    if learners > 1:
        raise ConfigError(
            f"distributed=fsdp2 with {learners} learners: FSDP2 gathers the weights for a single loss",
            "choose distributed=ddp",
        )
    blank, root = without_storage(model), LossModule(None, model)
    policy, compute = config.precision, None
    if policy.master_weights:  # FSDP2 shards the master weights and rounds them at each all-gather
        compute = DTYPES[policy.parameters]
        for name, parameter in model.named_parameters():
            parameter.data = initial[name].to(parameter.device)
    apart = list(kept.values()) if policy.parameters != "float32" else []
    shard(root, model, options.units, apart, comm, compute=compute, wide=wide)
    return strategy_of(comm, root, wide=wide, meeting=True), blank


def refuse_hooks_in_compiled(config: Config, parts: Parts) -> None:
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


def refuse_single_samples(config: Config, parts: Parts, *, trains: bool) -> None:
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
    if not single or not any(isinstance(module, BatchNorm) for module in parts.model.modules()):
        return
    model = gather_model(parts)
    if _no_copy(model):  # torch raises at that batch, then
        return
    for name, split in single:
        trial = cast("Any", copy.deepcopy(model)).train(name == "train")
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


def sharing_memory(model: nn.Module) -> list[tuple[str, nn.Parameter, str, nn.Parameter]]:
    """Return the pairs of parameters, with their names, that are different objects and have elements in common."""
    pairs = []
    held: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        others = held.setdefault(storage_key(parameter.untyped_storage()), [])
        pairs += [(first, other, name, parameter) for first, other in others if _overlap(parameter, other)]
        others.append((name, parameter))
    return pairs


def require_still_shared(pairs: list[tuple[str, nn.Parameter, str, nn.Parameter]], *, sharded: bool) -> None:
    """Refuse pairs of `sharing_memory` that a cast, a device or shards have given memory of their own."""
    for first, other, name, tensor in pairs:
        keys = {storage_key(parameter.untyped_storage()) for parameter in (other, tensor)}
        if sharded or len(keys) > 1:
            raise ConfigError(
                f"the parameters {first} and {name} share memory without being the same parameter, and training here "
                "gives each its own",
                "assign the same nn.Parameter to both, or train in one process on a CPU with FP32 parameters",
            )


def _overlap(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors in the same memory have elements in common."""
    occupied = torch.zeros(first.untyped_storage().nbytes() // first.itemsize, dtype=torch.bool)
    for each in (first, other):
        own = occupied.as_strided(
            [1 if s == 0 else n for s, n in zip(each.stride(), each.shape, strict=True)],
            each.stride(),
            each.storage_offset(),
        )
        if own.any():
            return True
        own.fill_(True)
    return False


def require_copies(config: Config, model: nn.Module, *, sharded: bool) -> None:
    """Refuse a model that is to be sharded and cannot be copied; must run before.

    Such models hold tensors computed from parameters, as the older weight and spectral norms do.
    """
    if sharded and (why := _no_copy(model)):
        raise ConfigError(
            f"distributed=fsdp2 evaluates a copy of the model, and {config.model.path} cannot be copied: {why}",
            "use torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm, or choose "
            "distributed=ddp",
        )


def _no_copy(model: nn.Module) -> str:
    """Return why a model cannot be copied; empty if it can."""
    try:
        copy.deepcopy(model)
    except Exception as error:  # a model of a user may hold anything
        return f"{type(error).__name__}: {first_line(error)}"
    return ""
