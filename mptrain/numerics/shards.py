"""Tensors of which every rank holds a part (torch's DTensor), and plain ones, by one set of functions.

A part is that of ``torch.distributed.fsdp.fully_shard``: contiguous along the first dimension, of equal length but for the
last ones, which may be empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of it only."""
    return hasattr(tensor, "placements")


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of it, in the same memory and without a graph."""
    return cast("Any", tensor.detach()).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, gathered from all ranks, which must all ask."""
    return cast("Any", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def as_part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in which this rank's part is given; another one that is sharded says how."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    kind = cast("Any", like)
    return DTensor.from_local(
        tensor, kind.device_mesh, kind.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_for(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor that this rank holds of another one of the same shape."""
    if is_sharded(tensor) or not is_sharded(like):
        return part(tensor)
    mesh = cast("Any", like).device_mesh
    length = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * length  # at the end or behind it for those that have nothing
    return tensor[first : first + length]
