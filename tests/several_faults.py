"""Small classifiers with several faults of numerics at once, for configurations to name."""

from __future__ import annotations

import torch
from torch import nn

from tests.faulty_networks import Louder, RootMeanSquareNorm, Scale, named

WIDTH = 32

#: Words that make a configuration's model one of these.
SEVERAL = (
    "model._target_=tests.several_faults.network",
    "extensions.allow=[tests.several_faults]",
    "~model.widths",
    "dataset.image_size=8",
    "dataset.train_samples=64",
    "train.batch_size=16",
)


class Shares(nn.Module):
    """Divides groups of four by their sums and an epsilon that FP16 does not hold: NaN where all four are zero."""

    def forward(self, given):
        groups = given.relu().view(len(given), -1, 4)
        return (groups / (groups.sum(2, keepdim=True) + 1e-12)).flatten(1)


class Masked(nn.Module):
    """A softmax behind a mask of -inf in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.where(torch.arange(WIDTH) % 2 == 0, 0.0, -torch.inf))

    def forward(self, given):
        return WIDTH * (given.float() + self.mask.float()).softmax(1).to(given.dtype)


def block():
    return named(inward=nn.Linear(WIDTH, WIDTH), shares=Shares(), outward=nn.Linear(WIDTH, WIDTH))


def large(factor):
    made = nn.Linear(WIDTH, WIDTH)
    made.weight.data.mul_(factor)
    return made


def network(*, num_classes: int, in_channels: int, image_size: int, kind: str) -> nn.Module:
    """An image classifier.

    Args:
        num_classes: Length of the output.
        in_channels: Of an image.
        image_size: Of an image.
        kind: ``dead_and_loud``: zeros of a norm whose mean square overflows, and gradients that do, at another place. ``many``: one
            fault in nine modules of one class. ``twice``: two modules of different classes whose outputs are infinite. ``masked``: no fault.
    """
    middle = {
        "dead_and_loud": lambda: named(
            gain=Scale(2.0**9), norm=RootMeanSquareNorm(), after=nn.Linear(WIDTH, WIDTH),
            quiet=Louder(2.0**-15), loud=Louder(2.0**15),
        ),
        "masked": Masked,
        "many": lambda: nn.Sequential(*[block() for _ in range(9)]),
        "twice": lambda: named(
            first=named(wide=large(2.0**18), norm=nn.LayerNorm(WIDTH)),
            second=named(gain=Scale(2.0**9), norm=RootMeanSquareNorm()),
        ),
    }[kind]()  # fmt: skip
    inward, outward = nn.Linear(in_channels * image_size**2, WIDTH), nn.Linear(WIDTH, num_classes)
    return named(flat=nn.Flatten(), inward=inward, body=middle, outward=outward)
