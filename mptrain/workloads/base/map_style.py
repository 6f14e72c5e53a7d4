"""Map-style datasets of torch, whose samples are pairs (input, target). A look at them shows the number of classes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import override

from mptrain.system.errors import DataError, Problem, instance
from mptrain.system.process_state import other_random_numbers
from mptrain.system.words import listed
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import IndependentSamples, SplitDataset, Survey, class_facts, tensor_digests
from mptrain.workloads.base.random_streams import mix

_PARTS = ("train", "val", "test")
_ALSO = {"valid": "val", "validation": "val"}

#: Largest number of samples that are all read to learn the number of classes.
READ_ALL = 20_000

#: Number of classes whose first samples are read to learn whether ``targets`` of a dataset are those of its samples.
LOOKED_AT = 16


def torch_parts(made: Any) -> dict[str, Any]:
    """Return the training, validation and test data in what a user's class or function has returned, by name.

    It is one dataset to train on; a mapping or an object with ``train``, ``val`` and ``test``; or a tuple of them in
    this order. A part is a map-style dataset, or a tuple of two tensors; an iterable one raises `DataError`. Anything
    else gives an empty result.
    """
    if isinstance(made, TorchDataset | DataLoader) or _is_pair(made):
        parts = {"train": made}
    elif isinstance(made, Mapping):
        parts = {_ALSO.get(name, str(name)): part for name, part in made.items()}
        if len(parts) < len(made):
            raise DataError(f"data has two parts of one kind: {', '.join(map(str, made))}", "leave one of them out")
        if odd := [name for name in parts if name not in _PARTS]:
            raise DataError(f"data has the part {odd[0]!r}", f"parts are {', '.join(_PARTS)}")
    elif isinstance(made, Sequence):
        if len(made) > len(_PARTS):
            raise DataError(f"data has {len(made)} parts", f"parts are {', '.join(_PARTS)}, in this order")
        parts = dict(zip(_PARTS, made, strict=False))
    else:
        parts = {name: getattr(made, name) for name in _PARTS if hasattr(made, name)}
    parts = {name: part for name, part in parts.items() if part is not None}
    for name, part in parts.items():
        if _is_pair(part) and not (part[0].dim() and part[0].shape[:1] == part[1].shape[:1]):
            shapes = " and ".join(str(list(tensor.shape)) for tensor in part)
            raise DataError(f"{name} is a pair of tensors {shapes}", "give both the length of the samples")
        if isinstance(part, IterableDataset | DataLoader):
            why = "a run makes its own batches, and resumes by the index of a sample"
            raise DataError(f"{name} is {instance(part)}: {why}", "give a map-style torch.utils.data.Dataset")
    parts = {name: TensorDataset(*part) if _is_pair(part) else part for name, part in parts.items()}
    known = all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts.values())
    return parts if "train" in parts and known else {}


def _is_pair(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and all(isinstance(tensor, Tensor) for tensor in part)


class MapSplit(IndependentSamples):
    """Split of a map-style dataset. Random transforms draw from generators seeded by (seed, epoch, index).

    Raises:
        DataError: There is no sample, the inputs are bool or integers of less than 32 bits, or a sample is no pair of
            tensors or of what torch's ``default_collate`` makes tensors of.
    """

    def __init__(self, name: str, samples: Any) -> None:
        super().__init__(Faults())
        self.name, self.samples, inner = name, samples, samples
        rows, as_they_are = torch.arange(len(samples)), True
        while isinstance(inner, Subset) and len(inner) == len(inner.indices):
            as_they_are = as_they_are and _gives_samples_as(Subset, inner)
            rows, inner = torch.as_tensor(inner.indices)[rows], inner.dataset
        self.inner, self._rows, self._as_they_are = inner, rows, as_they_are
        self.in_memory = as_they_are and _gives_samples_as(TensorDataset, inner) and len(inner.tensors) == 2
        if not len(samples):
            raise DataError(f"{name} has no samples", "give it some, or leave the part out")
        self.first = self.fetch([0], 0, 0)
        if (dtype := self.first.inputs.dtype) in (torch.uint8, torch.int8, torch.int16, torch.bool):
            kind = str(dtype).removeprefix("torch.")
            hint = "scale them in a transform, as torchvision's ToTensor does"
            raise DataError(f"the inputs of {name} are {kind}, and a network computes with floats", hint)

    def __len__(self) -> int:
        return len(self.samples)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the samples with these indices as one batch."""
        if self.in_memory:
            rows = self._rows[torch.as_tensor(indices)]
            inputs, targets = self.inner.tensors
            return Batch(inputs[rows].detach(), targets[rows].detach())
        with other_random_numbers(torch.device("cpu")):
            pairs = [self._sample(index, mix(seed, epoch, index)) for index in indices]
        try:
            inputs, targets = default_collate(pairs)
        except (TypeError, RuntimeError) as error:
            message = str(error).partition("\n")[0]
            raise DataError(f"{self.name} samples make no batch: {message}", "return tensors of one shape") from error
        if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
            kinds = " and ".join(map(instance, pairs[0]))
            raise DataError(f"{self.name} samples are pairs of {kinds}", _PAIR)
        return Batch(inputs.detach(), targets.detach())

    def _sample(self, index: int, word: int) -> tuple[Any, Any]:
        random.seed(word)
        np.random.seed(word % 2**32)
        torch.default_generator.manual_seed(word >> 1)
        try:
            sample = self.samples[index]
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise DataError(f"{self.name} sample {index} cannot be read: {message}", "fix or remove it") from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"{self.name} sample {index} is {instance(sample)}", _PAIR)
        return sample[0], sample[1]

    @override
    def survey(self) -> Survey:
        return Survey(self.targets())

    @override
    def digests(self) -> list[bytes]:
        return tensor_digests(self.inner.tensors[0][self._rows]) if self.in_memory else []

    def targets(self) -> Tensor | None:
        """Return the class of each sample, int64 ``[N]``, from an attribute or by reading up to `READ_ALL` samples."""
        first = self.first.targets
        if first.is_floating_point() or first.dim() != 1:
            return None
        if (known := self._known_targets()) is not None:
            return known
        if len(self) > READ_ALL:
            return None
        return torch.cat([self.fetch([index], 0, 0).targets.long() for index in range(len(self))])

    def class_names(self) -> tuple[str, ...]:
        """Return ``classes`` of the dataset; nothing if a subset has made other targets of those of the dataset."""
        classes = getattr(self.inner, "classes", ())
        names = tuple(map(str, classes)) if isinstance(classes, Iterable) else ()  # else a number, or a method
        other = not self._as_they_are and hasattr(self.inner, "targets") and self._known_targets() is None
        return () if other else names

    def _known_targets(self) -> Tensor | None:
        """Return what the dataset says to be its targets, int64 ``[N]``, if they are those of its samples; else None.

        Compared are the first samples of up to `LOOKED_AT` classes.
        """
        try:
            targets = self.inner.tensors[1] if self.in_memory else getattr(self.inner, "targets", None)
            classes = torch.as_tensor(targets)[self._rows].long()
            first = dict(zip(reversed(classes.tolist()), reversed(range(len(classes))), strict=True))
            looked = sorted(first.items())[:LOOKED_AT]
            return classes if all(int(self.fetch([at], 0, 0).targets) == label for label, at in looked) else None
        except (TypeError, ValueError, RuntimeError, IndexError):  # none, words, boxes, of another length
            return None

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if the first or last sample, read twice with the same seed, is not the same both times."""
        looked = () if self.in_memory else {0, len(self) - 1}
        if all(self._digests_at(at) == self._digests_at(at) for at in looked):
            return ()
        return (
            f"a sample of {self.name} that is read twice is not the same: something draws from a generator of its own "
            "(such as numpy.random.default_rng), which no seed repeats and no resume restores; draw from torch.rand, "
            "random or numpy.random",
        )

    def _digests_at(self, index: int) -> list[list[bytes]]:
        return [tensor_digests(tensor) for tensor in self.fetch([index], 0, 0).tensors().values()]


def _gives_samples_as(kind: type[TorchDataset[Any]], dataset: Any) -> bool:
    """Return whether a dataset is of a class of torch, or of a subclass that leaves its samples as they are."""
    same = (getattr(type(dataset), name, None) is getattr(kind, name, None) for name in ("__getitem__", "__getitems__"))
    return isinstance(dataset, kind) and all(same)


def _untrained(classes: Tensor | None, count: int) -> tuple[str, ...]:
    """Return a warning if some of the classes, which are counted from the largest number, have no training sample."""
    there = set() if classes is None else {*classes.tolist()}
    missing = [str(number) for number in range(count) if number not in there]
    if not missing:
        return ()
    return (f"no training sample has class {listed(missing, 5)} of {count}: classes are numbered from 0",)


_PAIR = "a sample is a pair (input, target) of tensors, arrays or numbers"


class MapDataset(SplitDataset[MapSplit]):
    """Data set of map-style datasets of torch, with floating-point tensors as float32 and integer targets as int64."""

    def __init__(self, name: str, parts: Mapping[str, Any], workers: int) -> None:
        splits = {part: MapSplit(part, samples) for part, samples in parts.items()}
        super().__init__(name=name, splits=splits, workers=workers)
        self.warnings: tuple[str, ...] = (
            () if self.val or self.test else ("there is no validation data: return train, val and test",)
        )
        self.warnings += tuple(warning for split in splits.values() for warning in split.warnings())
        self.class_names = self.train.class_names()
        for part, split in splits.items():
            for at, (own, theirs) in enumerate(zip_longest(self.class_names, split.class_names())):
                if self.class_names and theirs not in (own, None):  # a part may lack the last ones
                    what = f"{part} has {theirs!r} as class {at}, and train has {own!r}" if own else ""
                    what = what or f"{part} has the class {theirs!r}, and train has {len(self.class_names)} others"
                    raise DataError(what, "give all parts the same classes in the same order")
        if not self.class_names:
            known = [split.targets() for split in splits.values()]
            if all(classes is not None for classes in known):
                labels = torch.cat([classes for classes in known if classes is not None]).unique()
                if labels[0] < 0:
                    raise DataError(f"a target is {int(labels[0])}: classes are numbered from 0", "number them so")
                self.class_names = tuple(map(str, range(int(labels[-1]) + 1)))
                self.warnings += _untrained(known[0], len(self.class_names))

    @property
    def lacks(self) -> dict[str, Problem]:
        """Reasons, with hints, why the data lacks some facts, by name of the fact."""
        shape, first = list(self.train.first.inputs.shape[1:]), self.train.first.targets
        kind, looked = str(first.dtype).removeprefix("torch."), min(READ_ALL, len(self.train))
        classes = f"a look at {looked:,} targets of type {kind} shows no classes"
        return {
            "num_classes": Problem(classes, "give the dataset an attribute classes, the names in order"),
            "in_channels": Problem(f"the inputs are {shape}, not [channels, side, side]", "choose another model"),
            "image_size": Problem(f"the inputs are {shape}, not [channels, side, side]", "choose another model"),
        }

    @override
    def facts(self) -> dict[str, Any]:
        """Return ``num_classes``, ``class_names``, ``in_channels`` and ``image_size``, those that the samples show."""
        facts = class_facts(self.class_names) if self.class_names else {}
        if len(shape := self.train.first.inputs.shape[1:]) == 3:
            facts["in_channels"] = shape[0]
            facts |= {"image_size": shape[1]} if shape[1] == shape[2] else {}
        return facts

    @override
    def describe(self) -> str:
        first = self.train.first.inputs
        shape = "x".join(map(str, first.shape[1:])) or "scalar"
        classes = f", {len(self.class_names):,} classes" if self.class_names else ""
        return f"{shape} {str(first.dtype).removeprefix('torch.')}{classes}"

    @override
    def card(self) -> dict[str, Any]:
        return {"labels": list(self.class_names)}

    @override
    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        batch = batch.to(device)
        inputs, targets = batch.inputs, batch.targets
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        targets = targets.float() if targets.is_floating_point() else targets.long()
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=memory_format)
        return replace(batch, inputs=inputs, targets=targets)
