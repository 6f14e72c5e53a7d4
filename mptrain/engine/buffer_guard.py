"""Protection of module buffers, such as BatchNorm's running statistics, from skipped training steps.

A forward pass with one inf input leaves BatchNorm's running variance NaN for good, even if the step is skipped. A
skipped step must therefore not change the buffers of any module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F

#: Alignment of each buffer in bytes, as if it were allocated on its own; vectorised kernels and compilers expect 16.
ALIGNMENT = 64


class BufferGuard:
    """Guard of all buffers of a model, which restores them on the device if a training step is skipped.

    The buffers move into one flat tensor per dtype and kind (persistent or not), so that snapshot and restore are one
    kernel each, however many buffers there are. Each buffer stays the tensor that its module holds, with its own
    version counter: autograd rejects a backward pass if a saved tensor was changed, and views share a counter. Build
    the guard after the model has its final device and dtypes. Modules must change their buffers in place. If a module
    replaces a buffer by a new tensor, that buffer is no longer guarded, and `recapture` names it.

    Args:
        model: The model.

    Attributes:
        count: Number of guarded buffers.
        lasting: Memory of all persistent buffers, such as BatchNorm's running statistics; one flat tensor per dtype.
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
        """Save a copy of all buffers on the device, before a training step."""
        for flat, saved in self._flat:
            saved.copy_(flat)

    def restore(self, skip: Tensor) -> None:
        """Restore all buffers from `snapshot` if the training step was skipped, without synchronising with the host.

        Args:
            skip: float32, shape (1,): 1 if the step was skipped, else 0.
        """
        if not self._flat:
            return
        refused = skip == 1
        for flat, saved in self._flat:
            torch.where(refused, saved, flat, out=flat)
        increment_version(self._buffers)  # a live autograd graph may have saved the old values

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context manager that restores all buffers to their values at entry when it exits, unless the block raises."""
        before = [flat.clone() for flat, _ in self._flat]
        yield
        for (flat, _), kept in zip(self._flat, before, strict=True):
            flat.copy_(kept)
        increment_version(self._buffers)

    def recapture(self) -> list[str]:
        """Give the modules back the guarded tensors of buffers that they have replaced by new tensors.

        Returns:
            Qualified names of the replaced buffers, which a skipped step cannot restore.
        """
        escaped = []
        for qualified, module, name, buffer in self._places:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
                escaped.append(qualified)
        return escaped
