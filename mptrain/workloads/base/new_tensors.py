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
from mptrain.workloads.base.map_style import PreparedTensors, tensor_of
from mptrain.workloads.base.new_inputs import NewInputs

#: Samples that stand for those of the data when a network is exported: normal numbers, or integers that are 0.
MADE_UP = 8


class Given(str):
    """Name of an input in messages, such as ``input 3``, which carries its value; a text of the user carries none."""

    value: Any = None


class NewTensors(PreparedTensors, NewInputs):
    """Tensors or arrays, each of them one sample ``[*input_shape]`` of the kind of number that a run was trained on."""

    unreadable = (ValueError, DataError)
    workers = 0  # they are in memory

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self._zeros, self._target = (
            torch.zeros((), dtype=getattr(torch, card[f"{name}_dtype"])).expand(tuple(map(int, card[f"{name}_shape"])))
            for name in ("input", "target")
        )
        super().__init__(card, facts)
        draws = torch.Generator().manual_seed(0)
        shape, floats = (MADE_UP, *self._zeros.shape), self._zeros.is_floating_point()
        made_up = torch.randn(shape, generator=draws) if floats else torch.zeros(shape, dtype=torch.int64)
        self.train = self.split(list(self.inputs_in(made_up)))  # which an export is checked with

    @override
    def inputs_in(self, given: Any) -> Iterator[Given]:
        """Yield inputs for `split`: one sample, those of a batch ``[N, *input_shape]``, or those of any iterable."""
        if hasattr(given, "__array__"):
            given = tensor_of("the inputs", given)
            given = given[None] if given.dim() == self._zeros.dim() else given
        for number, value in enumerate([given] if isinstance(given, str | Path) else given):
            named = Given(f"input {number}")
            named.value = value
            yield named

    def read(self, given: str, faults: Faults) -> Tensor:
        """Return an input in the dtype of the training data; raise ValueError for another shape or kind of number."""
        if not isinstance(given, Given) or isinstance(given.value, str | Path):
            raise ValueError("it is a text, and the network takes tensors")
        tensor = tensor_of("its values", given.value)
        alike = tensor.is_floating_point() == self._zeros.is_floating_point() and tensor.dtype != torch.bool
        if tensor.shape != self._zeros.shape or not alike:
            raise ValueError(f"it is {_kind(tensor)}, and the network takes {_kind(self._zeros)}")
        return tensor.detach().cpu().to(self._zeros.dtype)

    def collate(self, samples: Sequence[Tensor]) -> Batch:
        """Return the inputs as ``[N, *input_shape]``, with targets of zeros of the shape of the training data's."""
        return Batch(torch.stack(list(samples)), torch.stack([self._target] * len(samples)))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
