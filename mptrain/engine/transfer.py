"""Brings batches to a CUDA device beside the training that is under way there."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from mptrain.distributed.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from mptrain.dataset.batch import Batch

#: How many batches the host may be ahead of the device. Enough to bridge a slow one; each takes memory.
AHEAD = 4


class Transfer:
    """Copies and prepares batches on a stream of its own, so that neither host nor training waits for the bus.

    The host issues a step and goes on to the next batch while the device is still busy with the step; on a stream of its
    own the next batch's copy need not queue up behind it.

    Args:
        device: Where batches go; on a CPU nothing is special.
        ranks: Whom the device may be waiting for.
    """

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._before: deque[torch.cuda.Event] = deque()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """What ``make`` gives, ready for the stream that is current here."""
        if self._stream is None:
            return make()
        current = torch.cuda.current_stream(self._stream.device)
        self._wait_for_space(current)
        with torch.cuda.stream(self._stream):
            batch = make()
        current.wait_stream(self._stream)
        for tensor in batch.tensors().values():
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory is that stream's until training is done with it
        return batch

    def _wait_for_space(self, current: torch.cuda.Stream) -> None:
        """Have at most `AHEAD` batches on the device that training has not come to; who waits sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(current)
        self._before.append(event)
        if len(self._before) > AHEAD:
            self._ranks.wait_for(self._before.popleft())
