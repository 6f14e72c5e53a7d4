"""Functions that treat sharded tensors (torch's DTensor) and plain tensors alike.

Shards are those of ``torch.distributed.fsdp.fully_shard``: contiguous along the first dimension and of equal length,
except the last ones, which may be shorter or empty. Each rank (process) holds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mptrain.torch_private import local_shard

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded (a DTensor), so that this rank holds only a part of it."""
    return hasattr(tensor, "placements")


def part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, in the same memory and without an autograd graph.

    A plain tensor is returned unchanged, with its graph.
    """
    return local_shard(tensor) if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, gathered from all ranks: a collective that every rank must call.

    A plain tensor is returned unchanged, without communication.
    """
    return cast("Any", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def as_part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's shard in a sharded tensor (DTensor) with the shape, ranks and placement of another one.

    Args:
        tensor: This rank's shard, a plain tensor. A tensor that is sharded already is returned unchanged.
        like: The sharded tensor to imitate. If it is plain, ``tensor`` is returned unchanged.
    """
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    kind = cast("Any", like)
    return DTensor.from_local(
        tensor, kind.device_mesh, kind.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_for(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this rank holds of a sharded tensor of the same shape.

    Args:
        tensor: A plain tensor, the same on all ranks; or a sharded one, whose own shard is returned.
        like: The sharded tensor that determines the rows. If it is plain, ``tensor`` is returned whole.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return part(tensor)
    mesh = cast("Any", like).device_mesh
    length = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * length  # at or past the end for ranks with an empty shard
    return tensor[first : first + length]
