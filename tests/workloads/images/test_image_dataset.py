"""Splits in memory: unusable samples are named, augmentation is a function of (seed, epoch, index)."""

from __future__ import annotations

import pytest
import torch

from mptrain.system.errors import DataError
from mptrain.workloads.images.augmentation import Shifting
from mptrain.workloads.images.image_dataset import MemorySplit


def images_of(count, size=6, channels=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)


def test_a_label_outside_the_classes_is_named_or_left_out():
    images, labels = images_of(5), torch.tensor([0, 1, 7, 2, -1])
    with pytest.raises(DataError, match=r"toys sample 2: label 7 is outside .* \(and 1 more like it\)") as caught:
        MemorySplit("toys", images, labels, classes=3)
    assert "dataset.on_error=skip" in caught.value.hint
    split = MemorySplit("toys", images, labels, classes=3, on_error="skip")
    assert list(split.faults.unusable) == ["toys sample 2", "toys sample 4"]
    assert split.targets.tolist() == [0, 1, 2]
    assert torch.equal(split.fetch([2], 0, 0).inputs[0], images[3])
    with pytest.raises(DataError, match="no usable sample"):
        MemorySplit("toys", images_of(2), torch.tensor([5, 6]), classes=3, on_error="skip")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_float_image_that_is_not_finite_is_found(value):
    images = torch.zeros(4, 1, 2, 2)
    images[1, 0, 1, 1] = value
    with pytest.raises(DataError, match="sample 1: the image contains NaN or inf"):
        MemorySplit("toys", images, torch.zeros(4, dtype=torch.int64), classes=1)
    split = MemorySplit("toys", images, torch.zeros(4, dtype=torch.int64), classes=1, on_error="skip")
    assert (len(split), split.skipped) == (3, 1)


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    split = MemorySplit("toys", images_of(20), torch.zeros(20, dtype=torch.int64), classes=1)
    split.shifting = Shifting(2, True)
    whole = split.fetch(range(20), 3, 1).inputs
    torch.manual_seed(99)
    assert torch.equal(split.fetch(range(20), 3, 1).inputs, whole)
    assert torch.equal(split.fetch([17, 4], 3, 1).inputs, whole[[17, 4]])
    assert not torch.equal(split.fetch(range(20), 4, 1).inputs, whole)
    assert not torch.equal(split.fetch(range(20), 3, 2).inputs, whole)


@pytest.mark.parametrize("flip", [True, False])
def test_an_augmented_image_is_one_of_the_possible_ones(flip):
    images = images_of(1, channels=3).expand(200, -1, -1, -1)
    varied = Shifting(1, flip).apply(images, range(200), 0, 0)
    padded = torch.nn.functional.pad(images[0], (1, 1, 1, 1))
    possible = set()
    for source in (padded, padded.flip(2))[: 1 + flip]:
        windows = source.unfold(1, 6, 1).unfold(2, 6, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        possible |= {window.contiguous().numpy().tobytes() for window in windows}
    assert len(possible) == (18 if flip else 9)
    assert {image.contiguous().numpy().tobytes() for image in varied} == possible
