"""Spreads what was built over the ranks of a run, or says why it cannot be."""

from __future__ import annotations

import torch
from torch import nn

from mptrain.config.schema import Config
from mptrain.device import count_of, use
from mptrain.engine.evaluate import without_storage
from mptrain.errors import ConfigError, EnvironmentRefused, Problem
from mptrain.parallel.communicator import Communicator
from mptrain.parallel.sharding import shard
from mptrain.parallel.strategy import LossModule, ParallelStrategy, strategy_of
from mptrain.precision.apply import DTYPES
from mptrain.precision.support import resolve_device


def device_of(name: str, comm: Communicator) -> torch.device:
    """The device of this rank: of several on a machine, each takes the CUDA device of its number.

    Raises:
        EnvironmentRefused: There is none.
        ConfigError: One device is named for several ranks, or one of a kind that exchanges nothing.
    """
    if comm.world_size == 1:
        return resolve_device(name)
    if ":" in name:
        raise ConfigError(
            f"device={name} for {comm.world_size} ranks", "write device=cuda: each rank takes the device of its number"
        )
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device={name} for {comm.world_size} ranks: they exchange gradients on CUDA devices and CPUs only",
            "write device=cpu, or distributed.procs=1",
        )
    if name == "cpu" or (name == "auto" and not count_of("cuda")):
        return torch.device("cpu")
    device = resolve_device(f"cuda:{comm.local_rank}")
    use(device)
    return device


def check_parallelism(config: Config, count: int) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: With all that is wrong.
    """
    if count == 1:
        return
    problems = []
    if config.train.batch_size < count:
        what = f"train.batch_size={config.train.batch_size} for {count} ranks: not every rank would have a sample"
        problems.append(Problem(what, f"write train.batch_size={count} or more"))
    if config.inject.rank is not None and config.inject.rank >= count:
        problems.append(
            Problem(f"inject.rank={config.inject.rank}: there are {count} ranks", f"they count from 0 to {count - 1}")
        )
    if is_sharded_by(config, count):
        refused = {
            "train.compile=true": config.train.compile,
            "diagnostics that look into modules": not config.diagnostics.path.endswith(".NoProbe"),
        }
        problems += [
            Problem(f"distributed=fsdp2 with {what}: ranks hold parts of the weights only", "choose distributed=ddp")
            for what, there in refused.items()
            if there
        ]
    if problems:
        raise ConfigError(problems)


def warnings_about_parallelism(config: Config, count: int) -> tuple[str, ...]:
    """Return what the user should know about a way of spreading that this number of ranks does not have."""
    if count > 1 or config.distributed.kind != "fsdp2":
        return ()
    return (
        "distributed=fsdp2 on one rank divides nothing: write distributed.procs=2 or more, or begin the ranks with torchrun",
    )


def is_sharded_by(config: Config, count: int) -> bool:
    """Whether ranks will hold parts of the weights."""
    return count > 1 and config.distributed.kind == "fsdp2"


def require_same_weights(digest: str, comm: Communicator) -> None:
    """Refuse ranks that have not drawn, or read, the same weights.

    Raises:
        EnvironmentRefused: They differ.
    """
    digests = comm.all_gather_object(digest)
    if len(set(digests)) > 1:
        other = next(rank for rank, one in enumerate(digests) if one != digests[0])
        raise EnvironmentRefused(
            f"ranks 0 and {other} do not begin with the same weights",
            "run the same versions of everything on all machines; weights from a file must be the same file",
        )


def apply_parallel_strategy(
    config: Config,
    model: nn.Module,
    kept: dict[str, nn.Module],
    initial: dict[str, torch.Tensor],
    comm: Communicator,
    learners: int,
) -> tuple[ParallelStrategy, nn.Module | None]:
    """How gradients come about, and where ranks hold parts of the weights, the model without values.

    Args:
        config: Of the run.
        model: On its device, in its dtypes; where it is sharded, this rank has its parts from here on.
        kept: Its modules in FP32.
        initial: Its parameters before they were cast.
        comm: Who they are.
        learners: How many train it.

    Raises:
        ConfigError: It cannot be sharded.
    """
    options = config.distributed
    wide = options.reduce == "float32"
    if not is_sharded_by(config, comm.world_size):
        find, meeting = options.find_unused_parameters, options.sync_batchnorm
        return strategy_of(comm, None, wide=wide, meeting=meeting, find_unused=find), None
    if learners > 1:
        raise ConfigError(
            f"distributed=fsdp2 with {learners} learners: it gathers the weights of one loss at a time",
            "choose distributed=ddp",
        )
    blank, root = without_storage(model), LossModule(None, model)
    policy, compute = config.precision, None
    if policy.master_weights:  # which are what is sharded then, and rounded whenever they are gathered
        compute = DTYPES[policy.parameters]
        for name, parameter in model.named_parameters():
            parameter.data = initial[name].to(parameter.device)
    apart = list(kept.values()) if policy.parameters != "float32" else []
    shard(root, model, options.units, apart, comm, compute=compute, wide=wide)
    return strategy_of(comm, root, wide=wide, meeting=True), blank
