"""Small classifiers and losses with one planted fault of numerics each, for configurations to name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mptrain.task.classify import Classify

WIDTH = 32


@dataclass(frozen=True)
class LossInLogitsDtype(Classify):
    """Cross-entropy in whatever dtype the logits have; only its result is float32."""

    def _cross_entropy(self, logits, targets):
        with torch.autocast(logits.device.type, enabled=False):
            return F.cross_entropy(logits, targets).float()


def _function(change):
    """The identity, whose backward changes gradients."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given.clone()

        @staticmethod
        def backward(ctx, grad):
            return change(grad)

    return Changed


class Changes(nn.Module):
    """The identity, whose backward changes gradients."""

    def __init__(self, change):
        super().__init__()
        self.function = _function(change)

    def forward(self, given):
        return self.function.apply(given)


def clip(grad):
    return grad.clamp(-1e-2, 1e-2)


def add_constant(grad):
    return grad + 1e-4


def clip_in_half(grad):
    return grad.clamp(-1.0, 1.0) if grad.dtype == torch.float16 else grad


def keep_three_bits_in_half(grad):
    mantissa, exponent = torch.frexp(grad.float())
    return torch.ldexp((mantissa * 8).round() / 8, exponent).half() if grad.dtype == torch.float16 else grad


def shrink(grad):
    return (grad.float() * 2.0**-30).to(grad.dtype)


class TinyEpsilonNorm(nn.Module):
    """Divides by a deviation in the dtype that it is given."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-8

    def forward(self, given):
        centred = given - given.mean(1, keepdim=True)
        return centred / ((centred * centred).mean(1, keepdim=True) + self.eps).sqrt()


class Mask(nn.Module):
    """Attention over the pixels of a row of numbers whose mask is a large number.

    Args:
        how: ``fill``, ``where`` or ``buffer``.
    """

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inward = nn.Linear(1, 12)
        self.register_buffer("later", torch.triu(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 1), persistent=False)
        if how == "buffer":
            self.register_buffer("mask", torch.zeros(WIDTH, WIDTH).masked_fill(self.later, -1e9))

    def forward(self, given):
        query, key, value = self.inward(given.unsqueeze(2)).chunk(3, 2)
        scores = query @ key.transpose(1, 2)
        if self.how == "fill":
            scores = scores.masked_fill(self.later, -1e9)
        elif self.how == "where":
            scores = torch.where(self.later, -1e9, scores)
        else:
            scores = scores + self.mask
        return (scores.float().softmax(2).to(value.dtype) @ value).sum(2, dtype=torch.float32).to(given.dtype)


class Softmax(nn.Module):
    """Computed in the dtype that is given."""

    def forward(self, given):
        with torch.autocast(given.device.type, enabled=False):
            return given * given.softmax(1) * WIDTH


class Cancels(nn.Module):
    """Adds a number and takes it away again.

    Args:
        number: Which one.
        wide: Half precision is left before.
    """

    def __init__(self, number, *, wide):
        super().__init__()
        self.number = number
        self.wide = wide

    def forward(self, given):
        inside = given.float() if self.wide and given.dtype == torch.float16 else given
        return ((inside + self.number) - self.number).to(given.dtype)


class Grows(nn.Module):
    """Leaves the range of FP16 and comes back."""

    def forward(self, given):
        return given * 3e4 * 3e4 / 9e8


class Detaches(nn.Module):
    """Lets no gradient through."""

    def forward(self, given):
        return given.detach()


FAULTS = {
    "none": nn.Identity,
    "clip": lambda: Changes(clip),
    "constant": lambda: Changes(add_constant),
    "clip_in_half": lambda: Changes(clip_in_half),
    "three_bits": lambda: Changes(keep_three_bits_in_half),
    "shrink": lambda: Changes(shrink),
    "epsilon": TinyEpsilonNorm,
    "mask_fill": lambda: Mask("fill"),
    "mask_where": lambda: Mask("where"),
    "mask_buffer": lambda: Mask("buffer"),
    "softmax": Softmax,
    "cancels": lambda: Cancels(1000.0, wide=False),
    "cancels_in_fp32": lambda: Cancels(1e7, wide=True),
    "grows": Grows,
    "detaches": Detaches,
}


class Network(nn.Module):
    """Three linear layers with a fault between the first two.

    Args:
        features: Numbers of an image.
        num_classes: Length of the output.
        fault: One of `FAULTS`.
    """

    def __init__(self, features, num_classes, fault):
        super().__init__()
        self.first = nn.Linear(features, WIDTH)
        self.odd = FAULTS[fault]()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, num_classes)

    def forward(self, images):
        hidden = self.odd(self.first(images.flatten(1)))
        return self.last(torch.tanh(self.second(torch.tanh(hidden))))


def network(*, num_classes: int, in_channels: int, image_size: int, fault: str) -> nn.Module:
    return Network(in_channels * image_size**2, num_classes, fault)
