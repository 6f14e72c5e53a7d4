"""Batches: the tensors and counts that a training step takes, independent of the data set they came from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of different lengths into one tensor ``[N, longest]``, zero-padded, with at least one column."""
    table = rows[0].new_zeros(len(rows), max(1, *(len(row) for row in rows)))
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one update, or of one of its micro-batches.

    The first dimension of every tensor is the sample, so any batch can be split between samples.

    Attributes:
        inputs: First input of the network, ``[N, ...]``: images (uint8 or float32 on the host, float32 once
            prepared) or token ids (int64).
        targets: Expected output, ``[N, ...]``: class indices or token ids. May be the same tensor as ``inputs``,
            which is then moved only once.
        counts: Number of terms that the loss of each sample averages over, N host integers; None means one each.
        more: Further tensors ``[N, ...]`` by name, for tasks and models that use the name.
        whole: Number of loss terms of the whole batch if this is one rank's part of it; None if this is the whole.
        is_dummy: Whether this is a placeholder for a rank without samples; its weight in the loss is 0.
    """

    inputs: Tensor
    targets: Tensor
    counts: tuple[int, ...] | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    whole: int | None = None
    is_dummy: bool = False

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    @property
    def terms(self) -> int:
        """Number of terms that the loss of this batch averages over: the sum of ``counts``, or the samples."""
        return self.samples if self.counts is None else sum(self.counts)

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Split into contiguous micro-batches whose sizes differ by at most one sample.

        Args:
            parts: Number of micro-batches, at least 1. A batch with fewer samples than that gives one micro-batch
                per sample, because none may be empty.

        Returns:
            The micro-batches in order, as views of this batch's memory; the batch itself if there is only one.
        """
        parts = max(1, min(parts, self.samples))
        if parts == 1:
            return (self,)
        small, larger = divmod(self.samples, parts)
        bounds = [number * small + min(number, larger) for number in range(parts + 1)]
        return tuple(self._cut(begin, end) for begin, end in itertools.pairwise(bounds))

    def share(self, part: Batch) -> float:
        """Return the weight of a part's mean loss in the mean loss of the whole batch: its share of the loss terms."""
        if part.is_dummy:
            return 0.0
        if part is self and self.whole is None:
            return 1.0
        return part.terms / (self.terms if self.whole is None else self.whole)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; copies from page-locked memory are asynchronous."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def cast(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its inputs in a dtype, if they are floating-point; nothing else is cast."""
        if not self.inputs.is_floating_point() or self.inputs.dtype == dtype:
            return self
        return replace(self, inputs=self.inputs.to(dtype))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which copies to the device are asynchronous."""
        return self._each(lambda tensor: tensor.pin_memory())

    def clone(self) -> Batch:
        """Return a copy of the batch in new memory."""
        return self._each(lambda tensor: tensor.clone())

    def copy_(self, source: Batch) -> None:
        """Copy the values of another batch of the same shapes into this one, without synchronising."""
        values = source.tensors()
        if self.targets is self.inputs:
            del values["targets"]
        for name, tensor in self.tensors().items():
            if name in values:
                tensor.copy_(values[name], non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {"inputs": self.inputs, "targets": self.targets, **self.more}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = change(self.inputs)
        targets = inputs if self.targets is self.inputs else change(self.targets)
        return replace(
            self, inputs=inputs, targets=targets, more={name: change(one) for name, one in self.more.items()}
        )

    def _cut(self, begin: int, end: int) -> Batch:
        part = self._each(lambda tensor: tensor[begin:end])
        return part if self.counts is None else replace(part, counts=self.counts[begin:end])
