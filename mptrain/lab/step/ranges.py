"""Errors of a training step's gradients at many loss scales, and the usable range of scales of each module.

For each parameter, the unscaled gradient g(S) / S at a scale S is compared with references, in L2 norms:

- *error*: distance from an exact backward pass of the same half-precision forward pass.
- *shift*: distance from the gradient at the highest finite scale. Multiplication by a power of two is exact, so without
  underflow and overflow the shift is 0 to the last bit.
- *expected*: distance of the exact gradient of the half-precision forward pass from the gradient without half
  precision. It may be large without a fault: one ReLU that rounding turns off changes the gradients of all layers
  before it.

Measurements of all modules of mlp, cnn, plain16, resnet18, dcgan, transformer, word_lstm and char_lstm in amp_static
and fp16_static at their first step: the error at the best scale is 0.04 to 0.27 % (the highest in plain16 with sixteen
layers; 0.30 % with tiny batches), half of what `EPSILONS` allows. The expected distance is 0.001 to 33 %. Outputs of
modules are off by at most 0.81 % (resnet18), which is 1.03 times what rounding explains; outputs that are off by less
than 0.2 % reach 1.9 times.

Underflow may lose more than rounding does (`LOST`). mlp and cnn were trained on digits for 200 steps at static scales
so low that the worst module lost a known share of its gradient at the first step. The mean loss of the last 40 steps
changed as follows against FP32, over three seeds with AdamW:

    share lost  3 %             5 %      8 %      11 %     16 %     25 %           48 %   85 % and more
    change      -1.0 to +0.2 %  +0.8 %   -0.2 %   +1.8 %   +1.7 %   +4 and +8 %    +8 %   +25 % and worse

BF16 stays within 1.3 %. With SGD the loss varies by 3 % between seeds, and a change is visible from 25 % on. `LOST` is
the highest share without a visible effect. A small network whose blocks are multiplied by 1e-6 loses 4.6 to 7.5 % of
their gradients at 2^16 and reaches the losses of FP32 within 0.1 %; it does so even if all of them are lost, because
the blocks hardly matter yet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mptrain.engine.module_trail import LOSS, ModuleTrail
from mptrain.engine.observer import ModuleObserver, Operation
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.census import current_pass, floating_in
from mptrain.system.torch_private import tree_map, written_tensors

#: Acceptable relative error in multiples of the format's epsilon: 2^-7 for FP16.
EPSILONS = 8.0

#: Acceptable error of a gradient in multiples of its expected distance, up to `MOST_EXPECTED`.
TIMES_EXPECTED = 2.0

#: Upper limit of that error: a gradient that is off by half of its norm is wrong in any case. The first layer of
#: plain16 is off by 7 % at 2^12, by 37 % at 2^10, and completely at 2^8 and below. Over three seeds top1 on digits is
#: 0.934, 0.939 and 0.940 at these scales (FP32: 0.950), and 0.655 at 2^6, where one seed learns nothing.
MOST_EXPECTED = 0.5

#: Acceptable error of an output in multiples of the error from rounding weights, inputs and all outputs.
TIMES_ROUNDED = 2.0

#: Share of its norm that a gradient may lose to underflow without effect on training: see `ModuleScaling.allowed_loss`.
LOST = 0.08

#: Error of an output, in multiples of what is acceptable for any, above which a module makes rounding errors grow. The
#: errors of the sound models above are at most once as large.
TIMES_GROWN = 16.0

#: Factor by which a module that loses digits makes the largest error so far larger. Each BatchNorm of shufflenet over
#: eight values makes it at most 1.5 times as large, and all of them together 300 times.
TIMES_ONCE = 3.0

#: Relative error above which most of an output or of a gradient is lost.
MUCH = 0.5

#: Minimum factor by which an error from underflow falls with each doubling of the scale. Without rounding it halves.
FALLING = 1.5

#: Relative error in FP32 above which a gradient is ill-conditioned, regardless of half precision; likewise an output.
ILL_CONDITIONED = 2.0**-4
ILL_CONDITIONED_OUTPUT = 2.0**-7

#: A gradient is zero up to rounding if its root mean square is below this fraction of the network's largest.
NOTHING = 2.0**-30


@dataclass(frozen=True)
class GradientErrors:
    """Gradient errors of one parameter, or of all parameters of a module, in half precision, as L2 norms.

    Attributes:
        name: Name of the parameter or module.
        elements: Number of elements.
        reference: Norm of the gradient in FP64.
        fp32: Distance of the FP32 gradient from the exact gradient of the FP32 forward pass.
        expected: Distance of the exact gradient of the half-precision forward pass from the gradient in FP64.
        fp32_shift: Largest distance of an unscaled FP32 gradient from that at scale 1; 0 if gradients are proportional
            to the scale, inf if one is not finite.
        errors: Distance of the unscaled gradient from the exact gradient of the half-precision forward pass, by the
            base-2 exponent of the loss scale; inf if the gradient is not finite.
        shifts: Distance from the gradient at the highest finite scale, by the base-2 exponent of the loss scale.
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
    """Gradient errors of a module's own parameters together, relative to their norm in FP64, and what they mean.

    ``name`` is the qualified name of the module, empty for the model itself. ``reference`` is the absolute norm.

    Attributes:
        tolerance: Relative error that is always acceptable.
        typical: Largest root mean square of a module's gradient in the network, to detect gradients that are zero up to
            rounding.
    """

    tolerance: float
    typical: float

    @property
    def allowed(self) -> float:
        """Largest acceptable relative error of the gradient in half precision.

        The larger of `tolerance`, which rounding explains, and `TIMES_EXPECTED` times the expected distance; only the
        second is limited to `MOST_EXPECTED`.
        """
        expected = TIMES_EXPECTED * self.expected if math.isfinite(self.expected) else 0.0
        return max(self.tolerance, min(expected, MOST_EXPECTED))

    @property
    def allowed_loss(self) -> float:
        """Largest acceptable share of the gradient's norm that is lost to underflow.

        A gradient that is off by 8 % of its norm is within five degrees of the correct direction.
        """
        return max(LOST, self.allowed)

    @property
    def best(self) -> float:
        """Smallest relative error of the gradient at any of the loss scales tried; inf if it is finite at none."""
        return min(self.errors.values())

    @property
    def finite(self) -> list[int]:
        """Base-2 exponents of the loss scales tried at which the gradients are finite."""
        return [exponent for exponent, error in self.errors.items() if math.isfinite(error)]

    @property
    def good(self) -> list[int]:
        """Base-2 exponents of the loss scales at which gradients are finite and lose little enough to underflow."""
        lost = self.errors if self.underflows else self.shifts  # with underflow everywhere no scale is a reference
        return [exponent for exponent in self.finite if lost[exponent] <= self.allowed_loss]

    @property
    def underflows(self) -> bool:
        """True if the error at the highest finite scale comes from underflow, which a higher scale would reduce."""
        if len(self.finite) < 2:
            return False
        below, at = self.finite[-2:]
        return self.errors[below] >= FALLING ** (at - below) * self.errors[at] > 0

    @property
    def nothing(self) -> bool:
        """True if the gradient is zero up to rounding, like that of a bias before a norm layer."""
        rms = self.reference / math.sqrt(self.elements)
        return rms == 0 or (rms <= NOTHING * self.typical and self.fp32 > ILL_CONDITIONED)

    @property
    def ill_conditioned(self) -> bool:
        """True if the gradient is already wrong in FP32, so that half precision is not the cause."""
        return not self.nothing and self.fp32 > ILL_CONDITIONED

    @property
    def in_proportion(self) -> bool:
        """True if the FP32 gradient is proportional to the loss scale, or zero up to rounding."""
        return self.nothing or self.fp32_shift <= self.tolerance

    @property
    def judged(self) -> bool:
        """True if an error in half precision is meaningful: the gradient is not zero, and correct in FP32."""
        return not self.nothing and not self.ill_conditioned and self.in_proportion

    @property
    def wrong(self) -> bool:
        """True if the error is larger than rounding explains at every scale, so that no loss scale can fix it."""
        return self.judged and bool(self.finite) and self.best > self.tolerance and not self.underflows

    @property
    def drifts(self) -> bool:
        """True if the gradient is correct at some loss scale and wrong, but finite, at the highest finite one."""
        top = self.errors[max(self.finite)] if self.finite else math.inf
        return self.judged and math.isfinite(top) and self.best <= self.tolerance and top > 2 * self.tolerance


@dataclass(frozen=True)
class UsableScales:
    """Loss scales at which a network's gradients are correct in half precision, among those tried.

    Attributes:
        tried: Base-2 exponents of the scales tried, ascending.
        good: Exponents at which the gradients of every judged module are correct.
        overflows: Lowest exponent from which on a gradient is not finite; None if all are finite.
    """

    tried: tuple[int, ...]
    good: tuple[int, ...]
    overflows: int | None

    @property
    def best(self) -> int | None:
        """Base-2 exponent of the scale in the middle of the usable ones, far from both ends; None if none is usable."""
        return self.good[(len(self.good) - 1) // 2] if self.good else None

    def suits(self, scale: float) -> bool | None:
        """Return whether a loss scale is usable; None if it is outside the tried range and therefore unknown.

        Between two tried scales, a scale is usable if both are. ``scale`` is not an exponent.
        """
        exponent = math.log2(scale)
        if self.overflows is not None and exponent >= self.overflows:
            return False
        if exponent < self.tried[0] and self.tried[0] not in self.good:
            return False
        if not self.tried[0] <= exponent <= self.tried[-1]:
            return None
        below = max(tried for tried in self.tried if tried <= exponent)
        above = min(tried for tried in self.tried if tried >= exponent)
        return below in self.good and above in self.good


def by_module(parameters: Sequence[GradientErrors], form: Format, order: Sequence[str] = ()) -> list[ModuleScaling]:
    """Return the gradient errors of modules at several loss scales, combined from those of their own parameters.

    The modules are in the order in which the forward pass calls them (``order``); those that are not listed come last.
    All parameters, with qualified names, were measured at the same loss scales.
    """
    groups: dict[str, list[GradientErrors]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    norms = {name: math.hypot(*(part.reference for part in parts)) for name, parts in groups.items()}
    elements = {name: sum(part.elements for part in parts) for name, parts in groups.items()}
    typical = max((norms[name] / math.sqrt(elements[name]) for name in groups), default=0.0)

    def relative(name: str, distances: Iterable[float]) -> float:
        distance = math.hypot(*distances)
        return distance / norms[name] if distance and norms[name] else math.inf if distance else 0.0

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
    positions = {name: position for position, name in enumerate(order)}
    return sorted(modules, key=lambda module: positions.get(module.name, len(positions)))


def scales_of(modules: Sequence[ModuleScaling]) -> UsableScales:
    """Return the loss scales that are usable for all of a network's modules: at least one, all at the same scales."""
    tried = tuple(sorted(modules[0].errors))
    judged = [module for module in modules if module.judged]
    good = tuple(exponent for exponent in tried if all(exponent in module.good for module in judged)) if judged else ()
    failing = [exponent for exponent in tried if any(not math.isfinite(module.errors[exponent]) for module in modules)]
    overflows = next(
        (exponent for exponent in failing if all(later in failing for later in tried if later >= exponent)), None
    )
    return UsableScales(tried, good, overflows)


@dataclass(frozen=True)
class OutputErrors:
    """Relative L2 errors of a module's output in one forward pass against FP64, over all its calls.

    Attributes:
        half: Error in half precision.
        explained: Error from rounding weights, inputs and all module outputs.
        fp32: Error in FP32.
        own: Error of the module's own arithmetic in half precision, against FP64 on the same half-precision inputs; inf
            if it returns inf or NaN for finite inputs.
        largest: Largest magnitude of the output in FP64.
    """

    half: float
    explained: float
    fp32: float
    own: float = math.inf
    largest: float = 0.0

    @property
    def ill_conditioned(self) -> bool:
        """True if the output is already wrong in FP32, and not much less so than in half precision."""
        return self.fp32 > ILL_CONDITIONED_OUTPUT and not self.half > TIMES_GROWN * self.fp32

    def allowed(self, tolerance: float) -> float:
        """Return the largest acceptable relative error in half precision; ``tolerance`` is the one of any output."""
        return max(tolerance, TIMES_ROUNDED * self.explained if math.isfinite(self.explained) else 0.0)


def least_grown(form: Format) -> float:
    """Return the relative error above which rounding errors of a half-precision format have grown: `TIMES_GROWN`."""
    return min(TIMES_GROWN * EPSILONS * form.epsilon, MUCH)


def lost_boundary(
    outputs: Mapping[str, OutputErrors], modules: Sequence[ModuleScaling], form: Format
) -> tuple[str, str] | None:
    """Return a boundary to blame for one at which many digits are lost although all modules are exact, and the latter.

    The first is where a module's own error is largest up to the second, such as sums whose offset is subtracted later.
    If all errors are only those of rounding, it is the second: its module takes the difference of nearly equal values.
    If rounding explains the loss, wrong gradients must confirm that the values matter. ``outputs`` are in the order of
    the forward pass. Where no module makes errors much larger than they were, as in deep networks that normalise a few
    values in each layer, there is none to blame.
    """
    tolerance, least, largest = EPSILONS * form.epsilon, least_grown(form), 0.0
    matters = any(module.judged and least < module.expected < math.inf for module in modules)
    before: list[str] = []
    for at, errors in outputs.items():
        if errors.ill_conditioned or errors.own > tolerance:  # or values that underflow
            return None
        before.append(at)
        grown, largest = errors.half > TIMES_ONCE * largest, max(largest, errors.half)
        if at != LOSS and errors.half > least and grown and (matters or errors.half > errors.allowed(tolerance)):
            worst = max(before, key=lambda boundary: outputs[boundary].own)
            return (worst if outputs[worst].own > form.epsilon else at), at
    return None


def most_explained(form: Format) -> float:
    """Return the relative error of a network's result, or of all its gradients, that no rounding excuses.

    FP16: 12.5 %; BF16: 25 %. A network whose modules normalise eight values reaches 15 % in FP16, by and by.
    """
    return min(least_grown(form), MUCH / 2)


def result_error(outputs: Mapping[str, OutputErrors]) -> float:
    """Return the relative error of a network's result, that which crosses the last boundary before the loss."""
    result = next((errors for at, errors in reversed(list(outputs.items())) if at != LOSS), None)
    return 0.0 if result is None or result.ill_conditioned else result.half


def is_spoiled(outputs: Mapping[str, OutputErrors], modules: Sequence[ModuleScaling], form: Format) -> bool:
    """Return whether a network's result, or the gradient of every module, is off by more than `most_explained`.

    A gradient in the middle may be off by half without a fault, as one ReLU that rounding turns off changes those of
    all layers before it; that of the last layers may not.
    """
    least = min((module.expected for module in modules if module.judged), default=0.0)
    return max(least, result_error(outputs)) > most_explained(form)


def spoiling_boundary(
    outputs: Mapping[str, OutputErrors], modules: Sequence[ModuleScaling], form: Format
) -> str | None:
    """Return the boundary to blame for a network that `is_spoiled` although rounding explains all errors.

    It is the first at which the error rises above `most_explained` at once, `TIMES_ONCE` times as large as before; or
    the network's result, if only gradients are spoiled: the loss takes the difference of nearly equal values. None if
    errors grow by and by, so that no module is to blame, or if the network is not spoiled.
    """
    if not is_spoiled(outputs, modules, form):
        return None
    largest, last = 0.0, None
    for at, errors in outputs.items():
        if errors.ill_conditioned:
            return None
        if at == LOSS:
            continue
        if errors.half > most_explained(form) and errors.half > TIMES_ONCE * largest:
            return at
        largest, last = max(largest, errors.half), at
    return last if largest <= most_explained(form) else None


@dataclass(frozen=True)
class ScalingEvidence:
    """Measurements and observations of a network's first training step, for the findings of ``mptrain doctor``.

    Modules are given by qualified name, tensors by the name of the parameter or buffer.

    Attributes:
        compute: Half-precision dtype of matrix products.
        modules: Gradient errors by module, in call order.
        constants: Module, operator, value, and ``zero``, ``infinite`` or ``unneeded``, of each constant that the format
            cannot hold.
        narrow: Module and operator of half-precision arithmetic that torch's autocast runs in FP32.
        casts: Module and dtype of casts to half-precision dtypes.
        half_norms: Norm layers whose parameters, statistics and arithmetic are half precision.
        lost_values: Largest value of each parameter or buffer that exceeds the largest half-precision number.
        no_gradient: Parameters without a gradient.
        saddles: Parameters whose gradient stays exactly zero since others that are zero multiply them.
        zero_gradient: Other parameters whose gradient stays exactly zero on this batch.
        outputs: Errors at each boundary of modules, by the keys of `mptrain.lab.step.module_tensors.Outputs`, in the
            order of the forward pass.
        operators: First operator of modules with wrong outputs whose result is wrong but finite.
        breaks: Modules whose backward pass makes gradients wrong or not proportional to the loss.
        keep_backward: Modules to keep in FP32 to correct the gradients that the modules of ``breaks`` pass on.
        scales: Configured loss scale of each learner, and whether it is constant.
        epsilons: Name of the epsilon attribute that rounds to zero in the format, by module.
        refused: Error message of torch if the passes failed; otherwise empty.
        fp32_finite: Whether the step is finite in FP32.
        breaks_fp32: Operator calls that return inf or NaN for finite inputs in FP32, in order.
        breaks_half: Operator calls of the half-precision forward pass that do so, recorded if an output is wrong.
        close: Modules of the class of one in ``breaks_half`` with values of at least a quarter of the largest number.
        keep_fp32: Entries of the option ``precision.keep_fp32``.
        autocast: Whether the precision mode uses autocast.
        lost_columns: Columns of the inputs that the cast to half precision rounds away, for display; empty for none.
        floors: Lowest loss scale of each learner's scaler.
        rounded: Buffers and frozen parameters in half precision in which small changes are lost.
        raised_in: Module that raised the error in ``refused``; None if a constant explains it.
        close_calls: Operators whose results are close to the end of the format's range.
        later: Number of steps trained in FP32 after which they are; 0 for the first step.
        of_one: Module and operator of normalisations over single elements, whose results are constant.
        zeros_by: Operator that rounds values to zero before one that returns inf for zeros, by module.
    """

    compute: str
    modules: Sequence[ModuleScaling] = ()
    constants: Sequence[tuple[str, str, float, str]] = ()
    narrow: Sequence[tuple[str, str]] = ()
    casts: Sequence[tuple[str, str]] = ()
    half_norms: Sequence[str] = ()
    lost_values: Mapping[str, float] = field(default_factory=dict)
    no_gradient: Sequence[str] = ()
    saddles: Sequence[str] = ()
    zero_gradient: Sequence[str] = ()
    outputs: Mapping[str, OutputErrors] = field(default_factory=dict)
    operators: Mapping[str, OperatorError] = field(default_factory=dict)
    breaks: Sequence[str] = ()
    keep_backward: Sequence[str] = ()
    scales: Mapping[str, tuple[float, bool]] = field(default_factory=dict)
    epsilons: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    fp32_finite: bool = True
    breaks_fp32: Sequence[Operation] = ()
    breaks_half: Sequence[Operation] = ()
    close: Sequence[str] = ()
    keep_fp32: Sequence[str] = ()
    autocast: bool = False
    lost_columns: str = ""
    floors: Mapping[str, float] = field(default_factory=dict)
    rounded: Sequence[str] = ()
    raised_in: str | None = None
    close_calls: Sequence[tuple[str, str, str, float]] = ()
    later: int = 0
    of_one: Sequence[tuple[str, str]] = ()
    zeros_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def form(self) -> Format:
        """The half-precision format of matrix products, with its largest and smallest numbers."""
        return FORMATS[self.compute]


#: Names for the user of operators that no code calls by name.
_SHOWN = {"_to_copy": "a cast", "lift_fresh": "a constant"}


class OperatorError(NamedTuple):
    """Operator whose rounding makes its module wrong.

    Attributes:
        operator: Name of the operator in torch, such as ``cumsum``; ``a cast`` for a conversion; the qualified name of
            a buffer or parameter that the module stores in half precision.
        error: Relative L2 error of what the module computes, if only the results of that operator are rounded.
    """

    operator: str
    error: float


class RoundedOperator(ModuleObserver):
    """Dispatch mode that rounds the results of one operator of some modules to half precision, in the forward pass.

    Args:
        trail: Tracker of the current module. The caller follows it on the observed model.
        modules: Qualified names of the modules, or `mptrain.engine.module_trail.LOSS`.
        half: The half-precision dtype.
        chosen: Name of the operator, as in `OperatorError`; None rounds nothing.
        inside: Whether the operator is computed in the dtype, so that its inputs are rounded too.
        rounds: For the calls of an operator in a module, in order, whether they are rounded; all are if it has none.

    Attributes:
        calls: For the calls of each operator in a module, in order, whether they returned the dtype.

    The forward pass is computed in FP64, where only the results of one operator of the module are rounded to the
    format, in those of its calls that return half precision in the run. It is repeated for each such operator. What
    the module is given (its inputs, its weights, outputs of its submodules) is the same in all passes. The operator
    that makes the module most wrong loses the accuracy: a sum of large numbers, a product that underflows, a
    constant or a position that the format cannot hold. Or the module's own buffer or parameter does, if it is the
    one thing that is rounded.

    If no operator does, it is sought again with each operator computed in the format. An operator may round inside,
    such as a sum over indices, or take the difference of nearly equal values, which is exact: it makes the rounding
    of its inputs grow.
    """

    def __init__(
        self,
        trail: ModuleTrail,
        modules: Collection[str],
        half: torch.dtype,
        chosen: str | None = None,
        inside: bool = False,
        rounds: Mapping[tuple[str, str], Sequence[bool]] | None = None,
    ) -> None:
        super().__init__(trail)
        self.calls: dict[tuple[str, str], list[bool]] = {}
        self._modules, self._half, self._chosen, self._inside = modules, half, chosen, inside
        self._rounds = rounds or {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        module, name = self.trail.module(), func.overloadpacket.__name__
        if module not in self._modules or current_pass() != "forward" or (func.is_view and name not in _SHOWN):
            return func(*args, **(kwargs or {}))
        key = module, _SHOWN.get(name, name.strip("_"))
        calls = self.calls.setdefault(key, [])
        chosen = key[1] == self._chosen and self._rounds.get(key, ())[len(calls) : len(calls) + 1] != [False]
        calls.append(False)
        if chosen and self._inside and name not in _SHOWN and not list(written_tensors(func, args, kwargs or {})):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # no kernel in the dtype
                small = func(*tree_map(self._rounded, args), **tree_map(self._rounded, dict(kwargs or {})))
                return tree_map(lambda leaf: leaf.double() if _is_of(leaf, self._half) else leaf, small)
        result = func(*args, **(kwargs or {}))
        calls[-1] = any(_is_of(tensor, self._half) for tensor in floating_in(result))
        if chosen and torch.Tag.nondeterministic_seeded not in func.tags:
            written = list(written_tensors(func, args, kwargs or {}))

            def rounded(value: Any) -> Any:
                new = self._rounded(value)
                if new is value:
                    return value
                return value.copy_(new) if any(value is tensor for tensor in written) else new.double()

            result = tree_map(rounded, result)
        return result

    def _rounded(self, value: Any) -> Any:
        """Return a tensor in the half-precision dtype if it is FP64; others are FP32 in every precision."""
        return value.to(self._half) if _is_of(value, torch.float64) else value


def _is_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype
