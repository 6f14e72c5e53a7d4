"""Batches: the input tensors, targets and loss-term counts of one training step, independent of the data set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(rows: Sequence[Tensor], value: int = 0) -> Tensor:
    """Stack N > 0 tensors ``[L, ...]`` as rows ``[N, longest, ...]``, at least one long, padded at the end."""
    table = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return table if table.shape[1] else table.new_full((len(rows), 1, *table.shape[2:]), value)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one weight update, or of one of its micro-batches (for gradient accumulation).

    The first dimension of every tensor is the sample. A *term* is one of the values that the loss is averaged over: a
    sample, or for sequences a token.

    Attributes:
        inputs: First input of the network, ``[N, ...]``: images (uint8 or float32 on the host, float32 once prepared)
            or token ids (int64).
        targets: Expected output, ``[N, ...]``: class indices or token ids. If it is the same tensor as ``inputs``, it
            is moved only once.
        counts: Number of terms of each sample, N host integers; None means one each.
        extras: Further tensors ``[N, ...]`` by name, for tasks and models that use the name.
        whole: Number of terms over all ranks if this is one rank's part of a batch; None if this is the whole batch.
        is_dummy: Whether this is a placeholder for a rank without samples; its weight in the loss is 0.
    """

    inputs: Tensor
    targets: Tensor
    counts: tuple[int, ...] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    whole: int | None = None
    is_dummy: bool = False

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return len(self.inputs)

    @property
    def terms(self) -> int:
        """Number of terms that the batch's mean loss covers."""
        return self.samples if self.counts is None else sum(self.counts)

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Split the batch into contiguous micro-batches, views of its memory, whose sizes differ by at most one sample.

        There are ``parts`` of them, or one per sample if there are fewer samples; a single one is the batch itself.
        """
        parts = max(1, min(parts, self.samples))
        if parts == 1:
            return (self,)
        small, larger = divmod(self.samples, parts)
        bounds = [number * small + min(number, larger) for number in range(parts + 1)]
        return tuple(self._cut(begin, end) for begin, end in itertools.pairwise(bounds))

    def share(self, part: Batch) -> float:
        """Return the weight of a part's mean loss in that of the whole batch: its fraction of the terms; 0 for a dummy.

        The whole batch is that of all ranks if this is one rank's part of it (``whole`` is set). The weighted losses of
        all parts add up to the mean loss of the whole batch.
        """
        if part.is_dummy:
            return 0.0
        if part is self and self.whole is None:
            return 1.0
        return part.terms / (self.terms if self.whole is None else self.whole)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with all tensors on a device; copies from page-locked memory are asynchronous."""
        ahead = device.type != "cpu"  # a copy to the host could be read before it has arrived
        return self._each(lambda tensor: tensor.to(device, non_blocking=ahead))

    def cast(self, dtype: torch.dtype) -> Batch:
        """Return the batch with ``inputs`` in a dtype if they are floating-point."""
        if not self.inputs.is_floating_point() or self.inputs.dtype == dtype:
            return self
        return replace(self, inputs=self.inputs.to(dtype))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory, from which copies to an accelerator are asynchronous."""
        return self._each(lambda tensor: tensor.pin_memory())

    def clone(self) -> Batch:
        """Return a copy of the batch in new memory on the same device."""
        return self._each(lambda tensor: tensor.clone())

    def copy_(self, source: Batch) -> None:
        """Copy a batch with the same tensor names and shapes into this one's tensors, without synchronising.

        The tensors keep their addresses, as a captured CUDA graph requires. If ``targets`` is the same tensor as
        ``inputs``, only the inputs of ``source`` are copied.
        """
        values = source.tensors()
        if self.targets is self.inputs:
            del values["targets"]
        for name, tensor in self.tensors().items():
            if name in values:
                tensor.copy_(values[name], non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return ``inputs``, ``targets`` and the ``extras`` by name."""
        return {"inputs": self.inputs, "targets": self.targets, **self.extras}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = change(self.inputs)
        targets = inputs if self.targets is self.inputs else change(self.targets)
        return replace(
            self, inputs=inputs, targets=targets, extras={name: change(tensor) for name, tensor in self.extras.items()}
        )

    def _cut(self, begin: int, end: int) -> Batch:
        part = self._each(lambda tensor: tensor[begin:end])
        return part if self.counts is None else replace(part, counts=self.counts[begin:end])
