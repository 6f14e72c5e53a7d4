"""What was seen of one learner's step: the value that findings are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mptrain.probe.module_trail import Call
    from mptrain.probe.observer import CustomFunction, Operation, Refusal


@dataclass(frozen=True, slots=True)
class Faulty:
    """A tensor that holds something else than finite numbers.

    Attributes:
        name: Of the tensor of a batch, of a parameter or a buffer.
        kind: ``inf`` or ``nan``.
        samples: In which samples of a batch, by place; empty for weights.
        widely_finite: The same values were finite in FP32, before they were cast to what the model takes.
    """

    name: str
    kind: str
    samples: tuple[int, ...] = ()
    widely_finite: bool = False


@dataclass(frozen=True)
class Observation:
    """A forward and a backward pass of one learner, without an update.

    Attributes:
        learner: Its name.
        step: Which attempt it is, or would be.
        loss_scale: What the loss was multiplied by.
        loss: Unscaled; NaN where torch refused an operator before there was one.
        samples: Of the batch.
        operations: Every operator, in order.
        calls: How often each module was called, in the order of their first calls.
        ended: Every call of a module, in the order in which they ended.
        types: The class of each module.
        functions: Custom autograd functions.
        refusal: What torch refused; None if the passes came to their end.
        inputs: What of the batch is not finite.
        weights: What of parameters and buffers is not finite.
        largest_weight: The largest finite magnitude among the parameters, and its name.
        gradients: Parameters whose gradients are not finite: name and kind.
        untrained: `mptrain.engine.rehearsal.Rehearsal.untrained`.
        census: `mptrain.precision.census.OperatorCensus.table`.
    """

    learner: str
    step: int
    loss_scale: float
    loss: float
    samples: int
    operations: tuple[Operation, ...]
    calls: Mapping[str, int]
    ended: tuple[Call, ...]
    types: Mapping[str, str]
    functions: tuple[CustomFunction, ...]
    refusal: Refusal | None
    inputs: tuple[Faulty, ...]
    weights: tuple[Faulty, ...]
    largest_weight: tuple[float, str]
    gradients: tuple[tuple[str, str], ...]
    untrained: Mapping[str, list[str]]
    census: Mapping[str, list[dict[str, Any]]]

    @property
    def finite(self) -> bool:
        """The step could be applied: its loss and all gradients are finite."""
        return self.refusal is None and math.isfinite(self.loss) and not self.gradients

    def of(self, phase: str) -> list[Operation]:
        """The operators of one pass."""
        return [operation for operation in self.operations if operation.phase == phase]
