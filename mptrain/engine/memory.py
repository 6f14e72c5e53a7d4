"""Memory use of a training run on its device, and the C library's settings for CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

from mptrain.system import device as devices
from mptrain.system import machine

#: Options of glibc's mallopt(3), and their values for training on a CPU.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _MAPPED_FROM = 2**31 - 1, 2**30


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed CPU tensors instead of returning it to the system at every step.

    Otherwise each large tensor gets fresh memory, which the kernel must clear: a step of a word LSTM took 1.6 times as
    long when measured, a step of a small convolutional network 1.15 times. The cost is up to a third more resident
    memory. Does nothing if the user has set glibc's own variables, or with another C library.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process uses on a device now: allocated on an accelerator, resident set on a CPU."""
    return machine.resident_memory() if device.type == "cpu" else devices.memory_in_use(device)


def memory_now(device: torch.device) -> int:
    """Return the bytes to display during a run: the peak on an accelerator, the current resident set on a CPU."""
    return memory_in_use(device) if device.type == "cpu" else devices.memory_peak(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak` returns, so that earlier use, such as importing torch, does not count."""
    if device.type == "cpu":
        machine.forget_peak()
    else:
        devices.forget_peak(device)


def memory_peak(device: torch.device) -> int:
    """Return the most bytes, allocated on an accelerator or resident on a CPU, that were in use since `forget_peak`."""
    return machine.resident_peak() if device.type == "cpu" else devices.memory_peak(device)
