"""Brings batches to a device with streams beside the training that is under way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mptrain.device import capabilities, current_stream, event_now, new_stream, on_stream
from mptrain.parallel.communicator import SINGLE_PROCESS, Communicator

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch

#: How many batches the host may be ahead of the device. Enough to bridge a slow one; each takes memory.
AHEAD = 4


class Transfer:
    """Copies and prepares batches on a stream of its own, so that neither host nor training waits for the bus.

    The host issues a step and goes on to the next batch while the device is still busy with the step; on a stream of its
    own the next batch's copy need not queue up behind it.

    Args:
        device: Where batches go; one without streams has them one after another.
        comm: Whom the device may be waiting for.
    """

    def __init__(self, device: torch.device, comm: Communicator = SINGLE_PROCESS) -> None:
        self._comm = comm
        self._stream = new_stream(device) if capabilities(device).streams else None
        self._device = device
        self._before: deque[torch.Event] = deque()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """What ``make`` gives, ready for the stream that is current here."""
        if self._stream is None:
            return make()
        current = current_stream(self._device)
        self._wait_for_space()
        with on_stream(self._device, self._stream):
            batch = make()
        current.wait_stream(self._stream)
        for tensor in batch.tensors().values():
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)  # its memory is that stream's until training is done with it
        return batch

    def _wait_for_space(self) -> None:
        """Have at most `AHEAD` batches on the device that training has not come to; who waits sleeps."""
        self._before.append(event_now(self._device, sleeping=True))
        if len(self._before) > AHEAD:
            self._comm.wait_for(self._before.popleft())
