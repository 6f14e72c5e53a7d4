"""Capture of training steps as CUDA graphs, with the clean-up after a capture that fails.

torch restores its own state only after a successful capture. After a failed one, the capture stream stays current and
the device's generator still expects a capture and refuses to draw. Before torch 2.12 allocations still go to the
capture's pool (pytorch#180395); before 2.14 the pool is never released (pytorch#190348).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

#: From this version on torch may release the pool of a failed capture itself; releasing it twice breaks its count.
_RELEASES_POOLS = TorchVersion("2.13")


class GraphsInvalidated(RuntimeError):
    """Error raised when a failed capture of a CUDA graph has made the graphs captured before it unusable."""


class CudaGraphs:
    """Capture of functions as CUDA graphs: calling an instance captures a function's kernels without running them.

    All graphs share one memory pool. That is safe because only one graph runs at a time and each graph writes
    everything that it reads from the pool. References to tensors that are read after a replay are kept, so no other
    graph gets their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._captured = False

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run a function once on the host, capturing its kernels; return a function that replays them.

        Raises:
            RuntimeError: The capture failed; this is the first error, not a follow-up of it.
            GraphsInvalidated: The capture failed and earlier graphs can no longer be replayed.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        drawn, begun = torch.cuda.get_rng_state(self._device), False
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, capture_error_mode="relaxed"
            ):  # relaxed: other threads may pin memory meanwhile
                begun = True
                body()
        except BaseException as error:
            torch.cuda.set_stream(stream)
            if begun:
                self._release(graph)
            taken = self._free_generator()
            torch.cuda.set_rng_state(drawn, self._device)
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if taken and self._captured:
                raise GraphsInvalidated(str(first)) from error
            raise first from None
        self._captured = True
        return graph.replay

    def _release(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.pool()  # raises unless the capture itself ended, as it does if the error came from elsewhere
            ended = True
        except RuntimeError:
            ended = False
        graph.reset()
        if ended:
            return
        with contextlib.suppress(RuntimeError):  # torch has ended it already
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        if TorchVersion(torch.__version__) < _RELEASES_POOLS:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_releasePool(self._index, self._pool)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def _free_generator(self) -> bool:
        """Replace the state of the device's generator if it still expects a capture; return whether it was replaced."""
        try:
            torch.rand((), device=self._device)
        except RuntimeError:
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
            return True
        return False


#: Start of torch's warning about a synchronisation, and of its one-time warning that it does not detect all of them.
_WAIT, _PROTOTYPE = "called a synchronizing CUDA operation", "Synchronization debug mode"


@contextlib.contextmanager
def host_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that is filled on exit with the places (``FILE:LINE``) where the host waited for a CUDA device."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        if _WAIT in str(one.message):
            found.append(f"{Path(one.filename).name}:{one.lineno}")
        elif _PROTOTYPE not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
