"""Tables of tensor addresses on the device, through which multi-tensor kernels find gradients and weights.

Gradients are new tensors in every step. If addresses change, one asynchronous copy from pinned memory uploads the new
table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mptrain.device import capabilities, is_capturing

#: Codes of dtypes in the tables; 0 means no tensor.
DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}


class GradientTable:
    """Device table of the addresses of all gradients of a training step, for multi-tensor kernels.

    Args:
        weights: P dense tensors on one device, in any memory order. Each gradient has the shape of its weight.

    Attributes:
        device: Device of the weights; the CPU if there are none.

    Raises:
        ValueError: A weight has gaps or overlaps in memory, or is on another device than the first.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.device = weights[0].device if weights else torch.device("cpu")
        for weight in weights:
            if not _is_dense(weight) or weight.device != self.device:
                raise ValueError(
                    f"a weight with strides {weight.stride()} has gaps or overlaps, or is on {weight.device}"
                )
        self._weights = list(weights)
        self._shapes = [weight.shape for weight in weights]
        self._strides = [weight.stride() for weight in weights]  # of gradients that need no copy
        self._places = AddressTable(self.device)

    def locate(self, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the address table of a step's gradients, uploaded to the device if an address has changed.

        Args:
            grads: P tensors, each FP16, BF16 or FP32. A gradient in another memory order than its weight is copied.

        Returns:
            int64, shape (2, P): addresses, and codes of the dtypes (`DTYPE_CODES`); and the P tensors that the
            addresses belong to, which the caller keeps alive until the kernel is launched.

        Raises:
            ValueError: A gradient has another shape or device than its weight, or another dtype.
        """
        fitting = list(grads)
        strides = list(map(torch.Tensor.stride, fitting))
        if strides != self._strides:
            self._check_shapes(fitting)
            pairs = zip(self._weights, fitting, strict=True)
            fitting = [grad if same_order(weight, grad) else _reordered(weight, grad) for weight, grad in pairs]
            if all(map(operator.is_, fitting, grads)):  # strides of dimensions of size 1 differ, and will in every step
                self._strides = strides
        addresses = list(map(torch.Tensor.data_ptr, fitting))
        dtypes = [grad.dtype for grad in fitting]
        return self._places.current((addresses, dtypes), lambda: self._rows(fitting, addresses, dtypes)), fitting

    def _rows(self, grads: list[Tensor], addresses: list[int], dtypes: list[torch.dtype]) -> list[list[int]]:
        self._check_shapes(grads)
        if any(grad.device != self.device for grad in grads) or not DTYPE_CODES.keys() >= set(dtypes):
            raise ValueError(f"gradients are {set(dtypes)}, expected FP16, BF16 or FP32 on {self.device}")
        return [addresses, [DTYPE_CODES[dtype] for dtype in dtypes]]

    def _check_shapes(self, grads: list[Tensor]) -> None:
        if [grad.shape for grad in grads] != self._shapes:
            raise ValueError(f"{len(grads)} gradients do not have the shapes of {len(self._shapes)} weights")


class AddressTable:
    """Table of integers on the device, such as tensor addresses, that is uploaded again when its contents change.

    A new table and its pinned source never reuse the old memory, because launched kernels may still read it. Tables
    that a CUDA graph was captured with are kept alive. A table made during capture is used by that graph only, because
    its contents are copied only when the graph runs.

    Args:
        device: Device of the table.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: object = None
        self._tables: list[Tensor] = []
        self._recorded: list[list[Tensor]] = []

    def current(self, key: object, rows: Callable[[], list[list[int]]]) -> Tensor:
        """Return the table as an int64 device tensor, rebuilt if the key has changed since the previous call.

        Args:
            key: Value that changes whenever the contents do, such as the addresses themselves.
            rows: Function that returns the contents as rows of equal length.
        """
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
    """Copy a host tensor to a device asynchronously, from pinned memory where the device supports it."""
    return _pinned(tensor, device).to(device, non_blocking=True)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a contiguous block of memory, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _order(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the significant sizes and strides: without dimensions of size 1, and none for an empty tensor."""
    if not tensor.numel():
        return []
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def same_order(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal shapes and the same memory layout.

    Strides of dimensions of size 1 do not count.
    """
    return one.shape == other.shape and _order(one) == _order(other)


def _reordered(weight: Tensor, grad: Tensor) -> Tensor:
    """Return a copy of the gradient in the memory order of its weight."""
    return torch.empty_like(weight, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())
