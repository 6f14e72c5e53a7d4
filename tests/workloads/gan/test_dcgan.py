from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mptrain.system.errors import ConfigError
from mptrain.workloads.gan.models.dcgan import dcgan
from tests.loops import each

SIZES = (8, 16, 32, 64, 128)


def layers(network, *kinds):
    return [layer for layer in network if isinstance(layer, kinds)]


@each("size", SIZES)
@each("channels", [1, 3])
def test_noise_becomes_images_and_images_become_logits(size, channels):
    model = dcgan(in_channels=channels, image_size=size, latent=7, width=4)
    drawn = model.generator(torch.randn(5, 7))
    assert drawn.shape == (5, channels, size, size)
    assert drawn.abs().max() <= 1
    logits = model.discriminator(drawn)
    assert logits.shape == (5,)
    assert logits.unique().numel() == 5
    assert model.eval().discriminator(drawn[:1]).shape == (1,)


@pytest.mark.parametrize(
    ("width", "generator", "discriminator"),
    [
        # PyTorch's examples/dcgan has the width 64 and no biases at all: 3,576,704 and 2,765,568.
        (64, 3_576_704 + 3, 2_765_568 + 64 + 1),
        # The paper's figure 1: 4x4 kernels instead of its 5x5, as in every program since.
        (128, 12_658_435, 11_036_289),
    ],
)
def test_at_64_pixels_sizes_are_those_of_the_field(width, generator, discriminator):
    with torch.device("meta"):
        model = dcgan(in_channels=3, image_size=64, width=width)
    counts = [sum(parameter.numel() for parameter in child.parameters()) for child in model.children()]
    assert counts == [generator, discriminator]
    upward, downward = layers(model.generator, nn.ConvTranspose2d), layers(model.discriminator, nn.Conv2d)
    assert model.latent == upward[0].in_channels == 100
    assert [layer.out_channels for layer in upward] == [8 * width, 4 * width, 2 * width, width, 3]
    assert [layer.out_channels for layer in downward] == [width, 2 * width, 4 * width, 8 * width, 1]
    model.discriminator(model.generator(torch.empty(2, 100, device="meta"))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layers_are_those_of_the_paper():
    """BatchNorm but behind the generator's last convolution and the discriminator's first and last, which have biases."""
    model = dcgan(in_channels=1, image_size=32, width=4)
    for network, bare in ((model.generator, {-1}), (model.discriminator, {0, -1})):
        convolutions = [n for n, layer in enumerate(network) if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
        without = {convolutions[n] for n in bare}
        for n in convolutions:
            assert isinstance(network[n + 1], nn.BatchNorm2d) == (n not in without)
            assert (network[n].bias is not None) == (n in without)
    assert len(layers(model.generator, nn.ReLU)) == 3
    assert isinstance(model.generator[-1], nn.Tanh)
    assert not layers(model.generator, nn.LeakyReLU)
    assert [layer.negative_slope for layer in layers(model.discriminator, nn.LeakyReLU)] == [0.2, 0.2, 0.2]
    assert not layers(model.discriminator, nn.Sigmoid, nn.Tanh, nn.ReLU)
    assert not [layer for layer in model.modules() if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d | nn.Linear)]
    assert [name for name, _ in model.named_children()] == ["generator", "discriminator"]
    noise = torch.randn(3, model.latent)
    assert torch.equal(model.eval()(noise), model.generator(noise))


def test_weights_and_gains_are_drawn_with_a_deviation_of_002():
    model = dcgan(in_channels=3, image_size=64, width=32)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
            centre = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            weight = module.weight.detach().double()
            error = 6 / math.sqrt(weight.numel())  # six standard errors
            assert abs(weight.mean().item() - centre) < 0.02 * error
            assert abs(weight.std().item() / 0.02 - 1) < error
            assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize(("size", "nearest"), [(28, 32), (4, 8), (100, 128), (224, 128)])
def test_a_size_that_is_no_power_of_two_is_refused(size, nearest):
    with pytest.raises(ConfigError, match=f"dataset.image_size={size}") as caught:
        dcgan(in_channels=1, image_size=size)
    assert f"dataset.image_size={nearest}" in caught.value.problems[0].hint
