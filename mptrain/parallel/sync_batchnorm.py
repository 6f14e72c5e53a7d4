"""BatchNorm over the samples of all ranks of a distributed run, without host synchronisation.

    mean = sum x / N      var = sum (x - mean)^2 / N      y = (x - mean) / sqrt(var + eps) * weight + bias

N is the number of values of a channel on all ranks. The forward pass exchanges mean, standard deviation and count of
each rank, the backward pass two sums of each channel. torch.nn.SyncBatchNorm does the same but drops ranks without
samples, so the host has to read the counts. Here every rank has samples (`mptrain.parallel.strategy`). CUDA uses
torch's kernels. torch has no such kernels for CPUs, so this module has functions of the same names.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.system.errors import ConfigError
from mptrain.system.torch_private import BatchNorm
from mptrain.system.words import listed

if TYPE_CHECKING:
    from mptrain.parallel.communicator import Communicator


def convert_sync_batchnorm(model: nn.Module, comm: Communicator) -> nn.Module:
    """Convert the BatchNorm layers of an FP32 model, in place, to `SyncBatchNorm`, and return the model.

    Raises ConfigError if a layer has a ``forward`` of its own, which the conversion would lose.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}
    layers = {name: layer for name, layer in layers.items() if not isinstance(layer, nn.SyncBatchNorm)}
    own = [
        f"{name} ({type(layer).__name__})"
        for name, layer in layers.items()
        if getattr(layer.forward, "__func__", None) is not BatchNorm.forward
    ]
    if own:
        raise ConfigError(
            f"distributed.sync_batchnorm=true: {listed(own, 2)} computes something else than torch's BatchNorm, which "
            "a synchronised one would leave out",
            "set distributed.sync_batchnorm=false, or use torch.nn.BatchNorm2d followed by the activation",
        )
    for module in layers.values():
        module.__class__ = SyncBatchNorm
        module.comm = comm  # type: ignore[assignment]
    return model


class SyncBatchNorm(BatchNorm):
    """BatchNorm layer whose training statistics cover the samples of all ranks; the output has the dtype of the input.

    Created by `convert_sync_batchnorm`, which sets ``comm``.
    """

    comm: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update({k: v if k == "comm" else copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return twin

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        """Accept inputs of all numbers of dimensions that BatchNorm1d, BatchNorm2d and BatchNorm3d support."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise each channel of ``[N, C, ...]`` over the samples of all ranks, and return the same shape and dtype.

        In training mode every rank must call this at the same time, and the running statistics are updated. In
        evaluation mode the layer is torch's BatchNorm without communication.
        """
        if input.ndim == 3:  # there is no memory format of three dimensions in which channels are last
            return self.forward(input.unsqueeze(-1)).squeeze(-1)
        if not self.training:  # even without running statistics: ranks evaluate different numbers of batches
            return super().forward(input)
        share, mean, var = self.momentum, self.running_mean, self.running_var
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        direct = mean is not None and mean.dtype == torch.float32 and share is not None
        if not direct:  # the kernel requires FP32 running statistics and a momentum known on the host
            mean, var = torch.zeros(2, input.shape[1], device=input.device)
        answer: Tensor = _Synchronised.apply(
            input, self.weight, self.bias, mean, var, share if direct else 1.0, self.eps, self.comm
        )
        if not direct and self.num_batches_tracked is not None:
            part = self.num_batches_tracked.float().reciprocal() if share is None else share
            for old, new in ((self.running_mean, mean), (self.running_var, var)):
                assert old is not None
                assert new is not None
                old.copy_(old.float().lerp(new, part))
        return answer


class _Synchronised(torch.autograd.Function):
    """Autograd function like `torch.nn.modules._functions.SyncBatchNorm`, without its synchronisation with the host."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, share: float, eps: float, comm: Communicator
    ) -> Tensor:
        kernels, x = _kernels_for(x), _dense(x)
        own_mean, own_invstd = kernels.batch_norm_stats(x, eps)
        count = own_mean.new_full((1,), x.numel() // x.shape[1])
        everyones = comm.all_gather(torch.cat([own_mean, own_invstd, count]))
        means, invstds, counts = everyones.split(x.shape[1], dim=1)
        whole, invstd = kernels.batch_norm_gather_stats_with_counts(
            x, means, invstds, mean, var, share, eps, counts.reshape(-1)
        )
        ctx.save_for_backward(x, weight, whole, invstd, counts.to(torch.int32))
        ctx.comm = comm
        answer: Tensor = kernels.batch_norm_elemt(x, weight, bias, whole, invstd, eps)
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        kernels, grad = _kernels_for(x), _dense(grads[0])
        sum_grad, sum_product, weight_grad, bias_grad = kernels.batch_norm_backward_reduce(
            grad, x, mean, invstd, weight, *ctx.needs_input_grad[:3]
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            both = ctx.comm.all_reduce_(torch.cat([sum_grad, sum_product]))
            scale = None if weight is None else weight.to(mean.dtype)
            grad_x = kernels.batch_norm_backward_elemt(grad, x, mean, invstd, scale, *both.split(x.shape[1]), counts)
        if weight is None:
            weight_grad = bias_grad = None
        return grad_x, weight_grad, bias_grad, None, None, None, None, None


def _kernels_for(x: Tensor) -> Any:
    return torch if x.is_cuda else CpuBatchNormOps


def _dense(x: Tensor) -> Tensor:
    """Return the values of ``x`` without gaps in memory, in half precision on a CUDA device with channels last.

    Of other halves torch's `batch_norm_backward_reduce` adds up wrongly: on an H200 (torch 2.11) its sums over 108
    and 16,384 values were off by .1 to .8 % in FP16 and by .7 to 9 % in BF16, and by 1e-6 with channels last.
    """
    if x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous(memory_format=torch.channels_last_3d):
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.is_cuda and x.dtype.itemsize == 2 else x.contiguous()


class CpuBatchNormOps:
    """CPU versions of torch's CUDA-only functions for synchronised BatchNorm, with the same names.

    ``x`` is ``[N, C, ...]``. Statistics are of the C channels and in float64.
    """

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return each channel's mean and 1 / sqrt(var + eps) over this rank's samples, float64 ``[C]`` each."""
        var, mean = torch.var_mean(x.double(), _all_but_channels(x), correction=0)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(
        x: Tensor,
        means: Tensor,
        invstds: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return mean and reciprocal standard deviation ``[C]`` over all R ranks, and update the running statistics.

        ``means`` and ``invstds`` are those of each rank, ``[R, C]``, and ``counts`` are values per channel,
        ``[R]``. The running mean and unbiased variance, ``[C]``, are updated in place with weight ``momentum``.
        ``x`` is not read.
        """
        count = counts.sum()
        share = (counts / count)[:, None]
        mean = (share * means).sum(0)
        var = (share * (invstds.pow(-2) - eps + (means - mean).square())).sum(0).clamp(min=0.0)
        unbiased = var * (count / (count - 1.0).clamp(min=1.0))
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * unbiased)
        return mean, (var + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        """Return the normalised input (x - mean) * invstd * weight + bias, in the shape and dtype of ``x``."""
        normal = ((x - _wide(mean, x)) * _wide(invstd, x)).float()
        if weight is not None:
            normal = normal * _wide(weight.float(), x)
        if bias is not None:
            normal = normal + _wide(bias.float(), x)
        return normal.to(x.dtype)

    @staticmethod
    def batch_norm_backward_reduce(
        grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *asked: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums over this rank's samples that the backward pass of BatchNorm needs, ``[C]`` each.

        These are the sum of the gradient of the output, the sum of that gradient times the centred input x - mean, and
        the gradients of weight and bias. ``mean`` and ``invstd`` are over all ranks, ``[C]``. ``asked`` is ignored;
        torch's function takes three flags for the gradients needed.
        """
        sum_grad = grad.double().sum(_all_but_channels(x))
        sum_product = (grad * (x - _wide(mean, x))).sum(_all_but_channels(x))
        dtype = x.dtype if weight is None else weight.dtype
        return sum_grad, sum_product, (sum_product * invstd).to(dtype), sum_grad.to(dtype)

    @staticmethod
    def batch_norm_backward_elemt(
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sum_grad: Tensor,
        sum_product: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Return the gradient of the input of BatchNorm, in the shape and dtype of ``grad``, that of the output.

        ``mean`` and ``invstd`` are over all ranks, ``[C]``. ``sum_grad`` and ``sum_product`` are the first two results
        of `batch_norm_backward_reduce`, summed over all ranks. ``counts`` has the number of values per channel on each
        rank, ``[R]`` or ``[R, 1]``.
        """
        count = counts.sum()
        slope = _wide(sum_product / count * invstd.square(), x)
        inner = grad - _wide(sum_grad / count, x) - (x - _wide(mean, x)) * slope
        return (inner * _wide(invstd if weight is None else invstd * weight, x)).to(grad.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (x.ndim - 2))
