"""Finds where the host waits for a CUDA device, as far as torch notices it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

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
