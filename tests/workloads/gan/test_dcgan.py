from __future__ import annotations

import copy
import math

import pytest
import torch
from loops import each
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.gan.models.dcgan import dcgan

SIZES = (8, 16, 32, 64, 128)


def layers(network, *kinds):
    return [layer for layer in network if isinstance(layer, kinds)]


@each("size", SIZES)
@each("channels", [1, 3])
def test_noise_becomes_images_from_minus_1_to_1_and_images_become_logits(size, channels):
    model = dcgan(in_channels=channels, image_size=size, latent=7, width=4)
    drawn = model.generator(torch.randn(5, 7))
    assert drawn.shape == (5, channels, size, size)
    assert drawn.abs().max() <= 1
    logits = model.discriminator(drawn)
    assert logits.shape == (5,)
    assert logits.unique().numel() == 5
    assert model.eval().discriminator(drawn[:1]).shape == (1,)


def test_calling_the_whole_draws_images():
    model = dcgan(in_channels=1, image_size=16, latent=7, width=4).eval()
    noise = torch.randn(3, 7)
    assert torch.equal(model(noise), model.generator(noise))


def test_at_64_pixels_the_widths_are_those_of_the_paper():
    model = dcgan(in_channels=3, image_size=64, width=128)
    upward = [layer.out_channels for layer in layers(model.generator, nn.ConvTranspose2d)]
    assert model.latent == layers(model.generator, nn.ConvTranspose2d)[0].in_channels == 100
    assert upward == [1024, 512, 256, 128, 3]
    downward = [layer.out_channels for layer in layers(model.discriminator, nn.Conv2d)]
    assert downward == [128, 256, 512, 1024, 1]


@pytest.mark.parametrize(
    ("width", "generator", "discriminator"),
    [
        # PyTorch's examples/dcgan has the width 64 and no biases at all: 3,576,704 and 2,765,568.
        (64, 3_576_704 + 3, 2_765_568 + 64 + 1),
        # The paper's figure 1: 4x4 kernels instead of its 5x5, as in every program since.
        (128, 12_658_435, 11_036_289),
    ],
)
def test_at_64_pixels_in_colour_there_are_as_many_parameters_as_in_the_programs_of_the_field(
    pytestconfig, width, generator, discriminator
):
    with torch.device("meta"):
        model = dcgan(in_channels=3, image_size=64, width=width)
    counts = [sum(parameter.numel() for parameter in child.parameters()) for child in model.children()]
    assert counts == [generator, discriminator]
    file = (pytestconfig.rootpath / "configs" / "model" / "dcgan64.yaml").read_text()
    assert (f"{generator:,} + {discriminator:,} parameters" in file) == (f"width: {width} " in file) == (width == 128)
    loss = model.discriminator(model.generator(torch.empty(2, 100, device="meta"))).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_every_convolution_has_batchnorm_and_no_bias_but_the_generators_last_and_the_discriminators_first_and_last():
    model = dcgan(in_channels=1, image_size=32, width=4)
    for network, bare in ((model.generator, {-1}), (model.discriminator, {0, -1})):
        convolutions = [n for n, layer in enumerate(network) if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
        without = {convolutions[n] for n in bare}
        for n in convolutions:
            assert isinstance(network[n + 1], nn.BatchNorm2d) == (n not in without)
            assert (network[n].bias is not None) == (n in without)


def test_the_generator_has_relu_and_ends_in_tanh_the_discriminator_has_leaky_relu_and_ends_in_logits():
    model = dcgan(in_channels=1, image_size=32, width=4)
    assert len(layers(model.generator, nn.ReLU)) == 3
    assert isinstance(model.generator[-1], nn.Tanh)
    assert not layers(model.generator, nn.LeakyReLU)
    assert [layer.negative_slope for layer in layers(model.discriminator, nn.LeakyReLU)] == [0.2, 0.2, 0.2]
    assert not layers(model.discriminator, nn.Sigmoid, nn.Tanh, nn.ReLU)
    assert not [layer for layer in model.modules() if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d | nn.Linear)]


def test_weights_are_drawn_around_0_and_gains_around_1_with_a_deviation_of_002_and_biases_are_0():
    model = dcgan(in_channels=3, image_size=64, width=32)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
            centre = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            weight = module.weight.detach().double()
            error = 6 / math.sqrt(weight.numel())  # six standard errors
            assert abs(weight.mean().item() - centre) < 0.02 * error
            assert abs(weight.std().item() / 0.02 - 1) < error
            assert module.bias is None or not module.bias.any()


def test_both_networks_are_children_without_a_parameter_in_common():
    model = dcgan(in_channels=1, image_size=16, width=4)
    assert [name for name, _ in model.named_children()] == ["generator", "discriminator"]
    of = {name: {id(p) for p in child.parameters()} for name, child in model.named_children()}
    assert of["generator"]
    assert of["discriminator"]
    assert not of["generator"] & of["discriminator"]
    assert of["generator"] | of["discriminator"] == {id(p) for p in model.parameters()}


def test_a_copy_draws_the_same():
    model = dcgan(in_channels=1, image_size=16, latent=5, width=4).eval()
    noise = torch.randn(2, 5)
    assert torch.equal(copy.deepcopy(model)(noise), model(noise))


@pytest.mark.parametrize(("size", "nearest"), [(28, 32), (4, 8), (100, 128), (224, 128)])
def test_a_size_that_is_no_such_power_of_two_is_refused_with_the_nearest_that_is(size, nearest):
    with pytest.raises(ConfigError, match=f"dataset.image_size={size}") as caught:
        dcgan(in_channels=1, image_size=size)
    assert f"dataset.image_size={nearest}" in caught.value.problems[0].hint
