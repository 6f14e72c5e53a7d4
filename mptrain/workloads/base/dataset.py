"""Protocols of a data set and of its splits, as the training engine uses them. This module must not read files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import sample_order
from mptrain.workloads.base.survey import Survey


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
        return len(self.faults.found)

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


class Dataset(Protocol):
    """Data set: its splits, the facts that models depend on, and the preparation of its batches.

    ``workers`` processes fetch from splits that are not in memory, and ``val`` selects the best checkpoint. An optional
    attribute ``warnings``, a tuple of sentences, tells the user about the data when a run starts.
    """

    name: str
    workers: int
    train: Split
    val: Split | None
    test: Split | None

    def facts(self) -> dict[str, Any]:
        """Return the properties of the data that models and tasks may take as constructor arguments, by parameter name.

        Images have ``num_classes``, ``in_channels`` and ``image_size``, and ``boxes`` if the targets are boxes. Text
        has ``vocabulary_size``, ``sequence_length`` and ``lanes`` (number of token streams read in parallel). A model
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
