"""Captures steps as CUDA graphs, and leaves no trace of a capture that fails.

torch puts its own state back only where a capture succeeds. After a failed one the stream of the capture stays the current one;
before 2.12 memory of the capture's pool is asked for as if it went on (pytorch#180395), before 2.14 the pool is kept for
good (pytorch#190348), and the device's generator still expects a capture and refuses to draw.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

#: From this version on torch may give the pool of a failed capture back itself, and to do so twice would break its count.
_RELEASES_POOLS = TorchVersion("2.13")


class GraphsInvalidated(RuntimeError):
    """A capture has failed, and graphs that were captured before it can be run no more."""


class CudaGraphs:
    """Captures what a function launches, without running it; what it returns runs it.

    All graphs share one pool of memory: only one runs at a time, each writes whatever it reads of the pool, and tensors that are
    read after a graph has run are kept, so that no other graph is given their memory.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._captured = False

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture.

        Raises:
            RuntimeError: It failed; the first reason, not what came of it.
            GraphsLost: It failed, and graphs of before are lost.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        drawn, begun = torch.cuda.get_rng_state(self._device), False
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, capture_error_mode="relaxed"
            ):  # memory may be pinned meanwhile
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
        """End what the capture has begun in the allocator, where torch has not."""
        try:
            graph.pool()  # refused unless the capture itself came to its end, as it does where something else went wrong
            ended = True
        except RuntimeError:
            ended = False
        graph.reset()
        if ended:
            return
        with contextlib.suppress(RuntimeError):  # it is not begun any more
            torch._C._cuda_endAllocateToPool(self._index, self._pool)
        if TorchVersion(torch.__version__) < _RELEASES_POOLS:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_releasePool(self._index, self._pool)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

    def _free_generator(self) -> bool:
        """Give the device's generator a new state where the old one expects the capture to go on; whether it did."""
        try:
            torch.rand((), device=self._device)
        except RuntimeError:
            generator = torch.cuda.default_generators[self._index]
            generator.graphsafe_set_state(generator.clone_state())
            return True
        return False


#: How torch's warning of a wait begins, and its warning, once in a process, that it does not notice all.
_WAIT, _PROTOTYPE = "called a synchronizing CUDA operation", "Synchronization debug mode"


@contextlib.contextmanager
def host_waits(device: torch.device) -> Iterator[list[str]]:
    """A region that fills its list, at its end, with the places where the host waited: file and line. Empty but on CUDA."""
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
