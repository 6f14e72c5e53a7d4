"""Options of distributed training: the ``distributed`` keys of a configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptrain.system.errors import ConfigError, Problem
from mptrain.system.fields import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class DistributedOptions:
    """Options of distributed training, the ``distributed`` keys of a configuration; without effect on one rank.

    Attributes:
        kind: ``ddp``: every rank holds all weights (torch's DistributedDataParallel). ``fsdp2``: weights, master
            weights, gradients and optimizer state are sharded over ranks (torch's fully_shard).
        procs: Number of ranks to start on this machine; None uses the ranks that torchrun has started, or one.
        sync_batchnorm: Whether BatchNorm computes its statistics over the samples of all ranks.
        reduce: Dtype in which gradients are summed over ranks: ``float32``, or ``gradients`` for their own dtype.
        find_unused_parameters: Whether ``ddp`` looks in every step for parameters without a gradient on a rank.
            Otherwise this is done only if the first batch has unused parameters, and a later batch with unused
            parameters stops the run.
        units: Qualified names of modules whose weights ``fsdp2`` gathers together; the remaining weights form one unit.
            None selects the composite members of each ``nn.Sequential`` and ``nn.ModuleList``.
        timeout: Seconds after which a rank that does not respond counts as lost.

    Raises:
        ConfigError: ``units`` is set without ``fsdp2``, or ``find_unused_parameters`` without ``ddp``.
    """

    kind: Literal["ddp", "fsdp2"] = "ddp"
    procs: PositiveInt | None = None
    sync_batchnorm: bool = False
    reduce: Literal["float32", "gradients"] = "float32"
    find_unused_parameters: bool = False
    units: tuple[str, ...] | None = None
    timeout: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        if self.units is not None and self.kind != "fsdp2":
            raise ConfigError(
                Problem(
                    f"distributed.units has no effect with distributed.kind={self.kind}",
                    "remove it, or set distributed.kind=fsdp2: only fsdp2 gathers weights by unit",
                )
            )
        if self.find_unused_parameters and self.kind != "ddp":
            raise ConfigError(
                Problem(
                    f"distributed.find_unused_parameters has no effect with distributed.kind={self.kind}",
                    "remove it, or set distributed.kind=ddp: only ddp supports missing gradients on a rank",
                )
            )
