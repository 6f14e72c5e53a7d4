"""A CPU without some of its capabilities, for tests of what other devices lack."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mptrain.system import device as devices

CPU = torch.device("cpu")


@contextlib.contextmanager
def without(**others):
    """Give the CPU other capabilities than it has."""
    changed, ask = replace(devices.capabilities(CPU), **others), devices._ask
    with mock.patch.object(devices, "_ask", lambda device: changed if device == CPU else ask(device)):
        devices.capabilities.cache_clear()
        try:
            yield
        finally:
            devices.capabilities.cache_clear()


class NoFP64(TorchDispatchMode):
    """Raises where an operator makes a tensor of FP64, as a device without it does.

    Args:
        host: Files whose tensors are in host memory on any device, where they are not called to prepare a batch.
    """

    def __init__(self, host=()):
        super().__init__()
        self.host = host
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen += 1
        wide = any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result))
        if wide and not self._is_on_host():
            raise TypeError(f"{func}: this device has no float64")
        return result

    def _is_on_host(self):
        frame, ours = sys._getframe(2), []
        while frame is not None:
            if "/mptrain/" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("upcast.py"):
                ours.append(frame.f_code)
            frame = frame.f_back
        in_prepare = any(code.co_name == "prepare" for code in ours)  # a batch that is on the device
        return not ours or (not in_prepare and any(part in ours[0].co_filename for part in self.host))
