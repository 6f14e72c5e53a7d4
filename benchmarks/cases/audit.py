"""Counts what must not happen in a step: values of device tensors that the host reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mptrain.system import device
from mptrain.system.device import capabilities

if TYPE_CHECKING:
    from benchmarks.loops.base import Loop

#: Methods that read a tensor of the host without passing the dispatcher.
SILENT = ("tolist", "cpu", "numpy")


class ReadCounter(TorchDispatchMode):
    """Counts reads of single values: ``item``, ``bool``, comparisons in Python, and those hidden in operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[ReadCounter]:
    """Count reads inside, on whatever device the tensors are."""
    counter = ReadCounter()
    plain = {name: getattr(torch.Tensor, name) for name in SILENT}

    def counted(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counter.count += 1
            return plain[name](self, *args, **kwargs)

        return method

    for name in SILENT:
        setattr(torch.Tensor, name, counted(name))
    try:
        with counter:
            yield counter
    finally:
        for name in SILENT:
            delattr(torch.Tensor, name)


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Return a region in which loops take a CPU for a device whose memory the host cannot read for free."""
    as_device = replace(capabilities(torch.device("cpu")), host=False)
    with mock.patch.object(device, "_ask", return_value=as_device):
        capabilities.cache_clear()
        try:
            yield
        finally:
            capabilities.cache_clear()


def host_reads(loop: Loop, steps: int = 10) -> float:
    """Reads a step, of a loop that has warmed up; the deferred read of a full ring is not among so few steps."""
    loop.losses(3)
    with counting() as counter:
        loop.block(steps)
    loop.close()
    return counter.count / steps
