"""Values of training steps for the record: on the device, as each step leaves them, and on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StepValues(NamedTuple):
    """Values of one attempted training step on the device; none of the tensors is changed in place afterwards.

    ``loss`` is the unscaled loss, a float32 scalar. All others but ``norms`` have shape (1,), in float32 or, as the L2
    norm ``grad_norm`` of all unscaled gradients before clipping, in the dtype of the verdict. ``skip`` is 1 if the
    update was skipped, else 0. ``norms`` are those of `Verdict.norms`, shape (P,).
    """

    loss: Tensor
    loss_scale: Tensor
    lr: Tensor
    next_scale: Tensor
    grad_norm: Tensor
    skip: Tensor
    norms: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> StepValues:
        """Return the values of a tensor of `stack` of one step, as views in its dtype."""
        width = len(cls._fields) - 1
        return cls._make([packed[0], *(packed[at : at + 1] for at in range(1, width)), packed[width:]])


class HostValues(NamedTuple):
    """The same values on the host; ``norms`` is empty without an overflow, and -1 stands for no gradient."""

    loss: float
    loss_scale: float
    lr: float
    next_scale: float
    grad_norm: float
    skip: float
    norms: list[float]

    @property
    def overflow(self) -> bool:
        """True if a gradient was not finite."""
        return not math.isfinite(self.grad_norm)


def stack(steps: Sequence[StepValues]) -> Tensor:
    """Return the values of N steps as one tensor, field after field, in the dtype of the norms."""
    *scalars, norms = zip(*steps, strict=True)
    columns = [torch.hstack(column).to(norms[0].dtype) for column in scalars]
    return torch.cat([*columns, *norms])


def unstack(block: Tensor, count: int) -> list[HostValues]:
    """Return the values of ``count`` steps from a tensor of `stack`; waits for the device if it is there."""
    block, width = block.cpu(), len(StepValues._fields) - 1
    columns = block[: width * count].view(width, count).tolist()
    norms = block[width * count :].view(count, -1)
    steps = [HostValues._make((*scalars, [])) for scalars in zip(*columns, strict=True)]
    return [one._replace(norms=norms[at].tolist()) if one.overflow else one for at, one in enumerate(steps)]
