"""Losses of backward passes, as `torch.autograd.backward` is given them; every loop of torch calls it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Loss of the running backward pass, a scalar as it was given, usually scaled; None outside and for other tensors.
_running: list[Tensor | None] = []
#: Losses of the passes since the last one whose loss was taken.
_earlier: deque[Tensor | None] = deque(maxlen=1000)
_watchers = 0
_passes = 0  # outermost calls so far
_taken = 0  # number of the newest pass whose loss was taken
_original: Callable[..., Any] = torch.autograd.backward
_wrapper: Callable[..., Any] | None = None


def take_losses(*, earlier: bool) -> list[Tensor | None]:
    """Return the loss whose backward pass is running, detached, a scalar with its loss scale; None if it is unknown.

    Outside of a pass there is none. With ``earlier``, those of passes before it that nobody has taken come first: while
    FSDP2 does not synchronise gradients, its parameters get none, and nobody looks at them.
    """
    global _taken
    found = [*(_earlier if earlier else ()), *_running[:1]]
    _earlier.clear()
    _taken = _passes
    return found


def running_pass() -> int | None:
    """Return the number of the running outermost call of ``backward``, which checkpointing calls again inside it."""
    return _passes if _running else None


def watch_losses() -> Callable[[], None]:
    """Keep each loss while its backward pass runs, until the returned function is called."""
    global _watchers, _original, _wrapper
    if not _watchers:
        _original = torch.autograd.backward
        _wrapper = torch.autograd.backward = _keeping(_original)
    _watchers += 1

    def stop() -> None:
        global _watchers
        _watchers -= 1
        if not _watchers and torch.autograd.backward is _wrapper:  # another wrapper around it stays in place
            torch.autograd.backward = _original

    return stop


def _keeping(backward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _passes
        _passes += not _running
        tensors = tensors if isinstance(tensors, Tensor | tuple | list) else tuple(tensors)  # a generator, for one
        roots = (tensors,) if isinstance(tensors, Tensor) else tensors
        given = args[0] if args else kwargs.get("grad_tensors")
        one = len(roots) == 1 and isinstance(roots[0], Tensor)  # no edge of the graph
        alone = one and roots[0].numel() == 1 and given is None  # checkpointing gives gradients
        _running.append(roots[0].detach() if alone else None)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            last = _running.pop()
            if not _running and _taken != _passes:
                _earlier.append(last)

    return wrapper
