"""How a run is spread over processes: the ``distributed`` keys. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mptrain.errors import ConfigError, Problem
from mptrain.fields import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class DistributedOptions:
    """How a run is spread over processes, its ranks. With one rank none of it means anything.

    Attributes:
        kind: ``ddp``: every rank has all weights (torch's DistributedDataParallel). ``fsdp2``: every rank has a part of the
            weights, of their masters, of the gradients and of the optimizer's state (torch's fully_shard).
        procs: Ranks to begin on this machine; None takes those that torchrun has begun, or one.
        sync_batchnorm: BatchNorm takes its statistics over the samples of all ranks, instead of those of each.
        reduce: Dtype in which gradients are summed over ranks: ``float32``, or ``gradients`` for their own.
        find_unused_parameters: With ``ddp``, look in every step for parameters that have no gradient on a rank. Else that is
            only done where the first batch leaves some out, and a later one that does so ends the run.
        units: With ``fsdp2``, the modules whose weights are gathered together, by qualified name; the rest is gathered as one.
            None chooses the composite members of each ``nn.Sequential`` and ``nn.ModuleList``.
        timeout: Seconds after which a rank that does not answer counts as lost.
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
                    f"distributed.units with distributed.kind={self.kind}", "only fsdp2 gathers weights unit by unit"
                )
            )
        if self.find_unused_parameters and self.kind != "ddp":
            raise ConfigError(
                Problem(
                    f"distributed.find_unused_parameters with distributed.kind={self.kind}",
                    "only ddp can go without the gradients of a rank",
                )
            )
