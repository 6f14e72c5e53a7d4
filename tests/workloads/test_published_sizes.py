"""The seven networks of the paper's ILSVRC table at their published sizes: shapes, gradients, and the loss they begin with."""

from __future__ import annotations

import math

import pytest
import torch

from mptrain.config.compose import compose
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import Classify

pytestmark = pytest.mark.workload

SIDES = {
    "alexnet": 224,
    "vgg16": 224,
    "googlenet": 224,
    "inception_v2": 224,
    "inception_v3": 299,
    "resnet50": 224,
    "resnext50_32x4d": 224,
}
HEADS = {"googlenet": 3, "inception_v3": 2}


def build(name):
    facts = {"num_classes": 1000, "image_size": SIDES[name], "in_channels": 3}
    return compose((f"model={name}",)).model.build(**facts)


def heads_of(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("name", SIDES)
def test_a_published_network_runs_forward_and_backward_at_its_published_size(name):
    with torch.device("meta"):
        model = build(name)
        batch = Batch(torch.empty(32, 3, SIDES[name], SIDES[name]), torch.empty(32, dtype=torch.int64))
        assert [tuple(logits.shape) for logits in heads_of(model(batch.inputs))] == [(32, 1000)] * HEADS.get(name, 1)
        Classify(num_classes=1000).loss(model, batch).backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def first_loss(name, model):
    """In units of what equal probabilities cost, one for each head at its weight."""
    batch = Batch(torch.randn(2, 3, SIDES[name], SIDES[name]), torch.randint(1000, (2,)))
    task = Classify(num_classes=1000)
    with torch.no_grad():
        loss = task.loss(model, batch).item()
    return loss / (math.log(1000) * (1 + task.aux_weight * (HEADS.get(name, 1) - 1)))


@pytest.mark.parametrize("name", sorted(set(SIDES) - {"inception_v3"}))
def test_a_published_network_begins_as_unsure_as_a_thousand_classes_allow(name):
    assert first_loss(name, build(name)) == pytest.approx(1, abs=0.08)


def test_inception_v3_begins_surer_because_torchvision_draws_its_last_layer_ten_times_as_wide():
    model = build("inception_v3")
    assert model.fc.weight.std().item() == pytest.approx(0.1, rel=0.15)
    torch.manual_seed(0)
    assert first_loss("inception_v3", model) > 1.2
    torch.manual_seed(0)
    with torch.no_grad():
        model.fc.weight /= 10
        assert first_loss("inception_v3", model) == pytest.approx(1, abs=0.08)
