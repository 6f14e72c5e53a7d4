"""Judges gradients that were computed at many loss scales: how wrong each module's are, and at which scales they are right.

Three things are measured of each parameter's gradient g(S) / S at a scale S, all as L2 norms:

- its *error*: how far it is from what an exact backward pass makes of the same half-precision forward pass;
- its *shift*: how far it is from what the highest scale at which it is finite gives. Multiplying by a power of two is exact,
  so where nothing underflows or overflows the shift is 0 to the last bit;
- what is *expected*: how far the exact gradient of the half-precision forward pass is from that without half precision. It
  may be large and is no fault: one ReLU that rounding turns off moves the gradients of all layers before it.

Measured of all modules of mlp, cnn, plain16, resnet18, dcgan, transformer, word_lstm and char_lstm in amp_static and fp16_static at
their first step: errors are at best scales 0.04 to 0.27 % (the most in plain16, sixteen layers deep; 0.30 % in tiny batches), half
of what `EPSILONS` allows; expected is 0.001 to 33 %; what a module says is off by at most 0.81 % (resnet18), 1.03 times what
rounding explains, and where it is off by less than 0.2 %, by at most 1.9 times.

Underflow may take more than rounding does (`LOST`). mlp and cnn were trained on digits for 200 steps at static scales so low that the
module that lost most lost a known share of its gradient at the first step. The mean loss of the last 40 steps, against FP32's, over
three seeds and AdamW: 3 % lost -1.0 to +0.2 %, 5 % lost +0.8 %, 8 % lost -0.2 %, 11 % lost +1.8 %, 16 % lost +1.7 %, 25 % lost +4 and
+8 %, 48 % lost +8 %, 85 % and more +25 % and worse; BF16 comes within 1.3 %. With SGD it varies by 3 % from seed to seed and shows
from 25 % on. `LOST` is the most that was seen to do nothing. A small network whose blocks are multiplied by 1e-6 loses 4.6 to 7.5 % of
the gradients in them at 2^16 and comes to the losses of FP32 within 0.1 %; so it does where all of them are lost, as the blocks hardly
matter yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mptrain.numerics.formats import FORMATS, Format
from mptrain.probe.observer import Operation

#: A relative error is right up to so many times the format's epsilon: 2^-7 for FP16.
EPSILONS = 8.0

#: A gradient is right, too, up to so many times what the half-precision forward pass makes of it, but for `MOST_EXPECTED`.
TIMES_EXPECTED = 2.0

#: A gradient that is off by half of its norm is wrong, whatever the forward pass makes of it. The first layer of plain16 is off by 7 %
#: at 2^12, by 37 % at 2^10, wholly at 2^8 and below. Over three seeds top1 on digits is 0.934, 0.939 and 0.940 (FP32 0.950) at these,
#: and 0.655 at 2^6, where one seed learns nothing.
MOST_EXPECTED = 0.5

#: An output is right up to so many times what rounding weights, inputs and all outputs makes of it.
TIMES_ROUNDED = 2.0

#: A gradient that has lost no more of its norm to underflow is as good for training: see `ModuleScaling.allowed_loss`.
LOST = 0.08

#: What underflow makes wrong falls by half with each doubling of the scale; by less where there is rounding besides.
FALLING = 1.5

#: From this relative error in FP32 on, a gradient is ill-conditioned, and no matter of half precision; and an output.
ILL_CONDITIONED = 2.0**-4
ILL_CONDITIONED_OUTPUT = 2.0**-7

#: A gradient so much smaller, element by element, than the largest of its network is zero but for rounding.
NOTHING = 2.0**-30


@dataclass(frozen=True)
class GradientErrors:
    """Measurements of the gradient of one parameter, or of all of a module's: L2 norms.

    Attributes:
        name: The parameter's, or the module's.
        elements: How many.
        reference: Norm of the gradient in FP64.
        fp32: Distance of the FP32 gradient from the exact gradient of the FP32 forward pass.
        expected: Distance that the exact gradient of the half-precision forward pass has from it.
        fp32_shift: Largest distance of an unscaled FP32 gradient from that at scale 1; 0 where scaling works, inf where one is
            not finite.
        errors: Distance from the exact gradient of the half-precision forward pass by the scale's exponent; inf where the
            gradient is not finite.
        shifts: Distance from the gradient at the highest finite scale, likewise.
    """

    name: str
    elements: int
    reference: float
    fp32: float
    expected: float
    fp32_shift: float
    errors: Mapping[int, float]
    shifts: Mapping[int, float]


@dataclass(frozen=True)
class ModuleScaling(GradientErrors):
    """A module's gradients over all scales: those of all its own parameters together, relative to their norm in FP64.

    Its name is qualified; empty for the model itself. All but ``reference`` is relative to that.

    Attributes:
        tolerance: The relative error that is always right.
        typical: The largest root mean square of a gradient of the network, for telling what is zero but for rounding.
    """

    tolerance: float
    typical: float

    @property
    def allowed(self) -> float:
        """The largest relative error that is right: what rounding explains, or so many times what is expected anyway."""
        expected = TIMES_EXPECTED * self.expected if math.isfinite(self.expected) else 0.0
        return max(self.tolerance, min(expected, MOST_EXPECTED))

    @property
    def allowed_loss(self) -> float:
        """The largest share of its norm that a gradient may lose to underflow.

        A gradient that is off by 8 % of its norm points within five degrees of where it should.
        """
        return max(LOST, self.allowed)

    @property
    def best(self) -> float:
        """The smallest relative error."""
        return min(self.errors.values())

    @property
    def finite(self) -> list[int]:
        """The exponents at which its gradients are finite."""
        return [exponent for exponent, error in self.errors.items() if math.isfinite(error)]

    @property
    def good(self) -> list[int]:
        """The exponents at which they are finite and no more is lost to underflow than does no harm."""
        lost = self.errors if self.underflows else self.shifts  # nothing that is right to compare with
        return [exponent for exponent in self.finite if lost[exponent] <= self.allowed_loss]

    @property
    def underflows(self) -> bool:
        """Return whether its error at the highest finite scale comes from underflow: a higher one would have made it smaller again."""
        if len(self.finite) < 2:
            return False
        below, at = self.finite[-2:]
        return self.errors[below] >= FALLING ** (at - below) * self.errors[at] > 0

    @property
    def nothing(self) -> bool:
        """True where the gradient is zero but for rounding, as that of a bias before a norm: nothing to judge."""
        rms = self.reference / math.sqrt(self.elements)
        return rms == 0 or (rms <= NOTHING * self.typical and self.fp32 > ILL_CONDITIONED)

    @property
    def ill_conditioned(self) -> bool:
        """True where FP32 already gets it wrong."""
        return not self.nothing and self.fp32 > ILL_CONDITIONED

    @property
    def in_proportion(self) -> bool:
        """True where the FP32 gradient follows the scale of the loss."""
        return self.nothing or self.fp32_shift <= self.tolerance

    @property
    def judged(self) -> bool:
        """True where an error in half precision means anything."""
        return not self.nothing and not self.ill_conditioned and self.in_proportion

    @property
    def wrong(self) -> bool:
        """Return whether its error is larger than rounding explains, at every scale, and no scale would mend it."""
        return self.judged and bool(self.finite) and self.best > self.tolerance and not self.underflows

    @property
    def drifts(self) -> bool:
        """True where it is right at some scale and, still finite, wrong at the highest ones: it does not follow the scale."""
        top = self.errors[max(self.finite)] if self.finite else math.inf
        return self.judged and math.isfinite(top) and self.best <= self.tolerance and top > 2 * self.tolerance


@dataclass(frozen=True)
class UsableScales:
    """Loss scales that suit a network.

    Attributes:
        tried: Exponents of the scales that were tried, ascending.
        good: Those at which every module that can be judged is right.
        overflows: The lowest from which on some gradient is not finite; None where none is.
    """

    tried: tuple[int, ...]
    good: tuple[int, ...]
    overflows: int | None

    @property
    def best(self) -> int | None:
        """The middle of the good ones, as far from either end as can be; None where there is none."""
        return self.good[(len(self.good) - 1) // 2] if self.good else None

    def suits(self, scale: float) -> bool | None:
        """Return whether a scale lies among the good ones; None where it lies beyond those that were tried and nothing is known."""
        exponent = math.log2(scale)
        if self.overflows is not None and exponent >= self.overflows:
            return False
        if exponent < self.tried[0] and self.tried[0] not in self.good:
            return False
        if not self.tried[0] <= exponent <= self.tried[-1]:
            return None
        below = max(one for one in self.tried if one <= exponent)
        above = min(one for one in self.tried if one >= exponent)
        return below in self.good and above in self.good


def by_module(parameters: Sequence[GradientErrors], form: Format, order: Sequence[str] = ()) -> list[ModuleScaling]:
    """The gradients of each module's own parameters, in the order in which the modules are called.

    Args:
        parameters: By qualified name.
        form: The half-precision format.
        order: Names of modules in that order; those that are not named follow.
    """
    groups: dict[str, list[GradientErrors]] = {}
    for one in parameters:
        groups.setdefault(one.name.rpartition(".")[0], []).append(one)
    norms = {name: math.hypot(*(part.reference for part in parts)) for name, parts in groups.items()}
    elements = {name: sum(part.elements for part in parts) for name, parts in groups.items()}
    typical = max((norms[name] / math.sqrt(elements[name]) for name in groups), default=0.0)

    def relative(name: str, distances: Iterable[float]) -> float:
        found = math.hypot(*distances)
        return found / norms[name] if found and norms[name] else math.inf if found else 0.0

    modules = [
        ModuleScaling(
            name=name,
            elements=elements[name],
            reference=norms[name],
            fp32=relative(name, (part.fp32 for part in parts)),
            expected=relative(name, (part.expected for part in parts)),
            fp32_shift=relative(name, (part.fp32_shift for part in parts)),
            errors={at: relative(name, (part.errors[at] for part in parts)) for at in parts[0].errors},
            shifts={at: relative(name, (part.shifts[at] for part in parts)) for at in parts[0].shifts},
            tolerance=EPSILONS * form.epsilon,
            typical=typical,
        )
        for name, parts in groups.items()
    ]
    places = {name: place for place, name in enumerate(order)}
    return sorted(modules, key=lambda one: places.get(one.name, len(places)))


def scales_of(modules: Sequence[ModuleScaling]) -> UsableScales:
    """Return the scales that suit all modules together."""
    tried = tuple(sorted(modules[0].errors))
    judged = [module for module in modules if module.judged]
    good = tuple(one for one in tried if all(one in module.good for module in judged)) if judged else ()
    failing = [one for one in tried if any(not math.isfinite(module.errors[one]) for module in modules)]
    overflows = next((one for one in failing if all(later in failing for later in tried if later >= one)), None)
    return UsableScales(tried, good, overflows)


@dataclass(frozen=True)
class OutputErrors:
    """Errors of the output of a module: relative L2 errors against FP64, all calls together.

    Attributes:
        half: In half precision.
        explained: What rounding weights, inputs and all that modules say makes of it.
        fp32: In FP32.
        own: What the module itself makes wrong in half precision, compared with what FP64 makes of the same half-precision inputs;
            inf where it makes something infinite or no number out of finite values.
        largest: The largest magnitude of what it says in FP64.
    """

    half: float
    explained: float
    fp32: float
    own: float = math.inf
    largest: float = 0.0

    def allowed(self, tolerance: float) -> float:
        """Return the largest relative error in half precision that is right.

        Args:
            tolerance: The error that is right of any output.
        """
        return max(tolerance, TIMES_ROUNDED * self.explained if math.isfinite(self.explained) else 0.0)


@dataclass(frozen=True)
class ScalingEvidence:
    """Everything that findings are made of.

    Attributes:
        compute: The half-precision dtype of products.
        modules: Gradients by module, in the order of their call.
        constants: Module, operator, value and ``zero`` or ``infinite``, of each constant that the format does not hold.
        narrow: Module and operator of what was computed in half and is FP32 in torch's autocast.
        casts: Module and dtype of casts to half-precision dtypes.
        half_norms: Norm layers whose parameters, statistics and arithmetic are half.
        lost_values: Parameters and buffers with values beyond the largest number of half, and the largest of them.
        no_gradient: Parameters without gradient.
        outputs: How wrong what a module says is, by name, in the order in which their first calls end.
        breaks: Modules in which gradients stop being in proportion to the loss, or that hand on wrong ones.
        keep_backward: What to keep in FP32 so that those hand on right ones.
        scales: The configured scale of each learner, and whether it is constant.
        epsilons: The attribute that is called an epsilon and vanishes in the format, by module.
        refused: What torch said where the passes could not be done; empty where they could.
        fp32_finite: The step is finite in FP32.
        breaks_fp32: Where it is not: the operators that make it so, in their order.
        breaks_half: The operators of the forward pass in half precision that leave its range, where an output is wrong.
        keep_fp32: What ``precision.keep_fp32`` lists.
        autocast: The precision mode is one of autocast.
    """

    compute: str
    modules: Sequence[ModuleScaling] = ()
    constants: Sequence[tuple[str, str, float, str]] = ()
    narrow: Sequence[tuple[str, str]] = ()
    casts: Sequence[tuple[str, str]] = ()
    half_norms: Sequence[str] = ()
    lost_values: Mapping[str, float] = field(default_factory=dict)
    no_gradient: Sequence[str] = ()
    outputs: Mapping[str, OutputErrors] = field(default_factory=dict)
    breaks: Sequence[str] = ()
    keep_backward: Sequence[str] = ()
    scales: Mapping[str, tuple[float, bool]] = field(default_factory=dict)
    epsilons: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    fp32_finite: bool = True
    breaks_fp32: Sequence[Operation] = ()
    breaks_half: Sequence[Operation] = ()
    keep_fp32: Sequence[str] = ()
    autocast: bool = False

    @property
    def form(self) -> Format:
        """The half-precision format."""
        return FORMATS[self.compute]
