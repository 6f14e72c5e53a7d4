from __future__ import annotations

import pytest
import torch
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.preparation import Preparation
from mptrain.workloads.classification.models.convnet import cnn
from mptrain.workloads.gan.task import ClassifierFeatures
from tests.loops import each


class Remembers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers, self.given = nn.Sequential(nn.Flatten(), *layers), None

    def forward(self, images):
        self.given = images
        return self.layers(images)


def pictures(channels=1, side=4, samples=3):
    return torch.rand(samples, channels, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


def features_of(model, preparation=None):
    return ClassifierFeatures(lambda device: model, preparation, labelled=False)


def test_features_are_what_the_last_linear_layer_is_given():
    model = Remembers(nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))
    model.auxiliary = nn.Linear(2, 2)
    seen, logits = features_of(model).extract(pictures())
    expected = model.layers[:-1](pictures())
    assert torch.equal(seen, expected)
    assert torch.equal(logits, model.layers[-1](expected))
    assert not seen.requires_grad
    assert torch.equal(model.given, pictures())
    with pytest.raises(ConfigError, match="no linear layer"):
        features_of(nn.Conv2d(1, 2, 4)).extract(pictures())


def test_the_classifier_is_made_once_and_judges_in_float32():
    made = []

    def make(device):
        made.append(device.type)
        return cnn(num_classes=3, in_channels=1, widths=(4, 5)).half().train()

    features = ClassifierFeatures(make, None, labelled=False)
    plain, _ = features.extract(pictures())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, logits = features.extract(pictures())
    assert made == ["cpu"]
    assert cast.dtype == logits.dtype == torch.float32
    assert torch.equal(plain, cast)
    rounded, _ = features.extract(pictures().half())
    assert torch.equal(rounded, features.extract(pictures().half().float())[0])


@each("given", [1, 3])
@each(
    "preparation",
    [
        Preparation((0.3,), (0.4,), 6, 1),
        Preparation((0.3,), (0.4,), 4, 3),
        Preparation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 6, 3),
        Preparation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 4, 1),
    ],
)
def test_pictures_are_prepared_as_the_classifiers_own(given, preparation):
    """As if they had been stored in 8 bits and had come through the classifier's own data set."""
    stored = torch.randint(256, (3, given, 4, 4), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    own = stored.float()
    if given == 1 and len(preparation.mean) == 3:
        own = own.expand(-1, 3, -1, -1)
    if given == 3 and len(preparation.mean) == 1:
        own = (own * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    expected = preparation.apply(Batch(own, own), torch.device("cpu"), torch.contiguous_format).inputs
    side, channels = preparation.image_size, preparation.channels
    model = Remembers(nn.Linear(channels * side * side, 2))
    features_of(model, preparation).extract(stored.float() / 127.5 - 1)
    assert model.given.shape == (3, channels, side, side)
    assert torch.allclose(model.given, expected, atol=1e-5)
