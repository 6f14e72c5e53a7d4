"""Planted faults of numerics, one to a small classifier that configurations can name, and networks that are sound.

`FAULTS` says of each fault which module has it, what kind it is and what fixes it; `SOUND` has the words of networks in
which nothing is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from mptrain.workloads.classification.task import Classify
from mptrain.workloads.images.datasets.digits import load_digits

WIDTH = 32


@dataclass(frozen=True)
class LossInLogitsDtype(Classify):
    """Cross-entropy in whatever dtype the logits have; only its result is float32."""

    def _cross_entropy(self, logits, targets):
        with torch.autocast(logits.device.type, enabled=False):
            return F.cross_entropy(logits, targets).float()


@dataclass(frozen=True)
class OffsetLoss(Classify):
    """Cross-entropy of logits that are far from 0 in between, in whatever dtype they have."""

    def _cross_entropy(self, logits, targets):
        with torch.autocast(logits.device.type, enabled=False):
            return F.cross_entropy((logits + 300) * 300 / 300, targets).float()


@dataclass(frozen=True)
class LogarithmInEvaluation(Classify):
    """Measures a logarithm of differences, of which some are negative."""

    def measure(self, model, batch):
        found = super().measure(model, batch)
        return {**found, "loss": torch.log(found["loss"] - found["loss"].max() - 1)}


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
    return (grad.float() * 2.0**-36).to(grad.dtype)


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


class Scale(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, given):
        return given * self.factor


class Louder(nn.Module):
    """The identity, whose backward multiplies gradients by a number."""

    def __init__(self, factor):
        super().__init__()
        self.function = _function(lambda grad: grad * factor)

    def forward(self, given):
        return self.function.apply(given)


class RootMeanSquareNorm(nn.Module):
    """Divides by the root mean square in the dtype that it is given: zeros where the mean square is infinite."""

    def forward(self, given):
        return given * (given.mul(given).mean(1, keepdim=True) + 1e-5).rsqrt()


class Normalise(nn.Module):
    """Divides groups of four by their norms, zeros by an epsilon."""

    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, given):
        groups = torch.relu(given).view(len(given), -1, 4)
        return (groups / torch.linalg.vector_norm(groups, dim=2, keepdim=True).clamp_min(self.eps)).flatten(1)


class NormOfZeros(nn.Module):
    """Divides groups of four by one more than their norms; the root's derivative at 0 is infinite."""

    def forward(self, given):
        groups = (given * (given > 0)).view(len(given), -1, 4)
        return (groups / (1 + (groups * groups).sum(2, keepdim=True).sqrt())).flatten(1)


class Divides(nn.Module):
    """Divides zeros by zeros."""

    def forward(self, given):
        return torch.relu(given) / torch.relu(given)


class SumByHand(nn.Module):
    """Divides by one more than the mean square of many copies, as a sum divided by their number."""

    def forward(self, given):
        many = (given * given).repeat(1, 2**13)
        return 4 * given / (1 + many.sum(1, keepdim=True) / many.shape[1])


class ExpByHand(nn.Module):
    """A softmax that does not take the maximum away."""

    def forward(self, given):
        grown = torch.exp(8 * given)
        return WIDTH * grown / grown.sum(1, keepdim=True)


class LargeLogits(nn.Module):
    """Attention over the numbers of a row whose logits reach far beyond 65504."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(1, 12)

    def forward(self, given):
        query, key, value = self.inward(given.unsqueeze(2)).chunk(3, 2)
        with torch.no_grad():  # of frozen projections: gradients go through the values alone
            shares = (400 * query @ (400 * key).transpose(1, 2)).softmax(2)
        return given + (shares @ value).mean(2)


class ThrownAway(nn.Module):
    """Leaves the range of FP16 in values that it does not use; their gradients are zero by infinity."""

    def forward(self, given):
        large = (given * 1000) * (given * 1000)
        return torch.where(large < 10, large * large * 1e-2, given)


class CastsToHalf(nn.Module):
    """Leaves the range of FP16 and casts to it, whatever the precision is."""

    def forward(self, given):
        return torch.tanh((given * 2.0**18).half()).to(given.dtype) + given


def tiny_directions():
    """A linear layer with weight normalisation whose directions vanish in FP16, as a checkpoint may have them."""
    made = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        made.parametrizations.weight.original1.mul_(1e-8)
    return made


class PaddedRows(nn.Module):
    """Attention over the numbers of rows of different lengths, some of length 0; the mask is FP32's lowest number."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(1, 12)

    def forward(self, given):
        query, key, value = self.inward(given.unsqueeze(2)).chunk(3, 2)
        lengths = torch.arange(len(given)) % 9 * 4
        padding = torch.arange(WIDTH) >= lengths[:, None]
        bias = torch.zeros(padding.shape).masked_fill(padding, torch.finfo(torch.float32).min)
        scores = query @ key.transpose(1, 2) / 2 + bias[:, None].to(query.dtype)
        return given + (scores.softmax(2).to(value.dtype) @ value).mean(2)


class Whiten(nn.Module):
    """Decorrelates the columns of a batch by the Cholesky factor of their covariance, which torch has in FP32 alone."""

    def forward(self, given):
        centred = given - given.mean(0)
        unit = torch.eye(given.shape[1], dtype=given.dtype, device=given.device)
        factor = torch.linalg.cholesky(centred.T @ centred / len(given) + 0.1 * unit)
        return torch.linalg.solve_triangular(factor, centred.T, upper=False).T


@dataclass(frozen=True)
class SummedLoss(Classify):
    """A loss that is a sum over many terms instead of their mean."""

    def _cross_entropy(self, logits, targets):
        return 1e7 * super()._cross_entropy(logits, targets)


@dataclass(frozen=True)
class BendingLoss(Classify):
    """Cross-entropy and second differences of neighbours that are nearly equal, in the dtype of the logits."""

    def _cross_entropy(self, logits, targets):
        smooth = 1 + 1e-3 * logits
        bend = (smooth[:, 2:] - 2 * smooth[:, 1:-1] + smooth[:, :-2]) * 70000
        return super()._cross_entropy(logits, targets) + 1e-4 * bend.float().square().mean()


@functools.wraps(load_digits)
def raw_digits(*args, **kwargs):
    """Images in units in which people have their measurements: far from 0, and beyond the range of FP16."""
    made = load_digits(*args, **kwargs)
    prepare = made.prepare

    def raw(batch, device, memory_format):
        prepared = prepare(batch, device, memory_format)
        return replace(prepared, inputs=prepared.inputs * 1e3 + 1e6)

    made.prepare = raw
    return made


def steer(grad):
    return grad / (torch.linalg.vector_norm(grad.float()) + 1e-6).to(grad.dtype)


def large_linear():
    made = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        made.weight.mul_(2.0**18)
    return made


def named(**modules):
    """Modules one behind the other, by name."""
    made = nn.Sequential()
    for name, module in modules.items():
        made.add_module(name, module)
    return made


@dataclass(frozen=True)
class Fault:
    """A module between the first two layers of `Network` with one fault of numerics, or none.

    Attributes:
        make: Makes the module, ``odd``.
        kind: The fault, for people.
        where: The module at fault, by its qualified name.
        kept: The modules that fix it where they are named in ``precision.keep_fp32``.
        precision: Another precision that fixes it where those cannot.
        in_fp32: FP32 has the fault as well: it is no matter of precision.
        harms: Training in FP16 does not come to what FP32 comes to.
    """

    make: Callable[[], nn.Module]
    kind: str = ""
    where: str = "odd"
    kept: tuple[str, ...] = ()
    precision: str = ""
    in_fp32: bool = False
    harms: bool = True


FAULTS = {
    "none": Fault(nn.Identity, harms=False),
    "close": Fault(lambda: named(loud=Scale(2.0**14), quiet=Scale(2.0**-14)), "nothing yet", harms=False),
    # An operator of the forward pass leaves FP16's range.
    "large_linear": Fault(
        lambda: named(wide=large_linear(), norm=nn.LayerNorm(WIDTH)), "infinite output", "odd.wide", kept=("odd",)
    ),
    "beside_softmax": Fault(
        lambda: named(soft=Softmax(), wide=large_linear(), norm=nn.LayerNorm(WIDTH)),
        "infinite output behind a harmless softmax in half",
        "odd.wide",
        kept=("odd",),
    ),
    "grows": Fault(Grows, "infinite output within one module", kept=("odd",)),
    "large_logits": Fault(LargeLogits, "attention logits above 65504", kept=("odd",)),
    "sum_by_hand": Fault(SumByHand, "a sum over many values", kept=("odd",)),
    "exp_by_hand": Fault(ExpByHand, "exp overflows", kept=("odd",)),
    "thrown_away": Fault(ThrownAway, "infinities that are not used, and NaN gradients", kept=("odd",)),
    "rms_norm": Fault(
        lambda: named(loud=Scale(2.0**9), norm=RootMeanSquareNorm()),
        "an infinite mean square that makes zeros: finite and dead",
        "odd.norm",
        kept=("odd.norm",),
    ),
    # Constants that FP16 does not hold.
    "epsilon": Fault(TinyEpsilonNorm, "an epsilon that vanishes", kept=("odd",), harms=False),
    "normalise": Fault(lambda: Normalise(1e-12), "an epsilon that vanishes: zero by zero", kept=("odd",)),
    "mask_fill": Fault(lambda: Mask("fill"), "a mask of -1e9", kept=("odd",)),
    "mask_where": Fault(lambda: Mask("where"), "a mask of -1e9", kept=("odd",), harms=False),
    "mask_buffer": Fault(lambda: Mask("buffer"), "a mask of -1e9 in a buffer", kept=("odd",), harms=False),
    # Precision and casts.
    "softmax": Fault(Softmax, "a softmax in half", kept=("odd",), harms=False),
    "cancels": Fault(lambda: Cancels(1000.0, wide=False), "cancellation", kept=("odd",), harms=False),
    "casts": Fault(CastsToHalf, "a cast to FP16 in whatever precision", in_fp32=True, harms=False),
    # Gradients and their scale.
    "small_between": Fault(
        lambda: named(first=Louder(2.0**40), then=Louder(2.0**-40)),
        "gradients need a scale at which others overflow",
        "odd.then",
        kept=("odd",),
    ),
    "large_between": Fault(
        lambda: named(first=Louder(2.0**-24), then=Louder(2.0**24)),
        "gradients overflow at every scale",
        "odd.then",
        kept=("odd",),
    ),
    "clip": Fault(lambda: Changes(clip), "gradients that do not follow the scale: a clip", precision="bf16"),
    "steer": Fault(lambda: Changes(steer), "gradients that do not follow the scale: a norm", precision="bf16"),
    "constant": Fault(
        lambda: Changes(add_constant), "gradients that do not follow the scale", precision="bf16", harms=False
    ),
    "clip_in_half": Fault(
        lambda: Changes(clip_in_half), "gradients in half that do not follow the scale", kept=("odd",)
    ),
    "three_bits": Fault(
        lambda: Changes(keep_three_bits_in_half), "a backward pass in few bits", kept=("odd",), harms=False
    ),
    "shrink": Fault(lambda: Changes(shrink), "gradients of nothing", in_fp32=True),
    # No matters of precision.
    "sqrt_at_zero": Fault(NormOfZeros, "NaN gradients in FP32 as well", in_fp32=True),
    "divides": Fault(Divides, "a loss that is not finite in FP32 as well", in_fp32=True),
    "cancels_in_fp32": Fault(lambda: Cancels(1e7, wide=True), "cancellation in FP32", in_fp32=True),
    "detaches": Fault(Detaches, "no gradient", in_fp32=True),
}

#: Modules of small inputs as people have them; `INPUTS` has their words.
ODD = {"tiny_directions": Fault(tiny_directions), "padded_rows": Fault(PaddedRows), "whiten": Fault(Whiten)}

_OWN = ("extensions.allow=[tests.faulty_networks]", "~model.widths", "dataset.image_size=8")

#: The words of networks in which nothing is wrong.
SOUND = {
    "mlp": ("model=mlp", "dataset.image_size=8"),
    "cnn": ("model=cnn",),
    "layer_scale": (*_OWN, "model._target_=tests.faulty_networks.small_convnext"),
    "plain16": ("model=plain16", "model.width=8"),
    "resnet18": ("model=resnet18", "dataset.image_size=16"),
    "transformer": ("model=transformer", "train.batch_size=2", "model.dropout=0.1"),
    "word_lstm": ("model=word_lstm", "train.batch_size=4", "dataset.sequence_length=16", "model.embedding_size=16"),
    **{
        name: ("model=torchvision", f"model.name={name}", f"dataset.image_size={size}")
        for name, size in {
            "convnext_tiny": 32,
            "vit_b_16": 32,
            "mobilenet_v3_small": 32,
            "efficientnet_b0": 32,
            "densenet121": 32,
            "regnet_y_400mf": 32,
            "shufflenet_v2_x0_5": 32,
            "resnet18": 32,
            "squeezenet1_1": 32,
            "mnasnet0_5": 32,
        }.items()
    },
}


def with_fault(fault):
    """The words of a network with a fault."""
    return (*_OWN, "model._target_=tests.faulty_networks.network", f"+model.fault={fault}")


#: The words of small inputs as people have them, in which nothing is wrong in FP32.
INPUTS = {
    **{name: with_fault(name) for name in ODD},
    "summed_loss": (*with_fault("none"), "task._target_=tests.faulty_networks.SummedLoss"),
    "raw_columns": (
        *_OWN,
        "model._target_=tests.faulty_networks.standardising_network",
        "dataset._target_=tests.faulty_networks.raw_digits",
    ),
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
        self.odd = {**FAULTS, **ODD}[fault].make()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, num_classes)

    def forward(self, images):
        hidden = self.odd(self.first(images.flatten(1)))
        return self.last(torch.tanh(self.second(torch.tanh(hidden))))


def network(*, num_classes: int, in_channels: int, image_size: int, fault: str) -> nn.Module:
    return Network(in_channels * image_size**2, num_classes, fault)


class Whole(nn.Module):
    """A network in one module: no entry of ``precision.keep_fp32`` leaves a product in half precision.

    Args:
        compute: What happens between its two layers.
    """

    def __init__(self, features, num_classes, compute):
        super().__init__()
        self.inward, self.outward, self.compute = nn.Linear(features, WIDTH), nn.Linear(WIDTH, num_classes), compute

    def forward(self, images):
        return self.outward(self.compute(self.inward(images)))


def cancelling_whole(*, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    whole = Whole(in_channels * image_size**2, num_classes, lambda hidden: (hidden * 0.01 + 1000) - 1000)
    return named(flat=nn.Flatten(), whole=whole)


def standardising_network(*, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    features = in_channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(features), Network(features, num_classes, "none"))


def small_convnext(*, num_classes: int, in_channels: int, layer_scale: float = 1e-6) -> nn.Module:
    """Blocks whose outputs are multiplied by ``layer_scale`` to begin with, and their gradients with them."""
    settings = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    model = ConvNeXt(settings, layer_scale=layer_scale, num_classes=num_classes)
    model.features[0][0] = nn.Conv2d(in_channels, 16, 2, stride=2)
    return model
