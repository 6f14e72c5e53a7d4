"""Random variation of images in memory, whole batches at once, on uint8 or float arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mptrain.workloads.base.random_streams import uniforms


@dataclass(frozen=True)
class Augmentation:
    """Shift by whole pixels, zeros moving in, and mirror left to right.

    The usual variation of CIFAR training: four pixels of padding, a random crop, a random flip (He et al.,
    *Deep residual learning*, CVPR 2016, section 4.2).

    Attributes:
        shift: Largest shift in either direction along both axes, in pixels.
        flip: Mirror every other image, by chance.
    """

    shift: int
    flip: bool

    def apply(self, images: Tensor, indices: Sequence[int], epoch: int, seed: int) -> Tensor:
        """A varied copy of images ``[N, C, H, W]``, from ``(seed, epoch, index)`` of each alone."""
        samples, _, height, width = images.shape
        draws = uniforms(seed, epoch, indices, 3)
        offsets = (draws[:, :2] * (2 * self.shift + 1)).long()
        rows = torch.arange(height) + offsets[:, :1]
        columns = torch.arange(width).expand(samples, width)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        columns = columns + offsets[:, 1:2]
        padded = F.pad(images, (self.shift,) * 4)
        numbers = torch.arange(samples)[:, None, None]
        picked = padded.permute(0, 2, 3, 1)[numbers, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous()
