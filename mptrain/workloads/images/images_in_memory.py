"""Splits whose samples are held in memory, and what is wrong with samples there. Reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mptrain.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults, OnError
from mptrain.workloads.base.independent import IndependentSamples

if TYPE_CHECKING:
    from mptrain.workloads.images.augment import Augmentation


class MemorySplit(IndependentSamples):
    """Images and labels in memory. Unusable samples are found, and left out or refused, when it is made.

    Args:
        name: What to call it in messages, such as ``digits train``.
        images: uint8 or float32 ``[N, C, H, W]``.
        targets: Class indices, int64 ``[N]``.
        classes: How many classes there are.
        on_error: What to do about labels outside the classes and about images that are not finite.
        augmentation: How samples are varied at random; None leaves them as they are.

    Raises:
        DataError: A sample is unusable and ``on_error`` is ``stop``, or none is left.
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        images: Tensor,
        targets: Tensor,
        *,
        classes: int,
        on_error: OnError = "stop",
        augmentation: Augmentation | None = None,
    ) -> None:
        super().__init__(Faults(on_error))
        problems = unusable(name, images, targets, classes)
        self.faults.report(dict(problems.values()))
        if problems:
            keep = torch.ones(len(targets), dtype=torch.bool)
            keep[list(problems)] = False
            images, targets = images[keep], targets[keep]
        if len(targets) == 0:
            raise DataError(f"{name}: there is no usable sample", "check the data, or choose dataset=digits")
        self.images = images
        self.targets = targets
        self._augmentation = augmentation

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The batch of the samples with these indices; see `mptrain.workloads.base.source.Split.fetch`."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, picked)  # a tenth of the time of indexing by a tensor
        if self._augmentation is not None:
            images = self._augmentation.apply(images, indices, epoch, seed)
        return Batch(images, self.targets.index_select(0, picked))


def unusable(name: str, images: Tensor, targets: Tensor, classes: int) -> dict[int, tuple[str, str]]:
    """The samples that cannot be trained on.

    Returns:
        Position to the sample's name and what is wrong with it: a label outside ``0 .. classes-1``, or inf or
        NaN in a floating-point image.
    """
    problems: dict[int, tuple[str, str]] = {}
    for position in torch.nonzero((targets < 0) | (targets >= classes)).flatten().tolist():
        reason = f"label {int(targets[position])} is outside the classes 0 to {classes - 1}"
        problems[position] = (f"{name} sample {position}", reason)
    if images.is_floating_point():
        finite = images.flatten(1).isfinite().all(1)
        for position in torch.nonzero(~finite).flatten().tolist():
            problems.setdefault(position, (f"{name} sample {position}", "the image holds NaN or inf"))
    return problems
