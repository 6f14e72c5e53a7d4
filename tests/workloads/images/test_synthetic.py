"""Synthetic data: from its own seed, of the stated shape, learnable or not by choice."""

from __future__ import annotations

import pytest
import torch

from mptrain.system.errors import ConfigError
from mptrain.workloads.images.datasets.synthetic import make_synthetic


def nearest_mean_accuracy(data):
    """Accuracy on the test split of the class whose mean training image is nearest."""
    train, test = data.train, data.test
    means = torch.stack(
        [train.images[train.targets == number].float().mean(0).flatten() for number in range(len(data.class_names))]
    )
    guesses = torch.cdist(test.images.float().flatten(1), means).argmin(1)
    return (guesses == test.targets).float().mean().item()


def test_shapes_and_sizes_are_as_stated():
    data = make_synthetic(classes=7, samples=100, test_samples=20, val_samples=30, image_size=24, channels=1)
    assert [len(part) for part in (data.train, data.val, data.test)] == [70, 30, 20]
    batch = data.train.fetch([3, 1], 0, 0)
    assert (tuple(batch.inputs.shape), batch.inputs.dtype) == ((2, 1, 24, 24), torch.uint8)
    names = tuple(f"class {number}" for number in range(7))
    assert data.facts() == {"image_size": 24, "in_channels": 1, "num_classes": 7, "class_names": names}


def test_the_images_follow_their_own_seed_alone():
    torch.manual_seed(5)
    first = make_synthetic(samples=300, seed=4)
    torch.manual_seed(6)
    assert torch.equal(first.train.images, make_synthetic(samples=300, seed=4).train.images)
    assert not torch.equal(first.train.images, make_synthetic(samples=300, seed=3).train.images)


def test_learnable_data_can_be_learned_and_noise_cannot():
    assert nearest_mean_accuracy(make_synthetic()) > 0.99
    assert nearest_mean_accuracy(make_synthetic(learnable=False)) < 0.2


def test_prepared_inputs_are_about_standardised():
    data = make_synthetic()
    inputs = data.prepare(data.train.fetch(range(500), 0, 0), torch.device("cpu"), torch.channels_last).inputs
    assert inputs.mean().abs() < 0.15
    assert inputs.std().item() == pytest.approx(1, abs=0.15)


def test_one_class_is_refused():
    with pytest.raises(ConfigError, match=r"dataset.classes=1"):
        make_synthetic(classes=1)
