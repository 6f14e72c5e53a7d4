"""How much memory a run uses."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def memory_now(device: torch.device) -> int:
    """Bytes in use: peak allocated on a CUDA device, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def forget_peak(device: torch.device) -> None:
    """Begin `memory_peak` anew on a CUDA device, where runs before this one in the same process must not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> int:
    """Largest number of bytes in use: on a CUDA device since `forget_peak`, on a CPU since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
