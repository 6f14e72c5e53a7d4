"""DCGAN (Radford, Metz and Chintala 2016): a convolutional generator and a convolutional discriminator."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override

from mptrain.system.errors import ConfigError
from mptrain.system.fields import PositiveInt

#: Supported image sides: one to five doublings of the 4x4 pixels after the generator's first layer.
SIZES = (8, 16, 32, 64, 128)

#: Standard deviation of initial weights (Radford et al., section 4).
DEVIATION = 0.02

#: Negative slope of the discriminator's LeakyReLU (Radford et al., section 4).
SLOPE = 0.2


class DCGAN(nn.Module):
    """DCGAN generator and discriminator of images, for adversarial training with one optimizer each.

    The networks are those of Radford et al. at any power of two from 8 to 128 pixels (others raise `ConfigError`); the
    paper uses 64x64 pixels and a width of 128. ``width`` is the number of channels at half the image's size, doubled at
    each further halving. The generator maps noise ``[N, latent]`` to images
    ``[N, in_channels, image_size, image_size]`` from -1 to 1, the discriminator images to one logit each, ``[N]``,
    above 0 for images classified as real.
    """

    def __init__(
        self, *, in_channels: int, image_size: int, latent: PositiveInt = 100, width: PositiveInt = 64
    ) -> None:
        super().__init__()
        if image_size not in SIZES:
            raise ConfigError(
                f"dataset.image_size={image_size}: dcgan repeatedly doubles 4 pixels, which never gives {image_size}",
                f"set dataset.image_size={min(SIZES, key=lambda size: abs(size - image_size))}; "
                f"dcgan supports {', '.join(map(str, SIZES))}",
            )
        self.latent = latent
        widths = [width * 2**halving for halving in range(SIZES.index(image_size) + 1)]
        self.generator = _generator(in_channels, latent, widths)
        self.discriminator = _discriminator(in_channels, widths)
        self.apply(_draw_weights)

    @override
    def forward(self, noise: Tensor) -> Tensor:
        """Generate one image for each noise vector; the discriminator is not used."""
        images: Tensor = self.generator(noise)
        return images


#: Name of the model in configurations.
dcgan = DCGAN


def _generator(channels: int, latent: int, widths: list[int]) -> nn.Sequential:
    """Return transposed convolutions; all but the first double the side, all but the last have BatchNorm and ReLU."""
    deepest = widths[-1]
    layers: list[nn.Module] = [
        nn.Unflatten(1, (latent, 1, 1)),
        nn.ConvTranspose2d(latent, deepest, 4, bias=False),  # BatchNorm subtracts a bias
        nn.BatchNorm2d(deepest),
        nn.ReLU(),
    ]
    for inward, outward in pairwise(reversed(widths)):
        layers += [
            nn.ConvTranspose2d(inward, outward, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outward),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(widths[0], channels, 4, stride=2, padding=1), nn.Tanh())


def _discriminator(channels: int, widths: list[int]) -> nn.Sequential:
    """Return convolutions; all but the last halve the side, all but the first and the last have BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
    for inward, outward in pairwise(widths):
        layers += [
            nn.Conv2d(inward, outward, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outward),
            nn.LeakyReLU(SLOPE),
        ]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten(0))


def _draw_weights(module: nn.Module) -> None:
    """Initialise weights around 0 and BatchNorm gains around 1, as in the authors' code, and biases to 0."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
        nn.init.normal_(module.weight, mean=float(isinstance(module, nn.BatchNorm2d)), std=DEVIATION)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
