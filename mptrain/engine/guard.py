"""Puts module buffers back when a step is refused.

A forward pass with one inf input leaves BatchNorm's running variance NaN for ever, although the step that followed was
skipped. So the buffers of every module are part of what a refused step must not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F

#: Bytes at whose multiples a buffer begins, as in memory of its own: vectorised kernels and compilers count on 16.
ALIGNMENT = 64


class BufferGuard:
    """Snapshots all buffers of a model before a step and restores them on the device if it is refused.

    The buffers move into one flat tensor per dtype and kind, lasting or carried, so that both are single kernels however many there are.
    Each stays the tensor that the module knows, with a version counter of its own: autograd refuses a backward pass where a
    tensor that it saved was changed since, and views of one tensor would be changed together as far as it knows.
    Build it after the model has its final device and dtypes. A module must change its buffers in place: one that puts
    a new tensor there takes it out of the guard, and `recapture` names it.

    Attributes:
        count: How many buffers are guarded.
        lasting: The memory of all buffers that are part of the weights, such as BatchNorm's running statistics; one tensor a dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, nn.Module, str, Tensor]] = []
        by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        seen: set[int] = set()
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                self._places.append((f"{path}.{name}" if path else name, module, name, buffer))
                if id(buffer) not in seen:
                    lasting = name not in module._non_persistent_buffers_set
                    by_kind.setdefault((buffer.dtype, lasting), []).append(buffer)
                    seen.add(id(buffer))
        self._buffers = [buffer for buffers in by_kind.values() for buffer in buffers]
        self.count = len(self._buffers)
        self._flat: list[tuple[Tensor, Tensor]] = []
        self.lasting: list[Tensor] = []
        for (dtype, lasting), buffers in by_kind.items():
            unit = ALIGNMENT // dtype.itemsize
            rooms = [F.pad(own.detach().reshape(-1), (0, -own.numel() % unit)) for own in buffers]
            flat = torch.cat(rooms)
            for own, room in zip(buffers, flat.split([len(room) for room in rooms]), strict=True):
                own.data = room[: own.numel()].view(own.shape)
            self._flat.append((flat, flat.clone()))
            if lasting:
                self.lasting.append(flat)

    def snapshot(self) -> None:
        """Remember all buffers."""
        for flat, saved in self._flat:
            saved.copy_(flat)

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
        increment_version(self._buffers)  # a graph that is still alive may have saved what they held

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A region that leaves all buffers as they were."""
        before = [flat.clone() for flat, _ in self._flat]
        yield
        for (flat, _), kept in zip(self._flat, before, strict=True):
            flat.copy_(kept)
        increment_version(self._buffers)

    def recapture(self) -> list[str]:
        """Put the guarded tensors back where modules have put others in their place.

        Returns:
            The names of those buffers, which no refused step restores.
        """
        escaped = []
        for qualified, module, name, buffer in self._places:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
                escaped.append(qualified)
        return escaped
