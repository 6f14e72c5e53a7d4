"""Puts module buffers back when a step is refused.

A forward pass with one inf input leaves BatchNorm's running variance NaN for ever, although the step that followed was
skipped. So the buffers of every module are part of what a refused step must not change.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


#: Bytes at whose multiples a buffer begins, as in memory of its own: vectorised kernels and compilers count on 16.
ALIGNMENT = 64


class BufferGuard:
    """Snapshots all buffers of a model before a step and restores them on the device if it is refused.

    The buffers become views of one flat tensor per dtype and kind, lasting or carried, so that both are single kernels however many there are.
    Build it after the model has its final device and dtypes. A module must change its buffers in place: one that puts
    a new tensor there takes it out of the guard, and `recapture` names it.

    Attributes:
        count: How many buffers are guarded.
    """

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, list[tuple[str, nn.Module, str]]] = {}
        tensors: dict[int, Tensor] = {}
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    qualified = f"{path}.{name}" if path else name
                    places.setdefault(id(buffer), []).append((qualified, module, name))
                    tensors[id(buffer)] = buffer
        by_dtype: dict[tuple[torch.dtype, bool], list[int]] = {}
        for key, buffer in tensors.items():
            _, module, name = places[key][0]
            lasting = name not in module._non_persistent_buffers_set
            by_dtype.setdefault((buffer.dtype, lasting), []).append(key)
        self.count = len(tensors)
        self._flat: list[tuple[Tensor, Tensor]] = []
        self._lasting: list[Tensor] = []
        self._places: list[tuple[str, nn.Module, str, Tensor]] = []
        for (dtype, lasting), keys in by_dtype.items():
            unit = ALIGNMENT // dtype.itemsize
            rooms = [F.pad(tensors[key].detach().reshape(-1), (0, -tensors[key].numel() % unit)) for key in keys]
            flat = torch.cat(rooms)
            for key, room in zip(keys, flat.split([len(room) for room in rooms]), strict=True):
                view = room[: tensors[key].numel()].view(tensors[key].shape)
                for qualified, module, name in places[key]:
                    module._buffers[name] = view
                    self._places.append((qualified, module, name, view))
            self._flat.append((flat, flat.clone()))
            if lasting:
                self._lasting.append(flat)

    def snapshot(self) -> None:
        """Remember all buffers."""
        for flat, saved in self._flat:
            saved.copy_(flat)

    def lasting(self) -> list[Tensor]:
        """The memory of all buffers that are part of the weights, such as BatchNorm's running statistics; one tensor a dtype."""
        return self._lasting

    def restore(self, skip: Tensor) -> None:
        """Put all buffers back where a step was refused.

        Args:
            skip: float32, shape (1,): 1 where the step was refused, else 0.
        """
        if not self._flat:
            return
        refused = skip == 1
        for flat, saved in self._flat:
            torch.where(refused, saved, flat, out=flat)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A region that leaves all buffers as they were."""
        before = [flat.clone() for flat, _ in self._flat]
        yield
        for (flat, _), kept in zip(self._flat, before, strict=True):
            flat.copy_(kept)

    def recapture(self) -> list[str]:
        """Put the guarded tensors back where modules have put others in their place.

        Returns:
            The names of those buffers, which no refused step restores.
        """
        escaped = []
        for qualified, module, name, view in self._places:
            if module._buffers.get(name) is not view:
                module._buffers[name] = view
                escaped.append(qualified)
        return escaped
