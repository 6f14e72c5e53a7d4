"""Values of recent training steps (loss, scale, norms) and their buffer on the device, copied to the host in blocks.

Recording a step keeps references to its device values and launches no kernel. A full ring becomes one block of float64
(float32 on a device without FP64), which holds FP32 values exactly. The block is copied to the host asynchronously
while the next steps are recorded; only a reader that needs the values at once waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mptrain.system.device import capabilities, event_now, widest


class StepValues(NamedTuple):
    """Values of one attempted training step on the device; none of the tensors is changed in place afterwards.

    ``loss`` is the unscaled loss, a float32 scalar. All others but ``norms`` have shape (1,), in float32 or, as the L2
    norm ``grad_norm`` of all unscaled gradients before clipping, in the dtype of the verdict. ``skip`` is 1 if the
    update was skipped, else 0. ``applied_norm`` is the norm of the gradients as a watched optimizer was given them, and
    without meaning in a run. ``norms`` are those of `Verdict.norms`, shape (P,).
    """

    loss: Tensor
    loss_scale: Tensor
    lr: Tensor
    next_scale: Tensor
    grad_norm: Tensor
    skip: Tensor
    applied_norm: Tensor
    norms: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> StepValues:
        """Return the values of a tensor of `stack` of one step, as views in its dtype."""
        width = len(cls._fields) - 1
        return cls._make([packed[0], *(packed[at : at + 1] for at in range(1, width)), packed[width:]])


class HostValues(NamedTuple):
    """The same values on the host; ``norms`` is empty without an overflow, and -1 stands for no gradient."""

    loss: float
    loss_scale: float
    lr: float
    next_scale: float
    grad_norm: float
    skip: float
    applied_norm: float
    norms: list[float]

    @property
    def overflow(self) -> bool:
        """True if a gradient was not finite."""
        return not math.isfinite(self.grad_norm)


def stack(steps: Sequence[StepValues]) -> Tensor:
    """Return the values of N steps as one tensor, field after field, in the dtype of the norms."""
    *scalars, norms = zip(*steps, strict=True)
    columns = [torch.hstack(column).to(norms[0].dtype) for column in scalars]
    return torch.cat([*columns, *norms])


def unstack(block: Tensor, count: int) -> list[HostValues]:
    """Return the values of ``count`` steps from a tensor of `stack`; waits for the device if it is there."""
    block, width = block.cpu(), len(StepValues._fields) - 1
    columns = block[: width * count].view(width, count).tolist()
    norms = block[width * count :].view(count, -1)
    steps = [HostValues._make((*scalars, [])) for scalars in zip(*columns, strict=True)]
    return [step._replace(norms=norms[at].tolist()) if step.overflow else step for at, step in enumerate(steps)]


class Ring:
    """Buffer for the values of one learner's recent training steps, which reaches the host without stopping the device.

    ``capacity`` steps are copied together, as one block. ``parameters`` is the length of `Verdict.norms`.
    """

    def __init__(self, capacity: int, parameters: int, device: torch.device) -> None:
        self._capacity = capacity
        size, has = capacity * (len(StepValues._fields) - 1 + parameters), capabilities(device)
        self._host = None
        if has.pinned and has.streams:  # the CPU is named because a loop may have another default device
            self._host = torch.zeros(size, dtype=widest(device), device="cpu", pin_memory=True)
        self._kept: list[StepValues] = []
        self._in_flight: tuple[int, int, torch.Event] | None = None
        self._read: list[HostValues] = []

    @property
    def unread(self) -> int:
        """Number of recorded steps that `take` has not returned yet."""
        return len(self._kept) + (self._in_flight[0] if self._in_flight else 0) + len(self._read)

    @property
    def arrived(self) -> bool:
        """True if `take` can return steps without waiting for the device."""
        return bool(self._read) or (self._in_flight is not None and self._in_flight[2].query())

    @property
    def full(self) -> bool:
        """True if a block is complete, so that the next `record` first starts its copy."""
        return len(self._kept) == self._capacity

    def record(self, values: StepValues) -> None:
        """Record a step's values, not to be changed in place, without launching a kernel; sends a full block first."""
        if len(self._kept) == self._capacity:
            self.send()
        self._kept.append(values)

    def send(self) -> None:
        """Start copying the recorded steps to the host, and begin a new block.

        Waits for the previous copy if it is still under way, so call this for a full ring or rarely.
        """
        if not self._kept:
            return
        self._land(wait=True)  # sent a whole ring ago; its host buffer is needed again
        block, rows = stack(self._kept), len(self._kept)
        self._kept = []
        if self._host is None:
            self._read += unstack(block, rows)
            return
        self._host[: len(block)].copy_(block, non_blocking=True)
        self._in_flight = (rows, len(block), event_now(block.device))

    def take(self, *, wait: bool) -> list[HostValues]:
        """Return the steps that have reached the host since the last call, in recording order.

        ``wait`` sends and waits for all recorded steps. This is the only place where the host waits for the device
        because of records.
        """
        if wait:
            self.send()
        self._land(wait=wait)
        rows, self._read = self._read, []
        return rows

    def give_back(self, rows: list[HostValues]) -> None:
        """Put back steps from `take` that cannot be used yet; the next call returns them first."""
        self._read = rows + self._read

    def _land(self, *, wait: bool) -> None:
        if self._in_flight is None:
            return
        rows, length, event = self._in_flight
        if not wait and not event.query():
            return
        event.synchronize()
        assert self._host is not None
        self._read += unstack(self._host[:length], rows)
        self._in_flight = None
