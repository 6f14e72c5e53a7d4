"""What the training step is fed with: tensors and counts, without a trace of where they came from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows behind one another, ``[N, longest]`` and at least one long, with zeros where they have ended."""
    table = rows[0].new_zeros(len(rows), max(1, *(len(row) for row in rows)))
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one update, or of one micro-batch of it.

    Every tensor has the samples as its first dimension, so that any batch can be cut between samples.

    Attributes:
        inputs: What the network sees first, ``[N, ...]``: images (uint8 or float32 on the host, float32 once
            prepared), token numbers (int64).
        targets: What it is to give, ``[N, ...]``: class indices, token numbers. One tensor may be both, and is then moved
            once.
        counts: How many terms the loss of each sample averages over, N host integers; None means one each.
        more: Further tensors ``[N, ...]`` by name, for tasks and models that know the name.
        whole: Loss terms of the batch of which this is one rank's part; None where it is all.
        is_dummy: It only keeps a rank busy that has no part of the batch, and counts nothing.
    """

    inputs: Tensor
    targets: Tensor
    counts: tuple[int, ...] | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    whole: int | None = None
    is_dummy: bool = False

    @property
    def samples(self) -> int:
        """N."""
        return len(self.inputs)

    @property
    def terms(self) -> int:
        """How many terms the loss of this batch averages over: samples, or what ``counts`` says."""
        return self.samples if self.counts is None else sum(self.counts)

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Cut into contiguous micro-batches whose numbers of samples differ by at most one.

        Args:
            parts: How many are wanted, at least 1. A batch with fewer samples than that gives one part a
                sample: a part is never empty.

        Returns:
            The parts in order; the batch itself where there is only one. They share the batch's memory.
        """
        parts = max(1, min(parts, self.samples))
        if parts == 1:
            return (self,)
        small, larger = divmod(self.samples, parts)
        bounds = [number * small + min(number, larger) for number in range(parts + 1)]
        return tuple(self._cut(begin, end) for begin, end in itertools.pairwise(bounds))

    def share(self, part: Batch) -> float:
        """The weight of a part's mean loss in the mean loss of the whole batch: its share of the loss terms."""
        if part.is_dummy:
            return 0.0
        if part is self and self.whole is None:
            return 1.0
        return part.terms / (self.terms if self.whole is None else self.whole)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy from page-locked memory makes nobody wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def cast(self, dtype: torch.dtype) -> Batch:
        """The same batch with its inputs in a dtype, if they are floating-point; nothing else is cast."""
        if not self.inputs.is_floating_point() or self.inputs.dtype == dtype:
            return self
        return replace(self, inputs=self.inputs.to(dtype))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from where copying to the device makes nobody wait."""
        return self._each(lambda tensor: tensor.pin_memory())

    def clone(self) -> Batch:
        """The same batch in memory of its own."""
        return self._each(lambda tensor: tensor.clone())

    def copy_(self, source: Batch) -> None:
        """Take over the values of another batch of the same shapes; the copy makes nobody wait."""
        values = source.tensors()
        if self.targets is self.inputs:
            del values["targets"]
        for name, tensor in self.tensors().items():
            if name in values:
                tensor.copy_(values[name], non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
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
