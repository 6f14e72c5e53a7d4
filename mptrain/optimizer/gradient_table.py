"""Where the tensors of a step are, as tables of addresses on the device, for kernels that take whole lists of them.

Gradients are new tensors in every step. Where they have moved, their addresses go up in one copy from pinned memory that
the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mptrain.device import capabilities, is_capturing

#: What a kernel reads for the dtype of a tensor; 0 is none.
DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}


class GradientTable:
    """Where the gradients of a step are, for kernels that find them by address.

    Args:
        weights: P dense tensors on one device, in any memory order. The gradient of each has its shape.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.device = weights[0].device if weights else torch.device("cpu")
        for weight in weights:
            if not _is_dense(weight) or weight.device != self.device:
                raise ValueError(
                    f"a weight of strides {weight.stride()} has gaps or overlaps, or is on {weight.device}"
                )
        self._weights = list(weights)
        self._shapes = [weight.shape for weight in weights]
        self._strides = [weight.stride() for weight in weights]
        self._places = AddressTable(self.device)

    def locate(self, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The table of these gradients.

        Args:
            grads: P tensors, each FP16, BF16 or FP32. One whose memory order is not its weight's is copied into it.

        Returns:
            int64, shape (2, P): addresses and dtypes; and what must live until the kernel has been launched.
        """
        fitting = list(grads)
        strides = list(map(torch.Tensor.stride, fitting))
        if strides != self._strides:
            self._check_shapes(fitting)
            pairs = zip(self._weights, fitting, strict=True)
            fitting = [grad if same_order(weight, grad) else _reordered(weight, grad) for weight, grad in pairs]
        addresses = list(map(torch.Tensor.data_ptr, fitting))
        dtypes = [grad.dtype for grad in fitting]
        return self._places.current((addresses, dtypes), lambda: self._rows(fitting, addresses, dtypes)), fitting

    def _rows(self, grads: list[Tensor], addresses: list[int], dtypes: list[torch.dtype]) -> list[list[int]]:
        self._check_shapes(grads)
        if any(grad.device != self.device for grad in grads) or not DTYPE_CODES.keys() >= set(dtypes):
            raise ValueError(f"gradients are {set(dtypes)}; FP16, BF16 or FP32 on {self.device} are needed")
        return [addresses, [DTYPE_CODES[dtype] for dtype in dtypes]]

    def _check_shapes(self, grads: list[Tensor]) -> None:
        if [grad.shape for grad in grads] != self._shapes:
            raise ValueError(f"{len(grads)} gradients do not have the shapes of {len(self._shapes)} weights")


class AddressTable:
    """A table of integers on the device that is replaced when what it was made of has changed.

    A replaced table and its pinned source are new memory, never the old one: launched kernels may still read it. What a
    CUDA graph was recorded with is kept, and what was made while recording is used by that graph alone: its contents
    arrive only when the graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: object = None
        self._tables: list[Tensor] = []
        self._recorded: list[list[Tensor]] = []

    def current(self, key: object, rows: Callable[[], list[list[int]]]) -> Tensor:
        """The table, int64; made of ``rows()`` if the key is not the last one."""
        recording = is_capturing(self._device)
        if not self._tables or key != self._key:
            host = _pinned(torch.tensor(rows(), dtype=torch.int64), self._device)
            self._tables = [host, host.to(self._device, non_blocking=True)]
            self._key = None if recording else key
        if recording:
            self._recorded.append(self._tables)
        return self._tables[-1]


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if capabilities(device).pinned else tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for."""
    return _pinned(tensor, device).to(device, non_blocking=True)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _order(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides that have a meaning: a stride along one element, or in a tensor without any, has none."""
    if not tensor.numel():
        return []
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def same_order(one: Tensor, other: Tensor) -> bool:
    """Whether corresponding elements of two tensors are at the same place in memory, counted from the first."""
    return one.shape == other.shape and _order(one) == _order(other)


def _reordered(weight: Tensor, grad: Tensor) -> Tensor:
    """A copy of the gradient in the memory order of its weight."""
    return torch.empty_like(weight, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())
