"""Protocols of a data set and its splits, base classes that implement them, common options, and digests of samples.

Files are read only for digests of the samples in them. A digest is that of the stored sample, before it is resized or
augmented, and leaves out its target: a picture stays the same one in another folder, under another name, and with a
corrected label.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from mptrain.system.errors import DataError
from mptrain.system.files import open_to_read
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.data_files import Faults
from mptrain.workloads.base.random_streams import sample_order


@dataclass(frozen=True)
class Survey:
    """Counts and lengths of the samples of one split, by name, such as ``tokens`` and ``seconds``, to show to the user.

    ``mptrain doctor`` prints them before training. ``labels`` are class indices of the samples, or of the objects in
    them, int64 ``[N]``; None without classes.
    """

    labels: Tensor | None = None
    totals: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class FileFacts:
    """Path, class index, and size (width and height in pixels) of a picture file that was read.

    ``content`` is a hash of the size and the pixels as training uses them: equal for equal pictures in any file format.
    """

    name: str
    label: int
    size: tuple[int, int]
    content: bytes


class Split(Protocol):
    """Training, validation or test part of a data set: samples with fixed indices.

    If they are ``in_memory``, worker processes would cost more than they save. ``faults`` has the unusable ones so far.
    """

    in_memory: bool
    faults: Faults

    def __len__(self) -> int: ...

    @property
    def skipped(self) -> int:
        """Number of unusable samples, or of files with samples, that this split left out so far."""
        return len(self.faults.unusable)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """Return the indices of one epoch's samples, int64 ``[len(self)]``, in the order in which batches take them.

        It depends on the arguments only; ``epoch`` counts completed passes over the training data. Samples that
        continue one another, such as the windows of a text with carried state, keep their order even if ``shuffle`` is
        set. The default suits independent samples.
        """
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the samples with these indices (at least one) as one batch on the host, in the given order.

        If ``faults.on_error`` is ``skip``, unusable samples are left out and the batch is smaller. The augmentation of
        a sample depends on ``(seed, epoch, index)`` only: not on the other samples of the batch, the process, or
        earlier random numbers.

        Raises:
            DataError: A sample is unusable and ``faults.on_error`` is ``stop``, or no sample of the batch is usable.
        """
        ...

    def survey(self) -> Survey:
        """Return counts and lengths of the samples for ``mptrain doctor``; the default knows none."""
        return Survey()

    def digests(self) -> list[bytes]:
        """Return a digest of each stored sample by its content, in order; the default has none.

        A run records those of its training samples, and reports how many evaluated samples are among them.
        """
        return []


class IndependentSamples(Split):
    """Base class of a split whose samples do not depend on each other, so that they may come in any order.

    Subclasses add ``__len__``, ``fetch`` and ``in_memory``.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    @property
    def files(self) -> int:
        """Number of files that this split reads only when a batch needs them: one per sample; 0 if it is in memory."""
        return 0 if self.in_memory else len(self)

    def read(self, number: int) -> FileFacts | None:
        """Check a sample's file before training: record a fault in ``faults``, or return facts, if there are any."""
        with contextlib.suppress(DataError):  # a batch without a usable sample
            self.fetch([number], 0, 0)
        return None


class Dataset(Protocol):
    """Data set: its splits, the facts that models depend on, and the preparation of its batches.

    ``workers`` processes fetch from splits that are not in memory, and ``val`` selects the best checkpoint. ``inputs``
    is the kind of `mptrain.run.prediction` from which a trained network predicts; empty for none. An optional
    attribute ``warnings``, a tuple of sentences, tells the user about the data when a run starts.
    """

    name: str
    workers: int
    train: Split
    val: Split | None
    test: Split | None
    inputs: ClassVar[str] = ""

    def facts(self) -> dict[str, Any]:
        """Return the properties of the data that models and tasks may take as constructor arguments, by parameter name.

        Images have ``num_classes``, ``in_channels`` and ``image_size``, and ``boxes`` if the targets are boxes. Inputs
        of one shape have ``input_shape``, without the batch. ``num_outputs`` is how many numbers a network returns for
        each sample, one for each class, label or number to predict. Text has ``vocabulary_size``, ``sequence_length``
        and ``lanes`` (number of token streams read in parallel). A model
        or task receives the facts that it has parameters for. If it requires a fact that is missing here, it is
        incompatible with the data set, and an optional attribute ``lacks`` gives a `Problem` with the reason and a hint
        by name of the fact.
        """

    def describe(self) -> str:
        """Return the shape of a sample in a few words for the terminal, such as ``1x8x8``."""

    def card(self) -> dict[str, Any]:
        """Return the information needed to use the trained weights outside mptrain, as JSON values for ``data.json``.

        ``labels`` are the names of classes or tokens by index. Weights are meaningless with other labels, so a run is
        resumed and evaluated only with the same ones.
        """

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Move a host batch to the device and convert it to the network's input, without synchronising.

        Floating-point tensors become float32, and four-dimensional ones get the memory format. The default only moves
        the batch to the device.
        """
        return batch.to(device)


AnySplit = TypeVar("AnySplit", bound=Split)


@dataclass(kw_only=True, eq=False)
class SplitDataset(Dataset, Generic[AnySplit]):
    """Base class of data sets that are made of their splits: ``train``, and ``val`` and ``test`` where there are any.

    ``files`` are those that each split was read from, which become absolute paths.
    """

    name: str
    splits: Mapping[str, AnySplit]
    workers: int = 0
    files: Mapping[str, Iterable[Path | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.splits = {part: self.splits[part] for part in ("train", "val", "test") if part in self.splits}
        self.train, self.val, self.test = self.splits["train"], self.splits.get("val"), self.splits.get("test")
        self.files = absolute(self.files)

    @override
    def card(self) -> dict[str, Any]:
        return {"files": self.files}


def absolute(files: Mapping[str, Iterable[Path | str]]) -> dict[str, list[str]]:
    """Return the absolute paths of the files of each split, for a data set's card."""
    return {part: [str(Path(file).absolute()) for file in some] for part, some in files.items()}


def class_facts(class_names: Sequence[str]) -> dict[str, Any]:
    """Return the facts of the classes of a data set: their number, which is that of logits too, and their names."""
    return {"num_classes": len(class_names), "num_outputs": len(class_names), "class_names": class_names}


#: Bytes of a digest. Among a million samples, another one is taken for one of them with a probability of 5e-14.
SIZE = 8

#: Largest file that is read as a whole, in bytes; of a larger one, `PART` bytes each at its start, middle and end.
WHOLE, PART = 1 << 16, 1 << 14


def tensor_digests(values: Tensor) -> list[bytes]:
    """Return a digest of each sample in ``[N, ...]``, of its bytes."""
    rows = values.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)  # NumPy has no bfloat16
    return [hashlib.blake2b(row, digest_size=SIZE).digest() for row in rows.numpy()]


def file_digests(paths: Sequence[str]) -> list[bytes]:
    """Return a digest of each file: of its size and content, or for large files of parts of it (see `WHOLE`).

    A file that cannot be read gets the digest of its path; reading the sample says what is wrong with it. Files are
    read in parallel, because a file system may take long to answer.
    """
    chunks = [paths[start : start + 256] for start in range(0, len(paths), 256)]
    with ThreadPoolExecutor(8) as pool:
        return [digest for digests in pool.map(_file_digests, chunks) for digest in digests]


def _file_digests(paths: Sequence[str]) -> list[bytes]:
    return [hashlib.blake2b(_identity(path), digest_size=SIZE).digest() for path in paths]


def _identity(path: str) -> bytes:
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                return file.read()
            offsets = (0, (size - PART) // 2, size - PART)
            return b"".join([str(size).encode(), *(os.pread(file.fileno(), PART, offset) for offset in offsets)])
    except OSError:
        return os.fsencode(path)


Fields = ParamSpec("Fields")
Options = TypeVar("Options")
Made = TypeVar("Made")


def takes_fields_of(
    options: Callable[Fields, Options],
) -> Callable[[Callable[[Options], Made]], Callable[Fields, Made]]:
    """Return a decorator that lets a function of one dataclass instance be called with the fields of the dataclass.

    It gets the signature of the dataclass, with resolved annotations; the configuration checks its keys against them.
    """

    def decorate(function: Callable[[Options], Made]) -> Callable[Fields, Made]:
        def call(*args: Fields.args, **kwargs: Fields.kwargs) -> Made:
            return function(options(*args, **kwargs))

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(call, name, getattr(function, name))
        call.__annotations__ = typing.get_type_hints(options, include_extras=True)
        call.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
        return call

    return decorate
