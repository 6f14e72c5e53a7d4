"""Functions that treat sharded tensors (torch's DTensor) and plain tensors alike.

Shards are those of ``torch.distributed.fsdp.fully_shard``: contiguous along the first dimension and of equal length,
except the last ones, which may be shorter or empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded, so that this rank holds only a part."""
    return hasattr(tensor, "placements")


def part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory and without an autograd graph."""
    return cast("Any", tensor.detach()).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks; a collective that every rank must call."""
    return cast("Any", tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


def as_part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's shard in a tensor that is sharded like another one; return it unchanged if ``like`` is plain."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    kind = cast("Any", like)
    return DTensor.from_local(
        tensor, kind.device_mesh, kind.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_for(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds of ``like``, a tensor of the same shape."""
    if is_sharded(tensor) or not is_sharded(like):
        return part(tensor)
    mesh = cast("Any", like).device_mesh
    length = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * length  # at or past the end for ranks with an empty shard
    return tensor[first : first + length]
