"""BatchNorm over the samples of all ranks. torch has it for CUDA; on a CPU this one is used, with the same formulae.

    mean = sum x / N      var = sum (x - mean)^2 / N      y = (x - mean) / sqrt(var + eps) * weight + bias

N counts the values of a channel on all ranks. Forward exchanges two sums of each channel, backward two more.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from mptrain.distributed.ranks import Ranks


def synchronised(model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
    """The model with BatchNorm layers that take statistics over all ranks.

    Args:
        model: In FP32; changed in place where it can be.
        ranks: Who they are.
        device: Where it will train.
    """
    if device.type == "cuda":
        group: Any = getattr(ranks, "group", None)
        changed: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        for module in changed.modules():
            if type(module) is nn.SyncBatchNorm:
                module.__class__ = CopyableSyncBatchNorm
        return changed
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]
            module.ranks = ranks  # type: ignore[assignment]
    return model


def _copied(module: Any, memo: dict[int, Any], shared: str) -> Any:
    """A deep copy of a module but for one attribute, which stays the same object."""
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    twin.__dict__.update({k: v if k == shared else copy.deepcopy(v, memo) for k, v in module.__dict__.items()})
    return twin


class CopyableSyncBatchNorm(nn.SyncBatchNorm):
    """torch's, for models that are copied: a group of processes cannot be."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyableSyncBatchNorm:
        """A copy in the same group."""
        twin: CopyableSyncBatchNorm = _copied(self, memo, "process_group")
        return twin


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm on a CPU over the samples of all ranks; statistics and arithmetic in FP64 and FP32, the answer as the input."""

    ranks: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy; the ranks stay who they are."""
        twin: SyncBatchNorm = _copied(self, memo, "ranks")
        return twin

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        """Any that BatchNorm has."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """See `torch.nn.SyncBatchNorm`."""
        if not self.training:  # also without running statistics: ranks evaluate at their own pace
            return super().forward(input)
        answer: Tensor
        answer, mean, var, count = _Synchronised.apply(input, self.weight, self.bias, self.eps, self.ranks)
        if self.training and self.running_mean is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                assert self.running_var is not None
                self.num_batches_tracked.add_(1)
                share = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.double()
                unbiased = var * (count / (count - 1.0).clamp(min=1.0))
                self.running_mean.mul_(1 - share).add_((share * mean).to(self.running_mean.dtype))
                self.running_var.mul_(1 - share).add_((share * unbiased).to(self.running_var.dtype))
        return answer


class _Synchronised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, ranks: Ranks) -> tuple[Tensor, ...]:
        rows = x.transpose(0, 1).reshape(x.shape[1], -1).double()
        sums = torch.cat([rows.sum(1), rows.new_tensor([rows.shape[1]])])
        ranks.sum_(sums)
        count = sums[-1]
        mean = sums[:-1] / count
        apart = rows - mean[:, None]
        var = ranks.sum_(apart.square().sum(1)) / count
        scale = (var + eps).rsqrt()
        normal = (apart * scale[:, None]).float()
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.ranks = ranks
        answer = normal if weight is None else normal * weight.float()[:, None] + bias.float()[:, None]
        ctx.mark_non_differentiable(mean, var, count)
        return _back(answer, x).to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        grad = grads[0]
        rows = grad.transpose(0, 1).reshape(grad.shape[1], -1).float()
        bias_grad, weight_grad = rows.sum(1), (rows * normal).sum(1)
        both = ctx.ranks.sum_(torch.stack([bias_grad, weight_grad]).double()) / count
        inner = rows - both[0].float()[:, None] - normal * both[1].float()[:, None]
        factor = scale.float() if weight is None else scale.float() * weight.float()
        grad_x = _back(inner * factor[:, None], grad).to(grad.dtype)
        if weight is None:
            return grad_x, None, None, None, None
        return grad_x, weight_grad.to(weight.dtype), bias_grad.to(weight.dtype), None, None


def _back(rows: Tensor, like: Tensor) -> Tensor:
    """Rows of channels in the shape of a tensor whose second dimension are channels."""
    first, channels, *rest = like.shape
    return rows.reshape(channels, first, *rest).transpose(0, 1)
