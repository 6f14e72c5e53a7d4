from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mptrain.config.compose import compose
from mptrain.system.errors import ConfigError
from mptrain.workloads.enhancement.models.dncnn import dncnn
from mptrain.workloads.enhancement.models.edsr import Enlarged, edsr
from tests.loops import each


@pytest.mark.parametrize(
    ("name", "facts", "count"),
    [
        # The authors' program in PyTorch: 1.37, 1.55 and 1.52 million, and 40.7, 43.7 and 43.1 million.
        ("edsr_baseline", {"upscale": 2}, 1_369_859),
        ("edsr_baseline", {"upscale": 3}, 1_554_499),
        ("edsr_baseline", {"upscale": 4}, 1_517_571),
        ("edsr", {"upscale": 2}, 40_729_603),
        ("edsr", {"upscale": 3}, 43_680_003),
        ("edsr", {"upscale": 4}, 43_089_923),
        # "0.56 million" of the authors' program in PyTorch, whose last layers have no bias either.
        ("dncnn", {"in_channels": 1}, 556_096),
    ],
)
def test_parameters_are_as_many_as_in_the_authors_program(name, facts, count):
    with torch.device("meta"):
        model = compose((f"model={name}",)).model.build(**{"in_channels": 3, **facts})
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@each("upscale", [1, 2, 3, 4, 8])
@each("interpolated", [False, True])
def test_edsr_enlarges_pictures_of_any_shape(upscale, interpolated):
    model = edsr(in_channels=3, upscale=upscale, blocks=1, width=4, interpolated=interpolated)
    for height, width in ((1, 1), (5, 7)):
        assert model(torch.rand(2, 3, height, width)).shape == (2, 3, upscale * height, upscale * width)


def test_edsr_begins_as_the_bicubic_enlargement_if_told_to():
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


def test_edsr_has_no_normalisation_and_shuffles_to_double():
    model = edsr(in_channels=3, upscale=8, blocks=2, width=4)
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [module.upscale_factor for module in model.modules() if isinstance(module, nn.PixelShuffle)] == [2, 2, 2]


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_enlargement_is_at_least_in_full_precision(given):
    made, pictures = torch.promote_types(given, torch.float32), torch.rand(2, 3, 6, 5).to(given)
    expected = F.interpolate(pictures.double(), scale_factor=2, mode="bicubic", antialias=True)
    assert Enlarged(2)(pictures).dtype == Enlarged(1)(pictures).dtype == made
    assert torch.allclose(Enlarged(2)(pictures).double(), expected, atol=1e-6)
    assert torch.equal(Enlarged(1)(pictures), pictures.to(made))


def test_dncnn_takes_away_noise_and_enlarges_nothing():
    model, pictures = dncnn(in_channels=3, depth=4, width=8), torch.rand(4, 3, 9, 7)
    output = model(pictures)
    assert torch.allclose(output, pictures - model.noise(pictures))
    assert 0 < (output - pictures).abs().max() < 0.2
    kinds = [type(layer).__name__ for layer in model.noise]
    assert kinds == ["Conv2d", "ReLU", *["Conv2d", "BatchNorm2d", "ReLU"] * 2, "Conv2d"]
    with pytest.raises(ConfigError, match="2 times as large") as caught:
        dncnn(in_channels=3, upscale=2)
    assert "dataset.degradation=noise" in caught.value.problems[0].hint
