"""Every shipped classifier builds from its YAML file and gives finite logits, in training and in evaluation."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.classification.models.convnet import cnn
from mptrain.workloads.classification.models.perceptron import mlp
from mptrain.workloads.classification.models.plain import plain16
from mptrain.workloads.classification.models.published import torchvision_classifier
from tests.loops import each

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
#: A model for another task chooses that in its file, and has tests of its own.
CLASSIFIERS = [name for name in NAMES if "override /task:" not in (CONFIGS / f"{name}.yaml").read_text()]
AUXILIARY = {"googlenet": 2, "inception_v3": 1}


def build(name):
    """The model of a YAML file at its small size, and that size and its channels."""
    keys = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]
    defaults = keys.pop("defaults")
    module, _, function = keys.pop("_target_").rpartition(".")
    size = defaults.get("image_size", {}).get("small", 8)
    channels = defaults.get("channels", 1)
    known = {
        "num_classes": 7,
        "num_outputs": 7,
        "in_channels": channels,
        "image_size": size,
        "input_shape": (channels, size, size),
    }
    target = getattr(importlib.import_module(module), function)
    facts = {fact: known[fact] for fact in inspect.signature(target).parameters if fact in known}
    if isinstance(keys.get("hidden", keys.get("widths")), list):
        keys = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    return target(**keys, **facts), size, channels


@pytest.mark.long
@each("name", CLASSIFIERS)
def test_every_classifier_gives_finite_logits_in_both_modes(name):
    model, size, channels = build(name)
    images = torch.randn(2, channels, size, size)
    output = model(images)
    heads = output if isinstance(output, tuple) else (output,)
    assert len(heads) == 1 + AUXILIARY.get(name, 0)
    for logits in heads:
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()
    model.eval()
    with torch.no_grad():
        logits = model(images)
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()


def test_plain16_has_sixteen_convolutions_and_no_normalisation():
    model = plain16(num_classes=10, in_channels=1, image_size=16)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds.count("Conv2d") == kinds.count("ReLU") == 16
    assert kinds.count("MaxPool2d") == 2
    assert not any("Norm" in kind for kind in kinds)
    assert model[-1].in_features == 16 * 4 * 4


def test_plain16_loses_first_gradients_in_fp16_without_a_scale():
    torch.manual_seed(0)
    model = plain16(num_classes=10, in_channels=1, image_size=16)
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    signals = []
    for layer in convolutions:
        layer.register_full_backward_hook(lambda layer, inward, outward: signals.append(outward[0]))
    images, targets = torch.randn(128, 1, 16, 16, requires_grad=True), torch.arange(128) % 10
    nn.functional.cross_entropy(model(images), targets).backward()
    first, last = signals[-1], signals[0]
    assert first.abs().max() > 0
    assert not first.half().any()
    assert (first * 1024).half().any()
    assert last.half().any()


def test_sizes_and_arguments_reach_the_network():
    model = mlp(num_outputs=10, input_shape=(1, 8, 8), hidden=(128, 32), dropout=0.1)
    shapes = [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)]
    assert shapes == [(128, 64), (32, 128), (10, 32)]
    assert [layer.p for layer in model if isinstance(layer, nn.Dropout)] == [0.1] * 2
    assert cnn(num_classes=2, in_channels=1, image_size=8, widths=(4,) * 4)(torch.zeros(2, 1, 8, 8)).shape == (2, 2)
    model = torchvision_classifier(name="squeezenet1_1", num_classes=10, image_size=32, arguments={"dropout": 0.25})
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25]
    assert torchvision_classifier(name="vit_b_32", num_classes=10, image_size=64).image_size == 64


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 8, 8), (2, 3, 4, 5)])
def test_a_perceptron_takes_inputs_of_any_shape(shape):
    inputs = torch.randn(6, *shape)
    model = mlp(num_outputs=3, input_shape=shape, hidden=(4,))
    assert torch.equal(model(inputs), model[1:](inputs.reshape(6, -1)))
    with pytest.raises(ConfigError, match=r"model=mlp takes floats, and the inputs are torch.int64"):
        model(inputs.long())


@pytest.mark.parametrize(
    ("build", "changes", "said", "hint"),
    [
        (plain16, {"image_size": 3}, "dataset.image_size=3", ""),
        (cnn, {"image_size": 8, "widths": (4,) * 5}, "images of 8 pixels are too small", ""),
        (torchvision_classifier, {"name": "resnet51"}, "model.name=resnet51", "resnet"),
        (torchvision_classifier, {"name": "nosuch"}, "model.name=nosuch", ", "),
        (torchvision_classifier, {"name": "fcn_resnet50"}, "model.name=fcn_resnet50", "resnet"),
        (torchvision_classifier, {"name": "alexnet", "arguments": {"dropoot": 0.1}}, "model.arguments=.dropoot", ""),
        (torchvision_classifier, {"name": "resnet18", "in_channels": 1}, "channel", "set dataset.channels=3"),
        (torchvision_classifier, {"name": "alexnet", "image_size": 62}, "dataset.image_size=62: alexnet", ""),
        (torchvision_classifier, {"name": "inception_v3", "image_size": 74}, "dataset.image_size=74: inception_v3", ""),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_key(build, changes, said, hint):
    facts = {"num_classes": 10, "image_size": 64, "in_channels": 3, **changes}
    with pytest.raises(ConfigError, match=said) as caught:
        build(**facts)
    assert hint in str(caught.value.hint)
    assert str(caught.value.hint).count(",") <= 5


def test_trying_the_size_moves_no_buffer_or_random_number():
    torch.manual_seed(3)
    model = torchvision_classifier(name="resnet18", num_classes=10, image_size=32)
    after = torch.rand(1)
    torch.manual_seed(3)
    from torchvision.models import resnet18

    plain = resnet18(weights=None, num_classes=10)
    assert torch.equal(torch.rand(1), after)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert all(value.device.type == "cpu" for value in model.state_dict().values())


def test_the_inception_head_is_the_published_one():
    from torchvision.models.inception import InceptionAux

    from mptrain.workloads.classification.models.inception import FittingAux

    torch.manual_seed(0)
    ours = FittingAux(8, 5).eval()
    published = InceptionAux(8, 5).eval()
    published.load_state_dict(ours.state_dict())
    features = torch.randn(2, 8, 17, 17)
    assert torch.equal(ours(features), published(features))
    assert ours(torch.randn(2, 8, 3, 3)).shape == (2, 5)
