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


def test_images_follow_their_own_seed_and_have_the_stated_sizes():
    sizes = {"classes": 7, "samples": 100, "test_samples": 20, "val_samples": 30, "image_size": 24, "channels": 1}
    data = make_synthetic(**sizes, seed=4)
    assert [len(part) for part in (data.train, data.val, data.test)] == [70, 30, 20]
    names = tuple(f"class {number}" for number in range(7))
    pictures = {"image_size": 24, "in_channels": 1, "input_shape": (1, 24, 24)}
    assert data.facts() == {**pictures, "num_classes": 7, "num_outputs": 7, "class_names": names}
    torch.manual_seed(6)
    assert torch.equal(data.train.images, make_synthetic(**sizes, seed=4).train.images)
    assert not torch.equal(data.train.images, make_synthetic(**sizes, seed=3).train.images)
    with pytest.raises(ConfigError, match=r"dataset.classes=1"):
        make_synthetic(classes=1)


def test_learnable_data_can_be_learned_and_noise_cannot():
    assert nearest_mean_accuracy(make_synthetic()) > 0.99
    assert nearest_mean_accuracy(make_synthetic(learnable=False)) < 0.2
