"""BatchNorm for sequences of different lengths, whose statistics are those of what is not padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of each channel over all places of all sequences in a batch, padding left out.

    So a sequence changes nothing by being padded. It computes in float32 whatever comes in, and answers in the dtype it
    was given; padding comes out as 0. A class of torch's own name for it, so that ``keep_fp32: [norms]`` means it too.
    """

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]  # noqa: A002 (torch's name)
        """Normalise.

        Args:
            input: ``[N, C, ..., T]``.
            mask: Which places are no padding, bool ``[N, T]``, at least one in the batch.

        Returns:
            Of the same shape and dtype.
        """
        shape = [1, -1] + [1] * (input.ndim - 2)
        valid = mask.view(len(mask), *[1] * (input.ndim - 2), -1)
        wide = input.float()
        if self.training:
            mean, variance = self._moments(wide, valid)
        else:
            mean, variance = self.running_mean.float(), self.running_var.float()  # type: ignore[union-attr]
        gain = self.weight.float() * torch.rsqrt(variance + self.eps)
        shift = self.bias.float() - mean * gain
        normal = wide * gain.view(shape) + shift.view(shape)
        return normal.masked_fill(~valid, 0.0).to(input.dtype)

    def _moments(self, wide: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel, which the running ones move towards as in torch's own BatchNorm."""
        others = [axis for axis in range(wide.ndim) if axis != 1]
        places = valid.sum() * (wide[0, 0].numel() // wide.shape[-1])
        mean = wide.masked_fill(~valid, 0.0).sum(others) / places
        deviation = (wide - mean.view([1, -1] + [1] * (wide.ndim - 2))).masked_fill(~valid, 0.0)
        variance = deviation.square().sum(others) / places
        with torch.no_grad():  # in place, so that whoever guards the buffers can put them back
            unbiased = variance * (places / (places - 1).clamp(min=1))
            for running, present in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(present.to(running.dtype), self.momentum)  # type: ignore[union-attr, arg-type]
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        return mean, variance
