"""How much memory a run uses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from pathlib import Path

import torch

#: Options of glibc's mallopt(3), and what a training on a CPU sets them to.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _MAPPED_FROM = 2**31 - 1, 2**30


def keep_freed_memory() -> None:
    """Let the C library keep what tensors on the CPU free, instead of giving it back to the system at every step.

    Without this each large tensor is fresh memory, which the kernel must clear: measured, a step of a word LSTM took 1.6
    times as long, one of a small convolutional network 1.15 times. The price is up to a third more resident memory.
    Nothing happens where the user has set glibc's own variables, or with another C library.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def memory_in_use(device: torch.device) -> int:
    """Bytes in use at this moment: allocated on a CUDA device, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def memory_now(device: torch.device) -> int:
    """Bytes to show while a run goes on: the peak on a CUDA device, what is in use on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory_in_use(device)


def forget_peak(device: torch.device) -> None:
    """Begin `memory_peak` anew: what was in use before, importing torch included, must not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # an old kernel, or a sandbox: then it counts from the process's beginning
            Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device: torch.device) -> int:
    """Largest number of bytes in use since `forget_peak`: allocated on a CUDA device, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
