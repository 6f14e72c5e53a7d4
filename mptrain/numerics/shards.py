"""Functions that treat sharded tensors (torch's DTensor) and plain tensors alike.

Shards are those of ``torch.distributed.fsdp.fully_shard``: contiguous along the first dimension and of equal length,
except the last ones, which may be shorter or empty. Each rank holds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mptrain.system.torch_private import local_shard

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded (a DTensor), so that this rank holds only a part of it."""
    return hasattr(tensor, "placements")


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether no rank before this one holds the same shard of a sharded tensor, as replicas do (HSDP)."""
    mesh, placements = cast("Any", tensor).device_mesh, cast("Any", tensor).placements
    return {mesh.get_local_rank(dim) for dim, one in enumerate(placements) if one.is_replicate()} <= {0}


def part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, in the same memory and without autograd graph; a plain tensor is returned unchanged."""
    return local_shard(tensor) if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole, by a collective that every rank must call; a plain tensor stays unchanged."""
    return cast("Any", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def as_part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's plain shard in a DTensor like ``like``; return it unchanged if sharded or ``like`` is plain."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    kind = cast("Any", like)
    return DTensor.from_local(
        tensor, kind.device_mesh, kind.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_for(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor, equal on all ranks, that this rank holds of a sharded one of its shape.

    A sharded tensor gives its own shard. If ``like`` is plain, the tensor is returned whole.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return part(tensor)
    mesh = cast("Any", like).device_mesh
    length = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * length  # at or past the end for ranks with an empty shard
    return tensor[first : first + length]
