"""Copies of training batches to the device on a stream of their own, in parallel to the training steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mptrain.system.device import capabilities, current_stream, event_now, new_stream, on_stream

if TYPE_CHECKING:
    from mptrain.workloads.base.batch import Batch

#: Number of batches that the host may be ahead of the device. Enough to bridge a slow batch; each takes memory.
AHEAD = 4


class Transfer:
    """Transfer of training batches to the device on a separate stream, so that neither host nor training waits for it.

    The host prepares the next batch while the device is still busy with the current step. On a separate stream, the
    copy does not queue behind that step. A device without streams copies in order with the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device) if capabilities(device).streams else None
        self._device = device
        self._before: deque[torch.Event] = deque()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """Make a batch on the transfer stream, safe to use on the current one; waits if too many batches are ahead."""
        if self._stream is None:
            return make()
        current = current_stream(self._device)
        self._wait_for_space()
        with on_stream(self._device, self._stream):
            batch = make()
        current.wait_stream(self._stream)
        for tensor in batch.tensors().values():
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)  # memory stays reserved until that stream has used it
        return batch

    def _wait_for_space(self) -> None:
        self._before.append(event_now(self._device, sleeping=True))
        if len(self._before) > AHEAD:
            self._before.popleft().synchronize()
