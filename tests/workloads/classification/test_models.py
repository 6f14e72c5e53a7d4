"""Every shipped classifier builds from its YAML file and gives finite logits, in training and in evaluation."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import yaml
from loops import each
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.classification.models.convnet import cnn
from mptrain.workloads.classification.models.perceptron import mlp
from mptrain.workloads.classification.models.plain import plain16
from mptrain.workloads.classification.models.published import classifier_names, torchvision_classifier

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
    facts = {"num_classes": 7, "in_channels": defaults.get("channels", 1), "image_size": size}
    target = getattr(importlib.import_module(module), function)
    if "image_size" not in inspect.signature(target).parameters:
        facts.pop("image_size")
    if isinstance(keys.get("hidden", keys.get("widths")), list):
        keys = {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}
    return target(**keys, **facts), size, facts["in_channels"]


@each("name", CLASSIFIERS)
def test_the_classifier_of_a_file_gives_finite_logits_in_both_modes(name):
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


def test_every_file_says_what_it_is_and_what_others_may_take_up():
    assert {"cnn", "mlp", "plain16", "alexnet", "vgg16", "googlenet", "inception_v3", "resnet18"} <= set(CLASSIFIERS)
    for name in NAMES:
        lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_"
        assert lines[1].startswith("# ")
        assert lines[1].endswith(".")


def test_the_small_network_halves_the_image_between_stages():
    model = cnn(num_classes=3, in_channels=1, widths=(4, 6))
    features = nn.Sequential(*list(model)[:-3])
    assert features(torch.zeros(2, 1, 8, 8)).shape == (2, 6, 4, 4)


def test_plain16_has_sixteen_convolutions_no_normalisation_and_ends_at_4x4():
    model = plain16(num_classes=10, in_channels=1, image_size=16)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds.count("Conv2d") == kinds.count("ReLU") == 16
    assert kinds.count("MaxPool2d") == 2
    assert not any("Norm" in kind for kind in kinds)
    assert model[-1].in_features == 16 * 4 * 4


def test_plain16_loses_the_gradients_of_its_first_layers_in_fp16_and_a_scale_of_1024_brings_them_back():
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


def test_plain16_refuses_images_that_the_pools_swallow():
    with pytest.raises(ConfigError, match=r"dataset.image_size=3"):
        plain16(num_classes=10, in_channels=1, image_size=3)


def test_mlp_has_the_widths_asked_for():
    model = mlp(num_classes=10, in_channels=1, image_size=8, hidden=(128, 32), dropout=0.1)
    shapes = [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)]
    assert shapes == [(128, 64), (32, 128), (10, 32)]
    assert sum(isinstance(layer, nn.Dropout) for layer in model) == 2


def test_an_unknown_torchvision_name_is_answered_with_the_nearest_classifier():
    with pytest.raises(ConfigError, match=r"model.name=resnet51") as caught:
        torchvision_classifier(name="resnet51", num_classes=10, image_size=32)
    assert caught.value.hint == "did you mean resnet50?" or "resnet" in caught.value.hint


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "quantized_resnet18", "fcn_resnet50", "r3d_18"])
def test_only_classifiers_are_offered(name):
    assert name not in classifier_names()


def test_an_argument_that_torchvision_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"model.arguments=.dropoot"):
        torchvision_classifier(name="alexnet", num_classes=10, image_size=64, arguments={"dropoot": 0.1})


def test_arguments_reach_torchvision():
    model = torchvision_classifier(name="squeezenet1_1", num_classes=10, image_size=32, arguments={"dropout": 0.25})
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25]


def test_grey_input_is_refused_with_the_key_to_change():
    with pytest.raises(ConfigError) as caught:
        torchvision_classifier(name="resnet18", num_classes=10, image_size=32, in_channels=1)
    assert caught.value.hint == "set dataset.channels=3"


@pytest.mark.parametrize(("name", "size"), [("alexnet", 62), ("inception_v3", 74)])
def test_images_too_small_for_the_network_are_refused_before_training(name, size):
    with pytest.raises(ConfigError, match=rf"dataset.image_size={size}: {name} cannot take images of that size"):
        torchvision_classifier(name=name, num_classes=10, image_size=size)


def test_trying_the_size_moves_neither_buffers_nor_random_numbers():
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


def test_the_inception_head_is_the_published_one_at_the_published_size():
    from torchvision.models.inception import InceptionAux

    from mptrain.workloads.classification.models.inception import FittingAux

    torch.manual_seed(0)
    ours = FittingAux(8, 5).eval()
    published = InceptionAux(8, 5).eval()
    published.load_state_dict(ours.state_dict())
    features = torch.randn(2, 8, 17, 17)
    assert torch.equal(ours(features), published(features))
    assert ours(torch.randn(2, 8, 3, 3)).shape == (2, 5)


def test_a_vision_transformer_takes_the_image_size_of_the_data():
    model = torchvision_classifier(name="vit_b_32", num_classes=10, image_size=64)
    assert model.image_size == 64


def test_a_stage_for_which_no_pixel_is_left_is_refused():
    with pytest.raises(ConfigError, match="images of 8 pixels are too small"):
        cnn(num_classes=2, in_channels=1, image_size=8, widths=(4,) * 5)
    logits = cnn(num_classes=2, in_channels=1, image_size=8, widths=(4,) * 4)(torch.zeros(2, 1, 8, 8))
    assert logits.shape == (2, 2)


def test_an_unknown_classifier_is_answered_with_a_few_names():
    with pytest.raises(ConfigError) as caught:
        torchvision_classifier(name="nosuch", num_classes=2, image_size=32)
    assert 1 <= caught.value.hint.count(",") <= 5
