"""DCGAN (Radford, Metz and Chintala 2016): two convolutional networks, one that draws images and one that judges them.

Only the networks; what they are trained for is in the task.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from mptrain.errors import ConfigError
from mptrain.fields import PositiveInt

#: The sides that one to five doublings reach from the 4x4 pixels between the generator's first two layers.
SIZES = (8, 16, 32, 64, 128)

#: Standard deviation of initial weights (Radford et al., section 4).
DEVIATION = 0.02

#: Slope of the discriminator's rectifiers below zero (Radford et al., section 4).
SLOPE = 0.2


class DCGAN(nn.Module):
    """A generator and a discriminator that are trained against each other, each by a learner of its own.

    The networks of Radford et al. at any power of two from 8 to 128; theirs draw 64x64 pixels, with a width of 128.

    Args:
        in_channels: Channels of an image.
        image_size: Side of an image in pixels, one of `SIZES`.
        latent: Numbers that an image is drawn from.
        width: Channels at half the image's size; each halving doubles them.

    Attributes:
        latent: As given.
        generator: From noise ``[N, latent]`` to images ``[N, in_channels, image_size, image_size]`` from -1 to 1.
        discriminator: From such images to one logit each, ``[N]``: above 0 where it takes the image for a real one.

    Raises:
        ConfigError: The side is none of `SIZES`.
    """

    def __init__(
        self, *, in_channels: int, image_size: int, latent: PositiveInt = 100, width: PositiveInt = 64
    ) -> None:
        super().__init__()
        if image_size not in SIZES:
            raise ConfigError(
                f"dataset.image_size={image_size}: dcgan doubles 4 pixels a few times, which never makes {image_size}",
                f"write dataset.image_size={min(SIZES, key=lambda size: abs(size - image_size))}; "
                f"it takes {', '.join(map(str, SIZES))}",
            )
        self.latent = latent
        widths = [width * 2**halving for halving in range(SIZES.index(image_size) + 1)]
        self.generator = _generator(in_channels, latent, widths)
        self.discriminator = _discriminator(in_channels, widths)
        self.apply(_draw_weights)

    def forward(self, noise: Tensor) -> Tensor:
        """The images that the generator draws from noise ``[N, latent]``."""
        images: Tensor = self.generator(noise)
        return images


#: Its name in configurations.
dcgan = DCGAN


def _generator(channels: int, latent: int, widths: list[int]) -> nn.Sequential:
    """Transposed convolutions, each but the first doubling the side; BatchNorm and ReLU after all but the last."""
    deepest = widths[-1]
    layers: list[nn.Module] = [
        nn.Unflatten(1, (latent, 1, 1)),
        nn.ConvTranspose2d(latent, deepest, 4, bias=False),  # BatchNorm subtracts any bias again
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
    """Strided convolutions, each but the last halving the side; BatchNorm after all but the first and the last."""
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
    for inward, outward in pairwise(widths):
        layers += [
            nn.Conv2d(inward, outward, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outward),
            nn.LeakyReLU(SLOPE),
        ]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten(0))


def _draw_weights(module: nn.Module) -> None:
    """Normal weights around 0, and gains of BatchNorm around 1 as in the authors' program; no biases."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.BatchNorm2d):
        nn.init.normal_(module.weight, mean=float(isinstance(module, nn.BatchNorm2d)), std=DEVIATION)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
