"""Calls of `torch.amp.GradScaler.update` on single scalers, told to a listener.

The method of the class is wrapped, not that of the scaler: an attribute of the scaler would make it impossible to
pickle, and its copies would be watched too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch


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
        found = _LISTENERS.pop(self, None) if self.is_enabled() else None
        if found is None or (listener := found()) is None:
            return update(self, *args, **kwargs)
        listener.before_update()
        try:
            return update(self, *args, **kwargs)  # of a subclass, it may call a wrapped method of its base
        finally:
            _LISTENERS[self] = found
            listener.after_update()

    return wrapper
