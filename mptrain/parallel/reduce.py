"""Sums of gradients over ranks: in DistributedDataParallel's buckets while the backward pass goes on, or all at its end.

What is summed are shares of the gradient of the whole batch's mean loss, so the sum is that gradient and nothing is divided
afterwards. In FP16, sums of two finite numbers can overflow; they are formed in FP32 unless asked for otherwise, and are
rounded once, as a product over the whole batch would have been.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mptrain.torch_private import flatten_dense_tensors, foreach_copy_, unflatten_dense_tensors

if TYPE_CHECKING:
    from mptrain.parallel.communicator import Communicator

#: Bytes that are sent at once, as torch's DistributedDataParallel does.
BUCKET = 25 << 20


def sum_over_ranks(tensors: Sequence[Tensor], comm: Communicator, *, wide: bool) -> None:
    """Sum each tensor over ranks in place.

    Args:
        tensors: The same shapes and dtypes on all ranks.
        comm: Who takes part.
        wide: Form the sums of half-precision tensors in FP32.
    """
    for bucket in _buckets(tensors):
        flat = flatten_dense_tensors(bucket)
        sums = comm.all_reduce_(flat.float() if wide and flat.dtype.itemsize < 4 else flat)
        foreach_copy_(list(bucket), list(unflatten_dense_tensors(sums.to(flat.dtype), bucket)))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype each, in their order, of about `BUCKET` bytes."""
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
    module: nn.Module, comm: Any, sums: list[tuple[Tensor, Tensor]], *, wide: bool, find_unused: bool
) -> nn.Module:
    """Torch's DistributedDataParallel around a module, whose parameters that require gradients get their sums over ranks.

    Args:
        module: Its forward is what is differentiated.
        comm: A `mptrain.parallel.communicator.DistributedCommunicator`.
        sums: Gets parameters of half precision with their sums in FP32, behind each backward pass; else they would only be had
            rounded once more.
        wide: Form the sums of half-precision gradients in FP32.
        find_unused: Parameters may get no gradient on a rank.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions call `broadcast_buffers` otherwise
        wrapped = DistributedDataParallel(
            module,
            process_group=comm.group,
            broadcast_buffers=False,  # `mptrain.parallel.strategy` does, once for each step
            init_sync=False,  # all ranks have drawn, or loaded, the same; that was checked
            find_unused_parameters=find_unused,
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
        for parameter, piece in zip(bucket.parameters(), pieces, strict=True):  # in memory as the parameter is
            sums.append((parameter, torch.as_strided(piece, parameter.shape, parameter.stride())))
        return future.then(lambda done: own.copy_(done.value()[0]))

    # It compares the annotations with these, and does not take them as text.
    summed.__annotations__ = {
        "bucket": torch.distributed.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    wrapped.register_comm_hook(None, summed)
    return wrapped
