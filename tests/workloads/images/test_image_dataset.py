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


def test_a_label_outside_the_classes_stops_and_is_named():
    with pytest.raises(DataError) as caught:
        MemorySplit("toys train", images_of(5), torch.tensor([0, 1, 7, 2, -1]), classes=3)
    assert "toys train sample 2: label 7 is outside the classes 0 to 2 (and 1 more like it)" in str(caught.value)
    assert "dataset.on_error=skip" in caught.value.hint


def test_a_label_outside_the_classes_is_left_out_and_counted():
    images = images_of(5)
    split = MemorySplit("toys", images, torch.tensor([0, 1, 7, 2, -1]), classes=3, on_error="skip")
    assert split.skipped == 2
    assert list(split.faults.found) == ["toys sample 2", "toys sample 4"]
    assert split.targets.tolist() == [0, 1, 2]
    assert torch.equal(split.fetch([2], 0, 0).inputs[0], images[3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_float_image_that_is_not_finite_is_found(value):
    images = torch.zeros(4, 1, 2, 2)
    images[1, 0, 1, 1] = value
    with pytest.raises(DataError, match="sample 1: the image contains NaN or inf"):
        MemorySplit("toys", images, torch.zeros(4, dtype=torch.int64), classes=1)
    split = MemorySplit("toys", images, torch.zeros(4, dtype=torch.int64), classes=1, on_error="skip")
    assert (len(split), split.skipped) == (3, 1)


def test_no_usable_sample_is_an_error_even_when_skipping():
    with pytest.raises(DataError, match="no usable sample"):
        MemorySplit("toys", images_of(2), torch.tensor([5, 6]), classes=3, on_error="skip")


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    split = MemorySplit("toys", images_of(20), torch.zeros(20, dtype=torch.int64), classes=1)
    split.shifting = Shifting(2, True)
    whole = split.fetch(range(20), 3, 1).inputs
    torch.manual_seed(99)
    assert torch.equal(split.fetch(range(20), 3, 1).inputs, whole)
    assert torch.equal(split.fetch([17, 4], 3, 1).inputs, whole[[17, 4]])
    assert not torch.equal(split.fetch(range(20), 4, 1).inputs, whole)
    assert not torch.equal(split.fetch(range(20), 3, 2).inputs, whole)


def test_an_augmented_image_is_one_of_the_possible_shifts_and_mirrorings():
    images = images_of(1, channels=3).expand(200, -1, -1, -1)
    varied = Shifting(1, True).apply(images, range(200), 0, 0)
    padded = torch.nn.functional.pad(images[0], (1, 1, 1, 1))
    possible = {}
    for down in range(3):
        for right in range(3):
            window = padded[:, down : down + 6, right : right + 6]
            possible[window.numpy().tobytes()] = (down, right, False)
            mirrored = padded.flip(2)[:, down : down + 6, right : right + 6]
            possible[mirrored.contiguous().numpy().tobytes()] = (down, right, True)
    assert len(possible) == 18
    seen = {possible[image.contiguous().numpy().tobytes()] for image in varied}
    assert len(seen) == 18


def test_without_flip_images_only_shift():
    images = torch.zeros(50, 1, 5, 5, dtype=torch.uint8)
    images[:, 0, 2, 1:3] = torch.tensor([10, 20], dtype=torch.uint8)
    varied = Shifting(1, False).apply(images, range(50), 0, 0)
    for image in varied[:, 0]:
        row = image[image.sum(1).nonzero().item()]
        assert row[row > 0].tolist() == [10, 20]
