"""Networks at their published sizes run forward and backward, without values; classifiers begin with the loss of chance."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mptrain.config.compose import compose
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import Classify

#: The seven networks of the paper's ILSVRC table, with the side of the images and the number of heads.
CLASSIFIERS = {
    "alexnet": (224, 1),
    "vgg16": (224, 1),
    "googlenet": (224, 3),
    "inception_v2": (224, 1),
    "inception_v3": (299, 2),
    "resnet50": (224, 1),
    "resnext50_32x4d": (224, 1),
}


def numbers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def translating(source, target=None):
    target = target or source
    facts = {"source_vocabulary_size": source, "target_vocabulary_size": target, "shared_vocabulary": source == target}
    return facts, lambda: (numbers(2, 7), torch.full((2,), 7), numbers(2, 5)), [(2, 5, target)]


#: By model: facts, what it is given, and the shapes of its answers.
OTHERS = {
    "big_lstm": (
        {"vocabulary_size": 793_471, "lanes": 128},
        lambda: (numbers(128, 20), torch.arange(128), torch.ones(128, dtype=torch.bool), numbers(128, 20)),
        [(128, 20)],
    ),
    "deepspeech2": (
        {"vocabulary_size": 29, "feature_size": 161},
        lambda: (torch.empty(2, 12, 161), numbers(2)),
        [(2, 6, 29), (2,)],
    ),
    "dncnn": ({"in_channels": 3, "upscale": 1}, lambda: (torch.empty(2, 3, 24, 24),), [(2, 3, 24, 24)]),
    "edsr": ({"in_channels": 3, "upscale": 2}, lambda: (torch.empty(2, 3, 24, 24),), [(2, 3, 48, 48)]),
    "seq2seq_3x1024": translating(100_000, 40_000),
    "seq2seq_5x1024": translating(100_000, 40_000),
    "ssd300_vgg16": (
        {"num_classes": 90, "in_channels": 3, "image_size": 300},
        lambda: (torch.empty(2, 3, 300, 300), torch.empty(2, 5, 4), numbers(2, 5)),
        [(2,), (2,)],
    ),
    "transformer_base": translating(37_000),
    "wavenet": (
        {"levels": 256, "speakers": 109, "vocabulary_size": 29},
        lambda: (numbers(8, 19069), numbers(8), numbers(8, 50), numbers(8, 19069)),
        [(8, 256, 19069)],
    ),
}


def build(name, **facts):
    return compose((f"model={name}",)).model.build(**facts)


def classifier(name):
    return build(name, num_classes=1000, image_size=CLASSIFIERS[name][0], in_channels=3)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CLASSIFIERS, *OTHERS])
def test_a_published_network_runs_forward_and_backward(name):
    with torch.device("meta"):
        if name in CLASSIFIERS:
            side, heads = CLASSIFIERS[name]
            model, given, shapes = classifier(name), (torch.empty(32, 3, side, side),), [(32, 1000)] * heads
        else:
            facts, make, shapes = OTHERS[name]
            model, given = build(name, **facts).to("meta"), make()
        answers = [answer for answer in tree_leaves(model(*given)) if answer is not None]
        assert [tuple(answer.shape) for answer in answers] == shapes
        sum(answer.float().sum() for answer in answers if answer.is_floating_point()).backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def first_loss(name, model):
    """In units of what equal probabilities cost, one for each head at its weight."""
    side, heads = CLASSIFIERS[name]
    batch, task = Batch(torch.randn(2, 3, side, side), torch.randint(1000, (2,))), Classify(num_classes=1000)
    with torch.no_grad():
        loss = task.loss(model, batch).item()
    return loss / (math.log(1000) * (1 + task.aux_weight * (heads - 1)))


@pytest.mark.workload
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_published_network_begins_as_unsure_as_chance(name):
    model = classifier(name)
    if name == "inception_v3":  # torchvision draws its last layer ten times as wide
        assert model.fc.weight.std().item() == pytest.approx(0.1, rel=0.15)
        torch.manual_seed(0)
        assert first_loss(name, model) > 1.2
        torch.manual_seed(0)
        with torch.no_grad():
            model.fc.weight /= 10
    assert first_loss(name, model) == pytest.approx(1, abs=0.08)
