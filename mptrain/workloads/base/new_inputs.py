"""New inputs of a trained network, without targets, which are read and prepared as in the evaluation of its run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import Dataset, IndependentSamples


class NewInputs(Dataset):
    """Base class of the data sets of predictions, made from a run's ``data.json``; the run's own files are not read.

    Attributes:
        suffixes: Extensions of the files that are its inputs, in lower case; empty if the inputs are texts.
        unreadable: Exceptions of `read` that mean that an input is unusable.
        batch_size: Number of inputs in a batch; None for that of the run.
    """

    suffixes: ClassVar[frozenset[str]] = frozenset()
    unreadable: ClassVar[tuple[type[Exception], ...]]
    batch_size: ClassVar[int | None] = None

    workers = 4
    val = test = None

    def __init__(self, card: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Take the content of ``data.json`` and the facts in it; raise KeyError, TypeError or ValueError if damaged."""
        self.name: str = card["name"]
        self._card, self._facts = dict(card), dict(facts)
        self.train = self.split([""])  # no run is built without training data, and this is never read

    @override
    def facts(self) -> dict[str, Any]:
        return self._facts

    @override
    def card(self) -> dict[str, Any]:
        return self._card

    @override
    def describe(self) -> str:
        return "new inputs"

    def split(self, inputs: Sequence[str]) -> NewSplit:
        """Return a split of texts, or of the paths of files, in this order."""
        return NewSplit(self, tuple(inputs))

    def inputs_in(self, given: Any) -> Iterator[str] | None:
        """Return the inputs in a file, or in another object, that is not read line by line; the default knows none."""
        return None

    @abstractmethod
    def read(self, given: str, faults: Faults) -> Any:
        """Read one input, or raise one of ``unreadable``; ``faults`` gets remarks on what was converted."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return what `read` has returned for several inputs as one batch on the host."""


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, UnicodeEncodeError):
        return "it is not UTF-8"
    return getattr(error, "reason", "") or (isinstance(error, OSError) and error.strerror) or str(error)


@dataclass(eq=False)
class NewSplit(IndependentSamples):
    """Split of new inputs; unusable ones are in ``faults``, by input, and missing in their batch."""

    source: NewInputs
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__init__(Faults("skip"))
        self.in_memory = not self.source.suffixes

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the usable ones of some inputs as a batch without meaningful targets; a dummy if there are none."""
        given = [self.inputs[index] for index in indices]

        def read(position: int) -> Any:
            if not self.source.suffixes:
                given[position].encode()  # raises UnicodeEncodeError, a ValueError, for what is not UTF-8
            return self.source.read(given[position], self.faults)

        try:
            samples = self.faults.usable("input", given, read, self.source.unreadable, _reason)
        except DataError:
            return Batch(torch.empty(0), torch.empty(0), is_dummy=True)
        return self.source.collate(samples)
