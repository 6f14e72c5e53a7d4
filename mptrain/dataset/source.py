"""What the engine may ask of a data set. Protocols only: no reading, no decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mptrain.dataset.batch import Batch
    from mptrain.dataset.faults import Faults


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
        """How many samples were left out because they could not be used."""

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


class Dataset(Protocol):
    """Everything that a run needs to know about its data.

    Attributes:
        name: As in the configuration.
        class_names: One for each class index.
        channels: Channels of the network's input, after the options were applied.
        image_size: Side of the network's square input in pixels, after the options were applied.
        augment: Whether training samples are varied at random.
        workers: Worker processes that fetch from splits that are not in memory.
        train: Training samples.
        val: Validation samples, on which the best checkpoint is chosen; None where there are none.
        test: Test samples; None where there are none.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    augment: bool
    workers: int
    train: Split
    val: Split | None
    test: Split | None

    def prepare(self, batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Batch:
        """Bring a host batch to the device and into the form that the network takes.

        Returns:
            float32 inputs ``[N, channels, image_size, image_size]`` in the memory format, normalised; int64
            targets. Nothing waits for the device.
        """
