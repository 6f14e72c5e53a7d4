"""Sums of gradients over ranks: in DistributedDataParallel's buckets during the backward pass, or after it.

Each rank contributes its share of the gradient of the global batch's mean loss, so the sum is that gradient and is not
divided. In FP16 the sum of two finite numbers can overflow. By default sums are therefore computed in FP32 and rounded
once, as the gradient of the whole batch on one rank would be.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.torch_private import (
    fill_buckets_in_order,
    flatten_dense_tensors,
    foreach_copy_,
    unflatten_dense_tensors,
)

if TYPE_CHECKING:
    from mptrain.parallel.communicator import Communicator

#: Bytes of a bucket, as in torch's DistributedDataParallel.
BUCKET = 25 << 20


def sum_over_ranks(tensors: Sequence[Tensor], comm: Communicator, *, wide: bool) -> None:
    """Sum each of several device tensors, such as gradients, over all ranks in place, in buckets of about 25 MiB.

    Shapes and dtypes are equal on all ranks. ``wide`` sums half-precision tensors in FP32 and rounds the sums.
    """
    for bucket in _buckets(tensors):
        flat = flatten_dense_tensors(bucket)
        sums = comm.all_reduce_(flat.float() if wide and flat.dtype.itemsize < 4 else flat)
        foreach_copy_(list(bucket), list(unflatten_dense_tensors(sums.to(flat.dtype), bucket)))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        filled = BUCKET
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if filled >= BUCKET:
                buckets.append([])
                filled = 0
            buckets[-1].append(tensor)
            filled += tensor.nbytes
    return buckets


def data_parallel(
    module: nn.Module,
    comm: Any,
    sums: list[tuple[Tensor, Tensor]],
    *,
    wide: bool,
    order: Sequence[nn.Parameter] | None,
) -> nn.Module:
    """Return a module in torch's DistributedDataParallel, with gradients summed instead of averaged.

    A parameter has the same place in the same bucket in every step. From three ranks on, the place decides in which
    order a library adds up the ranks, and so the last bits of the sum. By itself DistributedDataParallel fills other
    buckets in a process's first step than later, so the first step after a resume would have other bits.

    Args:
        module: The module to differentiate; its forward is a whole pass with loss.
        comm: A `mptrain.parallel.communicator.DistributedCommunicator`.
        sums: List to which each backward pass appends half-precision parameters with their FP32 sums, if ``wide``; the
            gradients in the parameters are rounded to half precision.
        wide: Whether to sum half-precision gradients in FP32.
        order: All trainable parameters in the order of the buckets, that in which they get their gradients; equal on
            all ranks. None if a parameter may have no gradient on a rank: buckets then follow the modules.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch versions rename `broadcast_buffers`
        wrapped = DistributedDataParallel(
            module if order is None else _InOrder(order, module),
            process_group=comm.group,
            broadcast_buffers=False,  # `mptrain.parallel.strategy` broadcasts them once in each step
            init_sync=False,  # all ranks have initialised or loaded equal weights, which is checked
            find_unused_parameters=order is None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET >> 20,
        )

    def summed(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()
        if not wide or own.dtype.itemsize >= 4:
            return dist.all_reduce(own, group=comm.group, async_op=True).get_future().then(lambda done: done.value()[0])
        flat = own.float()
        pieces = flat.split([parameter.numel() for parameter in bucket.parameters()])
        future = dist.all_reduce(flat, group=comm.group, async_op=True).get_future()
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):  # in the parameter's memory layout
            sums.append((parameter, torch.as_strided(piece, parameter.shape, parameter.stride())))
        return future.then(lambda done: own.copy_(done.value()[0]))

    # torch compares the hook's annotations with these types and does not accept strings.
    summed.__annotations__ = {
        "bucket": torch.distributed.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    wrapped.register_comm_hook(None, summed)
    if order is not None:
        fill_buckets_in_order(wrapped)
    return wrapped


class _InOrder(nn.Module):
    """A module whose parameters are found in another order: torch has no argument for it."""

    def __init__(self, order: Sequence[nn.Parameter], module: nn.Module) -> None:
        super().__init__()
        self.order, self.module = nn.ParameterList(order), module

    @override
    def forward(self, *given: Any) -> Any:
        return self.module(*given)
