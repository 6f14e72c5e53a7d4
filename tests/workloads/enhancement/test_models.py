from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import yaml
from loops import each
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.enhancement.models.dncnn import dncnn
from mptrain.workloads.enhancement.models.edsr import Enlarged, edsr


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def shipped(pytestconfig, name, **facts):
    keys = yaml.safe_load((pytestconfig.rootpath / "configs" / "model" / f"{name}.yaml").read_text())["model"]
    made = {
        "mptrain.workloads.enhancement.models.edsr.edsr": edsr,
        "mptrain.workloads.enhancement.models.dncnn.dncnn": dncnn,
    }[keys.pop("_target_")]
    keys.pop("defaults")
    with torch.device("meta"):
        return made(**keys, **facts)


@pytest.mark.parametrize(
    ("name", "upscale", "count"),
    [
        # The authors' program in PyTorch: 1.37, 1.55 and 1.52 million, and 40.7, 43.7 and 43.1 million.
        ("edsr_baseline", 2, 1_369_859),
        ("edsr_baseline", 3, 1_554_499),
        ("edsr_baseline", 4, 1_517_571),
        ("edsr", 2, 40_729_603),
        ("edsr", 3, 43_680_003),
        ("edsr", 4, 43_089_923),
        ("edsr_small", 2, 121_987),
    ],
)
def test_edsr_has_as_many_parameters_as_the_authors_program(pytestconfig, name, upscale, count):
    assert parameters(shipped(pytestconfig, name, in_channels=3, upscale=upscale)) == count


@pytest.mark.parametrize(
    ("name", "channels", "count"),
    [
        (
            "dncnn",
            1,
            556_096,
        ),  # "0.56 million" of the authors' program in PyTorch, whose last layers have no bias either
        ("dncnn", 3, 558_400),
        ("dncnn_small", 3, 29_600),
    ],
)
def test_dncnn_has_as_many_parameters_as_the_authors_program(pytestconfig, name, channels, count):
    assert parameters(shipped(pytestconfig, name, in_channels=channels)) == count


def test_the_files_say_the_sizes_that_the_networks_have(pytestconfig):
    facts = {"edsr": [{"upscale": 2}, {"upscale": 4}], "edsr_baseline": [{"upscale": 2}, {"upscale": 4}],
             "edsr_small": [{"upscale": 2}], "dncnn": [{}, {"in_channels": 1}], "dncnn_small": [{}]}  # fmt: skip
    for name, cases in facts.items():
        lines = (pytestconfig.rootpath / "configs" / "model" / f"{name}.yaml").read_text().splitlines()
        (size,) = [line for line in lines if line.startswith("# Size:")]
        for case in cases:
            assert f"{parameters(shipped(pytestconfig, name, **{'in_channels': 3, **case})):,}" in size


@pytest.mark.parametrize("name", ["edsr", "dncnn"])
def test_the_published_networks_go_forward_and_backward_on_the_meta_device(pytestconfig, name):
    model = shipped(pytestconfig, name, in_channels=3, upscale=1 if name == "dncnn" else 2)
    output = model(torch.empty(2, 3, 24, 24, device="meta"))
    assert output.shape == (2, 3, 24, 24) if name == "dncnn" else (2, 3, 48, 48)
    output.sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


@each("upscale", [1, 2, 3, 4, 8])
@each("interpolated", [False, True])
def test_edsr_enlarges_pictures_of_any_shape(upscale, interpolated):
    model = edsr(in_channels=3, upscale=upscale, blocks=1, width=4, interpolated=interpolated)
    for height, width in ((1, 1), (5, 7)):
        assert model(torch.rand(2, 3, height, width)).shape == (2, 3, upscale * height, upscale * width)


def test_edsr_begins_as_the_bicubic_enlargement_where_it_is_told_to_and_every_parameter_has_a_gradient():
    model, pictures = edsr(in_channels=3, upscale=2, blocks=2, width=8, interpolated=True), torch.rand(2, 3, 9, 9)
    output = model(pictures)
    assert (output - Enlarged(2)(pictures)).abs().max() < 0.02
    output.square().mean().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_residual_blocks_add_their_scaled_change():
    torch.manual_seed(0)
    full = edsr(in_channels=1, blocks=1, width=4)
    scaled = copy.deepcopy(full)
    scaled.body[0].scale = 0.25
    x = torch.rand(1, 4, 5, 5)
    assert torch.allclose(scaled.body[0](x) - x, 0.25 * (full.body[0](x) - x), atol=1e-6)


def test_edsr_has_no_normalisation_and_one_convolution_for_each_doubling():
    model = edsr(in_channels=3, upscale=8, blocks=2, width=4)
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [module.upscale_factor for module in model.modules() if isinstance(module, nn.PixelShuffle)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_enlargement_of_half_pictures_is_in_full_precision(given, made):
    pictures = torch.rand(2, 3, 6, 5).to(given)
    expected = F.interpolate(pictures.double(), scale_factor=2, mode="bicubic", antialias=True)
    assert Enlarged(2)(pictures).dtype == Enlarged(1)(pictures).dtype == made
    assert torch.allclose(Enlarged(2)(pictures).double(), expected, atol=1e-6)
    assert torch.equal(Enlarged(1)(pictures), pictures.to(made))


def test_a_constant_picture_stays_what_it_is_when_enlarged():
    assert torch.allclose(Enlarged(4)(torch.full((1, 1, 3, 3), 0.7)), torch.full((1, 1, 12, 12), 0.7), atol=1e-6)


def test_dncnn_takes_away_what_its_convolutions_say_is_noise_and_begins_with_nearly_none():
    model, pictures = dncnn(in_channels=3, depth=4, width=8), torch.rand(4, 3, 9, 7)
    output = model(pictures)
    assert torch.allclose(output, pictures - model.noise(pictures))
    assert 0 < (output - pictures).abs().max() < 0.2
    kinds = [type(layer).__name__ for layer in model.noise]
    assert kinds == ["Conv2d", "ReLU", *["Conv2d", "BatchNorm2d", "ReLU"] * 2, "Conv2d"]


def test_dncnn_is_no_network_for_enlarging():
    with pytest.raises(ConfigError, match="2 times as large") as caught:
        dncnn(in_channels=3, upscale=2)
    assert "dataset.degradation=noise" in caught.value.problems[0].hint
