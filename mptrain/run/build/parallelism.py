"""Distribution of a built run over its ranks (DDP or FSDP2), and refusal of combinations that cannot be distributed."""

from __future__ import annotations

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.engine.evaluate import without_storage
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.strategy import LossModule, ParallelStrategy, shard, strategy_of
from mptrain.precision.apply import DTYPES
from mptrain.precision.support import resolve_device
from mptrain.system.device import count_of, properties_of, use
from mptrain.system.errors import ConfigError, EnvironmentRefused, Problem


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
        other = next(rank for rank, one in enumerate(digests) if one != digests[0])
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
