"""Calls of torch that a watched loop makes: losses of backward passes, and `GradScaler.update`, told to listeners."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

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
    losses = [*(_earlier if earlier else ()), *_running[:1]]
    _earlier.clear()
    _taken = _passes
    return losses


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
        single = len(roots) == 1 and isinstance(roots[0], Tensor)  # no edge of the graph
        alone = single and roots[0].numel() == 1 and given is None  # checkpointing gives gradients
        _running.append(roots[0].detach() if alone else None)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            last = _running.pop()
            if not _running and _taken != _passes:
                _earlier.append(last)

    return wrapper


class Listener(Protocol):
    """Listener to the updates of a scaler."""

    def before_update(self) -> None:
        """Take notice that the scaler is about to choose its next scale, and to forget what it found in gradients."""

    def after_update(self) -> None:
        """Take notice that the scaler has chosen its next scale."""


#: Weak, because a watch keeps its scaler, and would keep itself by it.
_LISTENERS: WeakKeyDictionary[torch.amp.GradScaler, ReferenceType[Listener]] = WeakKeyDictionary()
#: Our method of a class, and the one that it replaces; None if the class inherits that.
_WRAPPED: dict[type, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}


def listen(scaler: torch.amp.GradScaler, listener: Listener) -> Callable[[], None]:
    """Tell a listener of each update of a scaler that is enabled, until the returned function is called.

    Raises RuntimeError if the scaler has a listener already.
    """
    if (known := _LISTENERS.get(scaler)) is not None and known() is not None:
        raise RuntimeError("this GradScaler is watched already: close the other watch first")
    kind: Any = type(scaler)
    if kind not in _WRAPPED:
        _WRAPPED[kind] = _telling(kind.update), vars(kind).get("update")
        kind.update = _WRAPPED[kind][0]
    _LISTENERS[scaler] = ref(listener)

    def stop() -> None:
        _LISTENERS.pop(scaler, None)
        if kind in _WRAPPED and not any(type(other) is kind for other in _LISTENERS):
            wrapper, own = _WRAPPED.pop(kind)
            if vars(kind).get("update") is not wrapper:
                return  # another library has wrapped it, and ours, without listeners, does nothing
            if own is None:
                del kind.update
            else:
                kind.update = own

    return stop


def _telling(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def wrapper(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        reference = _LISTENERS.pop(self, None) if self.is_enabled() else None
        if reference is None or (listener := reference()) is None:
            return update(self, *args, **kwargs)
        listener.before_update()
        try:
            return update(self, *args, **kwargs)  # of a subclass, it may call a wrapped method of its base
        finally:
            _LISTENERS[self] = reference
            listener.after_update()

    return wrapper
