"""Copies a state into memory of the host that is kept for the next copy.

Fresh memory costs more than the copying: the system has to find each page and clear it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from mptrain.device import capabilities, event_now
from mptrain.runlog.state_files import check_plain

if TYPE_CHECKING:
    _Key = tuple[int, int, bool]


class HostCopy:
    """Holds one copy of a state; the next one overwrites it.

    Args:
        everything: Copy tensors of the CPU as well; False hands these on as they are.
    """

    def __init__(self, *, everything: bool) -> None:
        self._everything = everything
        self._buffers: dict[_Key, Tensor] = {}
        self._arrivals: list[torch.Event] = []

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state on the CPU, as `torch.save` sees it: what shares memory in the state does so in the copy.

        What comes from a device with page-locked memory is there after `wait`. Nothing waits for that device; what it is given from here on
        finds the copying done.

        Args:
            state: dict, list, tuple, str, int, float, bool, None and tensors only.

        Raises:
            TypeError: The state holds something else; names where.
            MemoryError: The system has no memory for it.
        """
        found = {storage._cdata: storage for tensor in check_plain(state) for storage in [tensor.untyped_storage()]}
        copied = {key: storage for key, storage in found.items() if self._everything or storage.device.type != "cpu"}
        buffers = self._buffers_for(list(copied.values()))
        sources = [
            torch.empty(0, dtype=buffer.dtype, device=storage.device).set_(storage)
            for storage, buffer in zip(copied.values(), buffers, strict=True)
        ]
        if buffers:
            torch._foreach_copy_(
                buffers, sources, non_blocking=all(capabilities(storage.device).pinned for storage in copied.values())
            )
        self._arrivals = [
            event_now(device, sleeping=True)
            for device in {storage.device for storage in copied.values()}
            if capabilities(device).streams
        ]
        hosts = {key: buffer.untyped_storage() for key, buffer in zip(copied, buffers, strict=True)}
        taken: dict[str, Any] = _rebuilt(state, hosts, {})
        return taken

    def wait(self, wait_for: Callable[[torch.Event], None] = torch.Event.synchronize) -> None:
        """Wait until the copy is complete.

        Args:
            wait_for: Waits for an event.
        """
        for arrival in self._arrivals:
            wait_for(arrival)

    def _buffers_for(self, storages: list[UntypedStorage]) -> list[Tensor]:
        """A buffer for each; those of the last copy where they fit."""
        keys = [
            (index, storage.nbytes(), capabilities(storage.device).pinned) for index, storage in enumerate(storages)
        ]
        self._buffers = {key: self._buffers[key] for key in keys if key in self._buffers}  # the others are let go first
        for key in keys:
            if key not in self._buffers:
                _, size, pinned = key
                dtype = torch.uint8 if size % 8 else torch.int64  # wide elements are copied faster
                try:
                    self._buffers[key] = torch.empty(size // dtype.itemsize, dtype=dtype, pin_memory=pinned)
                except RuntimeError as error:  # what torch's allocators raise
                    self._buffers = {}
                    raise MemoryError(f"no memory for a copy of {size} bytes") from error
        return [self._buffers[key] for key in keys]


def _rebuilt(value: Any, hosts: dict[int, UntypedStorage], seen: dict[int, Any]) -> Any:
    """The same value over other memory; what is one object in the value is one object again."""
    if not isinstance(value, (torch.Tensor, dict, list, tuple)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    result: Any
    if isinstance(value, torch.Tensor):
        result = _tensor_over(hosts.get(value.untyped_storage()._cdata), value)
    elif isinstance(value, dict):
        result = copy.copy(value)  # with what an OrderedDict has besides its items
        for key, item in value.items():
            result[key] = _rebuilt(item, hosts, seen)
    else:
        result = type(value)(_rebuilt(item, hosts, seen) for item in value)
    seen[id(value)] = result
    return result


def _tensor_over(host: UntypedStorage | None, like: Tensor) -> Tensor:
    if host is None:
        return like
    tensor = torch.empty(0, dtype=like.dtype).set_(host, like.storage_offset(), like.shape, like.stride())
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, like.requires_grad)
    return tensor.requires_grad_() if like.requires_grad else tensor
