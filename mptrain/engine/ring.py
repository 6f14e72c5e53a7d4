"""Records of recent steps on the device, read by the host in batches.

A row of float64 holds exactly what FP32 values were. While one ring fills, the other is on its way to the host; only
a reader that cannot go on without the values waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.numerics.verdict import Verdict

_SCALARS = 6


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
    """A double buffer of rows for one learner.

    Args:
        capacity: Rows of each half.
        parameters: Length P of `Verdict.norms`.
        device: The training device.
    """

    def __init__(self, capacity: int, parameters: int, device: torch.device) -> None:
        shape = (capacity, _SCALARS + parameters)
        self._device = [torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(2)]
        pinned = device.type == "cuda"
        self._host = [torch.zeros(shape, dtype=torch.float64, pin_memory=pinned) for _ in range(2)] if pinned else []
        self._filling = 0
        self._used = 0
        self._in_flight: tuple[int, int, torch.cuda.Event] | None = None
        self._read: list[Row] = []

    @property
    def unread(self) -> int:
        """Rows that `take` has not given out yet."""
        return self._used + (self._in_flight[1] if self._in_flight else 0) + len(self._read)

    @property
    def arrived(self) -> bool:
        """Whether `take` would give rows without waiting."""
        return bool(self._read) or (self._in_flight is not None and self._in_flight[2].query())

    @property
    def full(self) -> bool:
        """Whether the next record needs the other half."""
        return self._used == len(self._device[0])

    def record(self, loss: Tensor, scale: Tensor, verdict: Verdict, lr: Tensor, next_scale: Tensor) -> None:
        """Write a row; every argument is a device tensor of shape (1,), and none is waited for.

        A full ring is sent by itself.
        """
        if self.full:
            self.send()
        row = self._device[self._filling][self._used]
        torch.cat([loss, scale, verdict.overflow, verdict.grad_norm, lr, next_scale], out=row[:_SCALARS])
        row[_SCALARS:].copy_(verdict.norms)
        self._used += 1

    def send(self) -> None:
        """Start copying what was recorded to the host, and record into the other half from now on.

        Waits for the copy before, if that is still on its way: so call it for a full ring, or seldom.
        """
        if not self._used:
            return
        self._land(wait=True)  # the half to be filled next must have arrived; it left a whole ring ago
        source = self._device[self._filling]
        if self._host:
            self._host[self._filling][: self._used].copy_(source[: self._used], non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(source.device))  # which need not be the current device
            self._in_flight = (self._filling, self._used, event)
        else:
            self._read += _rows(source[: self._used])
        self._filling, self._used = 1 - self._filling, 0

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
        half, used, event = self._in_flight
        if not wait and not event.query():
            return
        event.synchronize()
        self._read += _rows(self._host[half][:used])
        self._in_flight = None


def _rows(block: Tensor) -> list[Row]:
    """Rows of a block in host memory, so that no device is waited for."""
    rows = []
    for index, scalars in enumerate(block[:, :_SCALARS].tolist()):
        loss, scale, overflow, grad_norm, lr, next_scale = scalars
        norms = block[index, _SCALARS:].tolist() if overflow else []
        rows.append(Row(loss, scale, bool(overflow), grad_norm, lr, next_scale, norms))
    return rows
