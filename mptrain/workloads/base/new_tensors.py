"""New inputs that are tensors or arrays, for runs whose data were tensors or datasets of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.map_style import PreparedTensors, number_kind, tensor_of
from mptrain.workloads.base.new_inputs import NewInputs

#: Number of samples that stand for those of the data when a network is exported: normal numbers, or integers from 0 to
#: the largest one of a few training samples, because a greater one may be no token.
MADE_UP = 8


class NamedValue(str):
    """Name of an input in messages, such as ``input 3``, which carries its value; a text of the user carries none."""

    value: Any = None


class _MadeUp(NamedValue):
    """Number of a sample, from which it is drawn when it is read: only exports read any."""


class NewTensors(PreparedTensors, NewInputs):
    """Tensors or arrays, each of them one sample ``[*input_shape]`` of the kind of number that a run was trained on."""

    unreadable = (ValueError, DataError)
    workers = 0  # they are in memory

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._zeros, self._target = (
            torch.zeros((), dtype=getattr(torch, card[f"{name}_dtype"])).expand(tuple(map(int, card[f"{name}_shape"])))
            for name in ("input", "target")
        )
        self._most = int(card.get("input_max", 0))
        super().__init__(card, facts)
        self.train = self.split([_MadeUp(number) for number in range(MADE_UP)])  # which an export is checked with

    @override
    def inputs_in(self, given: Any) -> Iterator[NamedValue]:
        """Yield inputs for `split`: one sample, those of a batch ``[N, *input_shape]``, or those of any iterable."""
        if hasattr(given, "__array__"):
            given = tensor_of("the inputs", given)
            given = given[None] if given.dim() == self._zeros.dim() else given
        for number, value in enumerate([given] if isinstance(given, str | Path) else given):
            named = NamedValue(f"input {number}")
            named.value = value
            yield named

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return an input in the dtype of the training data.

        ValueError is raised for another shape or kind of number, and for NaN or inf in float32.
        """
        if isinstance(given, _MadeUp):
            draws, shape, dtype = torch.Generator().manual_seed(int(given)), self._zeros.shape, self._zeros.dtype
            normal, whole = torch.randn(shape, generator=draws), torch.randint(self._most + 1, shape, generator=draws)
            return (normal if dtype.is_floating_point else whole).to(dtype)
        if not isinstance(given, NamedValue) or isinstance(given.value, str | Path):
            raise ValueError("it is a text, and the network takes tensors")
        tensor = tensor_of("its values", given.value)
        alike = tensor.is_floating_point() == self._zeros.is_floating_point() and tensor.dtype != torch.bool
        if tensor.shape != self._zeros.shape or not alike:
            raise ValueError(f"it is {number_kind(tensor)}, and the network takes {number_kind(self._zeros)}")
        if not tensor.float().isfinite().all():
            raise ValueError("its values have NaN or inf")
        return tensor.detach().cpu().to(self._zeros.dtype)

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return the inputs as ``[N, *input_shape]``, with targets of zeros of the shape of the training data's."""
        return Batch(torch.stack(list(samples)), torch.stack([self._target] * len(samples)))
