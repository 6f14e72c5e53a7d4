"""Map-style datasets of torch, whose samples are pairs (input, target), and pairs of tensors, arrays or lists.

A look at the targets shows the number of classes, of labels or of numbers to predict.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from mptrain.system.words import counted, listed
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.dataset import IndependentSamples, SplitDataset, Survey, class_facts, tensor_digests
from mptrain.workloads.base.random_streams import mix

_PARTS = ("train", "val", "test")
_ALSO = {"valid": "val", "validation": "val"}

#: Largest number of samples that are all read to learn the number of classes.
READ_ALL = 20_000

#: Largest class index: greater integers are no classes.
MOST_CLASSES = 1_000_000

#: Multiple of its deviation above which the mean of an output makes its targets too coarse: half a percent in float32.
MOST_MEAN = 1e5

#: Number of classes whose first samples are read to learn whether ``targets`` of a dataset are those of its samples.
LOOKED_AT = 16


def parts_by_name(made: Any, is_one: Callable[[Any], bool]) -> dict[str, Any]:
    """Return training, validation and test data by name.

    They are one part to train on, as ``is_one`` says; a mapping or an object with ``train``, ``val`` and ``test``; or a
    tuple of them in this order. DataError is raised for other names, and for too many.
    """
    if is_one(made):
        parts = {"train": made}
    elif isinstance(made, Mapping):
        parts = {_ALSO.get(name, str(name)): part for name, part in made.items()}
        if len(parts) < len(made):
            raise DataError(f"data has two parts of one kind: {', '.join(map(str, made))}", "leave one of them out")
        if odd := [name for name in parts if name not in _PARTS]:
            raise DataError(f"data has the part {odd[0]!r}", f"parts are {', '.join(_PARTS)}")
    elif isinstance(made, Sequence):
        if len(made) > len(_PARTS):
            hint = f"parts are {', '.join(_PARTS)}, in this order, each a pair: ((x_train, y_train), (x_val, y_val))"
            raise DataError(f"data has {len(made)} parts", hint)
        parts = dict(zip(_PARTS, made, strict=False))
    else:
        parts = {name: getattr(made, name) for name in _PARTS if hasattr(made, name)}
    return {name: part for name, part in parts.items() if part is not None}


#: Hint for a loader where data are wanted.
OF_LOADER = 'give its data set, data=loader.dataset, and the size of its batches, "train.batch_size=N"'


def torch_parts(made: Any) -> dict[str, Any]:
    """Return the datasets in what a user's class or function has returned, by the names of `parts_by_name`.

    A part is a map-style dataset, or a pair of tensors, NumPy arrays, or what NumPy makes arrays of; the
    second of a pair may also be a list of numbers. An iterable dataset, or an array alone, raises `DataError`. Anything
    else gives an empty result.
    """
    parts = parts_by_name(made, lambda part: isinstance(part, TorchDataset | DataLoader) or _is_pair(part))
    for name, part in parts.items():
        if isinstance(part, IterableDataset | DataLoader):
            why = "a run makes its own batches, and resumes by the index of a sample"
            hint = OF_LOADER if isinstance(part, DataLoader) else "give a map-style torch.utils.data.Dataset"
            raise DataError(f"{name} is {instance(part)}: {why}", hint)
        if hasattr(part, "__array__"):
            raise DataError(f"{name} is {instance(part)} alone", "give a pair (inputs, targets)")
    parts = {name: _in_memory(name, *part) if _is_pair(part) else part for name, part in parts.items()}
    known = all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts.values())
    return parts if "train" in parts and known else {}


def _is_pair(part: Any) -> bool:
    arrays = [hasattr(one, "__array__") for one in part] if isinstance(part, tuple | list) and len(part) == 2 else []
    return arrays[:1] == [True] and (arrays[1] or isinstance(part[1], list))


def _in_memory(name: str, inputs: Any, targets: Any) -> TensorDataset:
    pair = tensor_of(f"the inputs of {name}", inputs), tensor_of(f"the targets of {name}", targets)
    if not (pair[0].dim() and pair[0].shape[:1] == pair[1].shape[:1]):
        shapes = " and ".join(str(list(tensor.shape)) for tensor in pair)
        raise DataError(f"{name} is a pair of tensors {shapes}", "give both the length of the samples")
    return TensorDataset(*pair)


def tensor_of(what: str, values: Any) -> Tensor:
    """Return a tensor of numbers, without a copy if torch can read their memory; unsigned integers become int64.

    Raises:
        DataError: The values, called ``what`` in the message, are no real numbers, sparse, masked, or rows of different
            lengths.
    """
    if isinstance(values, Tensor):
        if values.is_complex() or values.layout != torch.strided:
            what = f"{what} are {values.dtype} ({values.layout}), not dense real numbers"
            raise DataError(what, "call to_dense(), or torch.view_as_real")
        return values
    if np.ma.is_masked(values):
        raise DataError(f"{what} have masked values", "fill them, or leave their samples out")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{what} make no array: {error}", "give rows of one length") from error
    kind, dtype = array.dtype.kind, array.dtype.newbyteorder("=")
    if kind not in "biuf":
        whole = 'give the whole frame, with target="NAME"' if hasattr(values, "columns") else ""
        raise DataError(f"{what} are {array.dtype}, not numbers", whole or "number classes from 0, and give numbers")
    if array.dtype.itemsize > (1 if kind == "u" else 8):
        dtype = np.dtype(np.int64 if kind == "u" else np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not to be written, and nobody writes here
        return torch.from_numpy(np.require(array, dtype, "C"))


class PreparedTensors:
    """Preparation of data sets of tensors (`Dataset.prepare`): floats become float32, and integer targets int64."""

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Move a host batch to the device in these dtypes, and inputs ``[N, C, H, W]`` to the memory format."""
        batch = batch.to(device)
        inputs, targets = batch.inputs, batch.targets
        inputs, targets = inputs.float() if inputs.is_floating_point() else inputs, _as_trained(targets)
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=memory_format)
        return replace(batch, inputs=inputs, targets=targets)


class MapSplit(IndependentSamples):
    """Split of a map-style dataset. Random transforms draw from generators seeded by (seed, epoch, index).

    Raises:
        DataError: There is no sample, the inputs are bool or integers of less than 32 bits, a tensor is sparse or
            complex, one in memory has NaN or inf in float32, or a sample is no pair of tensors or of what torch's
            ``default_collate`` makes them of.
    """

    def __init__(self, name: str, samples: Any) -> None:
        super().__init__(Faults())
        self.name, self.samples, inner = name, samples, samples
        if not len(samples):
            raise DataError(f"{name} has no samples", "give it some, or leave the part out")
        rows, as_they_are = torch.arange(len(samples)), True
        while isinstance(inner, Subset) and len(inner) == len(inner.indices):
            as_they_are = as_they_are and _gives_samples_as(Subset, inner)
            rows, inner = torch.as_tensor(inner.indices)[rows], inner.dataset
        self.inner, self._rows, self._as_they_are = inner, rows, as_they_are
        self.in_memory = as_they_are and _gives_samples_as(TensorDataset, inner) and len(inner.tensors) == 2
        for what, tensor in zip(("inputs", "targets"), inner.tensors if self.in_memory else (), strict=False):
            if len(odd := _not_finite(tensor_of(f"the {what} of {name}", tensor))[rows].nonzero()):
                where = f"in {len(odd):,} of {len(self):,} samples, first in sample {int(odd[0])}"
                raise DataError(f"the {what} of {name} have NaN or inf {where}", "fix or remove them")
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
        inputs, targets = (tensor_of(f"{self.name} samples", tensor) for tensor in (inputs, targets))
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
            fields = f" of {listed(sorted(map(str, sample)), 8)}" if isinstance(sample, Mapping) else ""
            raise DataError(f"{self.name} sample {index} is {instance(sample)}{fields}", _PAIR)
        return sample[0], sample[1]

    def kinds(self) -> dict[str, Any]:
        """Return what a ``data.json`` says of samples besides their facts: their dtypes and the shape of a target.

        Integer inputs have ``input_max``, the largest one (at least 0) in the first `LOOKED_AT` samples.
        """
        dtypes = {"input_dtype": self.first.inputs.dtype, "target_dtype": self.first.targets.dtype}
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        looked = range(0 if self.first.inputs.is_floating_point() else min(LOOKED_AT, len(self)))
        most = max([0, *(number for at in looked for number in self.fetch([at], 0, 0).inputs.flatten().tolist())])
        return {**names, "target_shape": list(self.first.targets.shape[1:]), **({"input_max": most} if looked else {})}

    @override
    def survey(self) -> Survey:
        return Survey(self.targets())

    @override
    def digests(self) -> list[bytes]:
        return tensor_digests(_as_trained(self.inner.tensors[0][self._rows])) if self.in_memory else []

    def targets(self) -> Tensor | None:
        """Return the class of each sample, int64 ``[N]``, from an attribute or by reading up to `READ_ALL` samples."""
        if self.first.targets.is_floating_point() or self.first.targets.dim() != 1:
            return None
        if (known := self._known_targets()) is None and len(self) <= READ_ALL:
            known = self.some_targets()
        return None if known is None else known.long()

    def some_targets(self) -> Tensor | None:
        """Return the targets of all samples, or of `READ_ALL` evenly spaced ones if the dataset does not have them.

        They are ``[n, ...]``; None if their shapes differ.
        """
        if (known := self._known_targets()) is not None:
            return known
        count = min(len(self), READ_ALL)
        read = [self.fetch([number * len(self) // count], 0, 0).targets for number in range(count)]
        return torch.cat(read) if len({target.shape for target in read}) == 1 else None

    def names(self, attribute: str = "classes") -> tuple[str, ...]:
        """Return ``classes`` or ``output_names`` of the dataset; nothing if a subset has made targets of its own."""
        values = getattr(self.inner, attribute, ())
        names = tuple(map(str, values)) if isinstance(values, Iterable) else ()  # else a number, or a method
        other = not self._as_they_are and hasattr(self.inner, "targets") and self._known_targets() is None
        return () if other else names

    def _known_targets(self) -> Tensor | None:
        """Return what the dataset says to be its targets, ``[N, ...]``, if they are those of its samples; else None.

        Compared are the first samples of up to `LOOKED_AT` classes, or other targets.
        """
        if self.in_memory:
            known: Tensor = self.inner.tensors[1]
            return known.detach()[self._rows]
        try:
            known = torch.as_tensor(getattr(self.inner, "targets", None))[self._rows]
            looked = list(range(0, len(known), -(-len(known) // LOOKED_AT)))
            if known.dim() == 1:
                first = dict(zip(reversed(known.tolist()), reversed(range(len(known))), strict=True))
                looked = [at for _, at in sorted(first.items())[:LOOKED_AT]]
            read = torch.cat([self.fetch([at], 0, 0).targets for at in looked])
            exact = torch.float32 if read.is_floating_point() else torch.float64
            return known if torch.equal(read.to(exact), known[looked].to(exact)) else None
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


def _not_finite(values: Tensor) -> Tensor:
    """Return which samples of ``[N, ...]`` have NaN or inf in float32, bool ``[N]`` on the CPU."""
    if not values.is_floating_point():
        return torch.zeros(len(values), dtype=torch.bool)
    parts = [part.detach().float().isfinite().unsqueeze(-1).flatten(1).all(1) for part in values.split(1024)]
    return ~torch.cat(parts).cpu()


def number_kind(values: Tensor) -> str:
    """Return dtype and shape in words, such as ``float32 [3, 8]``."""
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def _as_trained(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values.long()


def statistics(values: Tensor) -> tuple[float, float]:
    """Return mean and population deviation of float64 numbers ``[N]``; a deviation that is 0 in float32 becomes 1.

    Sums are exact, so that neither the order of the numbers nor the machine changes a bit.
    """
    mean = math.fsum(values.tolist()) / len(values)
    std = math.sqrt(math.fsum((values - mean).square().tolist()) / len(values))
    return mean, std if np.float32(std) else 1.0


def target_facts(targets: Tensor, names: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return mean and deviation of each output over targets ``[N]`` or ``[N, K]``, and warnings of unusual ones.

    They are those of the targets in float32, as training sees them.
    """
    columns = targets.float().double().cpu().reshape(len(targets), len(names)).T
    mean, std = zip(*map(statistics, columns), strict=True)
    same = [name for name, column in zip(names, columns, strict=True) if (column == column[0]).all()]
    coarse = [name for name, *at in zip(names, mean, std, strict=True) if abs(at[0]) > MOST_MEAN * at[1]]
    odd = {"constant": same, "too coarse: subtract their mean": [name for name in coarse if name not in same]}
    sentence = "in float32 the training targets of output {} are {}".format
    warned = tuple(sentence(listed(some, 5), what) for what, some in odd.items() if some)
    return {"target_mean": mean, "target_std": std}, warned


def _are_labels(targets: Tensor | None) -> bool:
    return targets is not None and targets.dim() == 2 and bool(((targets == 0) | (targets == 1)).all())


def _untrained(classes: Tensor | None, count: int) -> tuple[str, ...]:
    """Return a warning if some of the classes, which are counted from the largest number, have no training sample."""
    there = set() if classes is None else {*classes.tolist()}
    missing = [str(number) for number in range(count) if number not in there]
    if not missing:
        return ()
    return (f"no training sample has class {listed(missing, 5)} of {count}: classes are numbered from 0",)


#: Task and words for what targets show, by the fact that shows it.
_TASKS = {
    "label_counts": ("multilabel", "label", "labels"), "target_mean": ("regression", "output", "outputs"),
    "num_classes": ("classify", "class", "classes"),
}  # fmt: skip

_TARGETS = (
    "classes are integers [N], also targets.squeeze(1) of [N, 1], numbers floats [N] or [N, K], labels 0 or 1 [N, K]"
)
_PAIR = "a sample is a pair (input, target) of tensors, arrays or numbers"


class MapDataset(PreparedTensors, SplitDataset[MapSplit]):
    """Data set of map-style datasets of torch.

    Targets are looked at, so that a network and a task know what to return: classes, labels, or numbers.

    Raises:
        DataError: A part has other classes, names of outputs, shapes or kinds of numbers than the training data.
    """

    inputs = "tensors"

    def __init__(self, name: str, parts: Mapping[str, Any], workers: int) -> None:
        splits = {part: MapSplit(part, samples) for part, samples in parts.items()}
        splits.setdefault("train", next(iter(splits.values())))  # to build an evaluation
        super().__init__(name=name, splits=splits, workers=workers)
        none = "there is no validation data: give train, val and test"
        self.warnings: tuple[str, ...] = () if self.val or self.test else (none,)
        self.warnings += tuple(warning for split in splits.values() for warning in split.warnings())
        self.class_names = self.train.names()
        for part, split in splits.items():
            for what in ("inputs", "targets"):
                theirs, own = (getattr(some.first, what) for some in (split, self.train))
                odd = theirs.is_floating_point() - own.is_floating_point()
                if (odd or theirs.shape[1:] != own.shape[1:]) if what == "inputs" else odd > 0 and own.dim() == 1:
                    kinds = f"{number_kind(theirs[0])}, and those of train {number_kind(own[0])}"
                    raise DataError(f"the {what} of {part} are {kinds}", "give both one shape and kind of number")
            for at, (name, other) in enumerate(zip_longest(self.class_names, split.names())):
                if self.class_names and other not in (name, None):  # a part may lack the last ones
                    what = f"{part} has {other!r} as class {at}, and train has {name!r}" if name else ""
                    what = what or f"{part} has the class {other!r}, and train has {len(self.class_names)} others"
                    raise DataError(what, "give all parts the same classes in the same order")
        counts = Counter(self.class_names)  # ImageNet has two cranes, which get their numbers
        self.class_names = tuple(f"{one} ({at})" if counts[one] > 1 else one for at, one in enumerate(self.class_names))
        if not self.class_names:
            known = [split.targets() for split in splits.values()]
            if all(classes is not None for classes in known):
                labels = torch.cat([classes for classes in known if classes is not None]).unique()
                if labels[0] < 0:
                    raise DataError(f"a target is {int(labels[0])}: classes are numbered from 0", "number them so")
                if labels[-1] <= MOST_CLASSES:
                    self.class_names = tuple(map(str, range(int(labels[-1]) + 1)))
                    self.warnings += _untrained(known[0], len(self.class_names))
        self._outputs = self._output_facts()

    def _output_facts(self) -> dict[str, Any]:
        """Return the facts of targets that are numbers ``[N]`` or ``[N, K]``, or labels ``[N, K]``; none for others.

        Warnings are added. Raise DataError for parts, or names, with another number of outputs.
        """
        split, first = self.train, self.train.first.targets
        floats, count = first.is_floating_point(), first[0].numel()
        if not (first.dim() <= 2 and count and (floats or _are_labels(first))):
            return {}
        targets = split.some_targets()
        if targets is None or _not_finite(targets).any():
            return {}
        held_out = [part for part in (self.val, self.test) if part is not None]
        labels = _are_labels(targets) and all(_are_labels(part.some_targets()) for part in held_out)
        if not (floats or labels):
            return {}
        for part in held_out:
            shape, own = (list(one.first.targets.shape[1:]) for one in (part, split))
            if shape != own:
                raise DataError(f"a target of {part.name} is {shape}, and one of train {own}", "give them one shape")
        given = {names for part in (split, *held_out) if (names := part.names("output_names"))}
        if len(given) > 1 or any(not len(names) == len({*names}) == count for names in given):
            what = " and ".join(listed(names, 5) for names in sorted(given))
            raise DataError(f"output_names are {what}, for {count} outputs", "name each output, the same in all parts")
        names = self.class_names if labels and len(self.class_names) == count else tuple(map(str, range(count)))
        names = next(iter(given), names)
        statistics_of_targets, warned = target_facts(targets, names)
        self.warnings += warned
        if (looked := len(targets)) < len(split):
            what = f"the facts of the targets are from {looked:,} of {len(split):,} training samples, evenly spaced"
            self.warnings += (f"{what}: the others were not looked at",)
        facts: dict[str, Any] = {"num_outputs": count, "output_names": names}
        if floats:
            facts |= statistics_of_targets
        if labels:
            facts["label_counts"] = tuple(round(mean * len(split)) for mean in statistics_of_targets["target_mean"])
        return facts

    @property
    def lacks(self) -> dict[str, Problem]:
        """Reasons, with hints, why the data lacks some facts, by name of the fact."""
        shape, first, facts = list(self.train.first.inputs.shape[1:]), self.train.first.targets, self.facts()
        kind, looked = str(first.dtype).removeprefix("torch."), min(READ_ALL, len(self.train))
        what = f"the targets are {kind} [{', '.join(map(str, ('N', *first.shape[1:])))}]"
        if first.dim() == 1 and not first.is_floating_point() and not self.class_names:
            what = f"a look at {looked:,} targets of type {kind} shows no classes, and the dataset has no list classes"
        elif first.dim() <= 2 and first.is_floating_point() and not self._outputs:
            what += ", and some are NaN or inf, or of another shape"
        fits = " and ".join(f"task={task}" for fact, (task, *_) in _TASKS.items() if fact in facts)
        hint = f"{fits and f'for these targets: {fits}; '}{_TARGETS}"
        classes = f"{hint}; model.facts={{num_classes: num_outputs}} lets a model of classes return other numbers"
        inputs = Problem(f"the inputs are {shape}, not [channels, side, side]", "model=mlp takes inputs of any shape")
        return {
            **dict.fromkeys((*_TASKS, "num_outputs", "output_names", "target_std"), Problem(what, hint)),
            "num_classes": Problem(what, classes if self._outputs else hint),
            **dict.fromkeys(("in_channels", "image_size"), inputs),
        }

    @override
    def facts(self) -> dict[str, Any]:
        """Return the shape of the inputs, and what the samples show of images, classes, labels and other outputs."""
        facts = class_facts(self.class_names) if self.class_names else {}
        facts["input_shape"] = shape = tuple(self.train.first.inputs.shape[1:])
        if len(shape) == 3:
            facts["in_channels"] = shape[0]
            facts |= {"image_size": shape[1]} if shape[1] == shape[2] else {}
        return facts | self._outputs

    @override
    def describe(self) -> str:
        first, facts = self.train.first.inputs, self.facts()
        shape = "x".join(map(str, first.shape[1:])) or "scalar"
        shown = [counted(facts["num_outputs"], *words) for fact, (_, *words) in _TASKS.items() if fact in facts]
        return ", ".join([f"{shape} {str(first.dtype).removeprefix('torch.')}", *shown[:1]])

    @override
    def card(self) -> dict[str, Any]:
        facts = {name: list(fact) if isinstance(fact, tuple) else fact for name, fact in self.facts().items()}
        labels = list(self.class_names or self.train.names("output_names"))
        return {**facts, "labels": labels, **self.train.kinds()}
