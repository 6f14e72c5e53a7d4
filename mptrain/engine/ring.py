"""Records of recent steps on the device, read by the host in batches.

Recording a step keeps references to its device values, and launches nothing. So many steps at a time they become one
block of float64 (of float32 on a device without FP64), which holds exactly what FP32 values were, and which is on its way to the host while the next steps are
recorded; only a reader that cannot go on without the values waits for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mptrain.device import capabilities, event_now, widest
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator

if TYPE_CHECKING:
    from mptrain.engine.step import StepValues

_SCALARS = 5


class Row(NamedTuple):
    """One attempted step as the device saw it, on the host.

    Attributes:
        loss: Unscaled loss.
        loss_scale: The scale in force.
        overflow: A gradient was not finite.
        grad_norm: Unscaled, before clipping.
        lr: Learning rate.
        next_scale: The scale of the next step.
        norms: After an overflow, the norm of each parameter's scaled gradient, -1 where there was none; else empty.
    """

    loss: float
    loss_scale: float
    overflow: bool
    grad_norm: float
    lr: float
    next_scale: float
    norms: list[float]


class Ring:
    """The rows of one learner.

    Args:
        capacity: Rows of a block.
        parameters: Length P of `Verdict.norms`.
        device: The training device.
        comm: Whom the device may be waiting for.
    """

    def __init__(
        self, capacity: int, parameters: int, device: torch.device, comm: Communicator = SINGLE_PROCESS
    ) -> None:
        self._capacity = capacity
        self._comm = comm
        size, has = capacity * (_SCALARS + parameters), capabilities(device)
        self._host = torch.zeros(size, dtype=widest(device), pin_memory=True) if has.pinned and has.streams else None
        self._kept: list[StepValues] = []
        self._in_flight: tuple[int, int, torch.Event] | None = None
        self._read: list[Row] = []

    @property
    def unread(self) -> int:
        """Rows that `take` has not given out yet."""
        return len(self._kept) + (self._in_flight[0] if self._in_flight else 0) + len(self._read)

    @property
    def arrived(self) -> bool:
        """Whether `take` would give rows without waiting."""
        return bool(self._read) or (self._in_flight is not None and self._in_flight[2].query())

    @property
    def full(self) -> bool:
        """Whether the next record needs another block."""
        return len(self._kept) == self._capacity

    def record(self, values: StepValues) -> None:
        """Keep a row; nothing is launched or waited for. A full ring is sent by itself."""
        if len(self._kept) == self._capacity:
            self.send()
        self._kept.append(values)

    def send(self) -> None:
        """Start copying what was recorded to the host, and record into a new block from now on.

        Waits for the copy before, if that is still on its way: so call it for a full ring, or seldom.
        """
        if not self._kept:
            return
        self._land(wait=True)  # it left a whole ring ago, and the host's memory is needed again
        block, rows = _packed(self._kept), len(self._kept)
        self._kept = []
        if self._host is None:
            self._read += _rows(block, rows)
            return
        self._host[: len(block)].copy_(block, non_blocking=True)
        self._in_flight = (rows, len(block), event_now(block.device))

    def take(self, *, wait: bool) -> list[Row]:
        """Rows in the order of their recording that have reached the host.

        Args:
            wait: Send and wait for all; otherwise give what has arrived. This is the only place where the host waits
                for the device on behalf of records.
        """
        if wait:
            self.send()
        self._land(wait=wait)
        rows, self._read = self._read, []
        return rows

    def give_back(self, rows: list[Row]) -> None:
        """Return rows that came with `take` and cannot be used yet."""
        self._read = rows + self._read

    def _land(self, *, wait: bool) -> None:
        if self._in_flight is None:
            return
        rows, length, event = self._in_flight
        if not wait and not event.query():
            return
        self._comm.wait_for(event)
        assert self._host is not None
        self._read += _rows(self._host[:length], rows)
        self._in_flight = None


def _packed(kept: list[StepValues]) -> Tensor:
    """N recorded steps as one device tensor of the norms' dtype: N losses, scales, rates, next scales, norms, and N times P norms."""
    losses, scales, totals, norms, rates, next_scales = zip(*kept, strict=True)
    singles = torch.cat([torch.stack(losses), *scales, *rates, *next_scales])  # all of one dtype: one kernel
    return torch.cat([singles.to(totals[0].dtype), *totals, *norms])


def _rows(block: Tensor, count: int) -> list[Row]:
    """The rows of a block; it is in host memory already where the device has page-locked memory, else this waits for it."""
    block = block.cpu()
    numbers = block[: _SCALARS * count].tolist()
    losses, scales, rates, next_scales, totals = (numbers[at * count : (at + 1) * count] for at in range(_SCALARS))
    norms = block[_SCALARS * count :].view(count, -1)
    overflows = [not math.isfinite(total) for total in totals]
    kept = [norms[index].tolist() if overflow else [] for index, overflow in enumerate(overflows)]
    return list(map(Row, losses, scales, overflows, totals, rates, next_scales, kept))
