"""What the training step is fed with: tensors and counts, without a trace of where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one update, or of one micro-batch of it.

    Attributes:
        inputs: Images ``[N, C, H, W]``: uint8 (or float32) on the host, float32 on the device once prepared.
        targets: Class indices, int64 ``[N]``.
        terms: How many terms the loss of this batch averages over; here the number of samples.
    """

    inputs: Tensor
    targets: Tensor
    terms: int

    def split(self, parts: int) -> tuple[Batch, ...]:
        """Cut into contiguous micro-batches whose sizes differ by at most one.

        Args:
            parts: How many are wanted, at least 1. A batch with fewer samples than that gives one part a
                sample: a part is never empty.

        Returns:
            The parts in order; the batch itself where there is only one. They share the batch's memory.
        """
        samples = len(self.targets)
        parts = max(1, min(parts, samples))
        if parts == 1:
            return (self,)
        pairs = zip(self.inputs.tensor_split(parts), self.targets.tensor_split(parts), strict=True)
        return tuple(Batch(inputs, targets, len(targets)) for inputs, targets in pairs)

    def share(self, part: Batch) -> float:
        """The weight of a part's mean loss in the mean loss of the batch: its share of the loss terms."""
        return part.terms / self.terms

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from where copying to the device makes nobody wait."""
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.terms)
