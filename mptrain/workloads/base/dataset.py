"""What the engine asks of a data set. No reading, no decoding.

Derive from these protocols, then only what differs has to be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.faulty_samples import Faults
from mptrain.workloads.base.random_streams import sample_order


class Split(Protocol):
    """The training, validation or test part of a data set: samples with fixed indices.

    Attributes:
        in_memory: Fetching only copies, so worker processes would cost more than they save.
        faults: What was wrong with samples, and what is done about it.
    """

    in_memory: bool
    faults: Faults

    def __len__(self) -> int: ...

    @property
    def skipped(self) -> int:
        """How many samples, or files of such, were left out so far because they could not be used."""
        return len(self.faults.found)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
        """The indices of one epoch, int64 ``[len(self)]``, in the order in which batches take them.

        It depends on the arguments alone. The default is what independent samples need
        (`mptrain.workloads.base.random_streams.sample_order`).

        Args:
            seed: The run's seed.
            epoch: Completed passes over the training data.
            shuffle: Training asks for True, evaluation for False. Samples that continue one another, such as the
                windows of a text whose state is carried, keep their order all the same.
        """
        return sample_order(len(self), seed, epoch, shuffle=shuffle)

    def fetch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """The batch of the samples with these indices, in this order, on the host.

        Args:
            indices: At least one index into this split.
            epoch: Completed passes over the training data.
            seed: The run's seed. Augmentation of a sample depends on ``(seed, epoch, index)`` alone: not on
                the other samples of the batch, on the process that does it or on what was drawn before.

        Raises:
            DataError: A sample cannot be used and ``faults`` says stop, or no sample of the batch can be
                used.
        """
        ...


class Dataset(Protocol):
    """Everything that a run needs to know about its data.

    Attributes:
        name: As in the configuration.
        workers: Worker processes that fetch from splits that are not in memory.
        train: Training samples.
        val: Validation samples, on which the best checkpoint is chosen; None where there are none.
        test: Test samples; None where there are none.
    """

    name: str
    workers: int
    train: Split
    val: Split | None
    test: Split | None

    def facts(self) -> dict[str, Any]:
        """What networks and tasks may want to know, by the names of their parameters.

        Images: ``num_classes``, ``in_channels``, ``image_size``; ``boxes`` where targets are such. Text: ``vocabulary_size``, ``sequence_length``,
        ``lanes``. A target is given those that it has parameters for; one that requires another fact does not go
        with this data. Where a data set has an attribute ``lacks``, it says what to do about such a fact, by its name.
        """

    def describe(self) -> str:
        """The shape of a sample in a few words, for the person at the terminal."""

    def card(self) -> dict[str, Any]:
        """What somebody needs who uses the trained weights elsewhere: JSON values, written to ``data.json`` of a run.

        ``labels`` are the names of classes or tokens in the order of their numbers: weights trained on some mean
        nothing on others, so a run goes on, and is evaluated, with the same labels only.
        """

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device and into the form that the network takes.

        Args:
            batch: As `Split.fetch` gave it.
            device: Where to.
            memory_format: Of four-dimensional tensors.

        Returns:
            Floating-point tensors in float32. Nothing waits for the device. By default the batch as it is.
        """
        return batch.to(device)
