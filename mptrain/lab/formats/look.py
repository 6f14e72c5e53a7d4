"""Gradients of one training step whose products are in an emulated number format, against those in FP32.

No step is trained: weights, buffers and random numbers are the same for every format, so that gradients differ by the
format alone. A parameter's error is the norm of the difference relative to the norm of its FP32 gradient, at most
`CAP`; that of a format is their mean, each parameter weighted by its number of elements, because that is how many
numbers an optimizer updates from it. By the norm over all parameters, a layer with large gradients hides all others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mptrain.engine.module_trail import ModuleTrail
from mptrain.engine.parts import Parts
from mptrain.lab.step.gradients import Gradients, scaled_gradients
from mptrain.lab.step.module_tensors import distance, norm
from mptrain.numerics.formats import FLOAT16
from mptrain.numerics.quantization import FINE, RULES, Rule
from mptrain.precision.emulation import EmulatedProducts, Emulation, ProductCall
from mptrain.system.errors import ConfigError, NumericsError
from mptrain.system.words import listed
from mptrain.workloads.base.batch import Batch

#: Largest relative error of a parameter: a gradient that is this wrong tells nothing, however wrong it is.
CAP = 2.0

#: Change of a parameter's gradient by operands of one bit less than FP32, from which on it is zero but for rounding,
#: such as that of a bias before a norm layer.
NOTHING = 0.25

#: Loss scales that are tried for FP16, the largest first.
LOSS_SCALES = tuple(2.0**exponent for exponent in (16, 12, 8, 4, 0))


class FormatErrors(NamedTuple):
    """Errors of one step's gradients with the products of all layers in a number format.

    Attributes:
        name: Name of the format (`mptrain.numerics.quantization.RULES`).
        error: Mean relative error of the gradients of the parameters, weighted by their elements, from 0 to `CAP`.
        by_norm: Relative error of all gradients together; inf if one is not finite.
        zeros: Share of the elements that are zero, of those that are not zero in FP32.
        loss_scale: Loss scale, 1 for none.
        parameters: Relative error of each parameter by name.
    """

    name: str
    error: float
    by_norm: float
    zeros: float
    loss_scale: float
    parameters: Mapping[str, float]

    @property
    def finite(self) -> bool:
        """True if all gradients are finite."""
        return self.by_norm < math.inf


@dataclass(frozen=True)
class Coverage:
    """Products of one step, by what can be in a format.

    Attributes:
        layers: FLOPs of each layer's products, by the name of its parameter.
        others: FLOPs of products that no format touches, by module and operator: those that were not recognised as a
            layer's, as in attention, and those that are not in FP32.
        unknown: Calls of such operators whose FLOPs are not known, by module and operator.
    """

    layers: Mapping[str, int]
    others: Mapping[str, int]
    unknown: Mapping[str, int]

    @property
    def judged(self) -> float:
        """Share of the FLOPs, as far as they are known, whose operands were in a format."""
        layers = sum(self.layers.values())
        return layers / max(layers + sum(self.others.values()), 1)


@dataclass(frozen=True)
class Look:
    """One step of a network in FP32, with which those in formats are compared.

    Attributes:
        parts: The run in ``precision=fp32``, in training mode.
        batch: The prepared batch.
        gradients: FP32 gradients, float64 by parameter name.
        nothing: Parameters whose gradients are zero, but for rounding, which are not compared.
        coverage: Products of the step.
    """

    parts: Parts
    batch: Batch
    gradients: Gradients
    nothing: frozenset[str]
    coverage: Coverage

    @classmethod
    def at(cls, parts: Parts, batch: Batch) -> Look:
        """Compute the gradients of a step in FP32, and which of them are more than rounding.

        Raises NumericsError if one is not finite, or all are zero, and ConfigError if no product can be in a format.
        """
        parts.model.train()
        products = _Products()
        wide = emulated_gradients(parts, batch, None)
        nearly = emulated_gradients(parts, batch, FINE, report=products.take)
        nothing = {name for name, grad in wide.items() if not distance(nearly[name], grad) < NOTHING * norm(grad)}
        if wrong := [name for name, grad in wide.items() if not grad.isfinite().all()]:
            what = f"gradients of this step are not finite in FP32 already: {listed(wrong)}"
            raise NumericsError(what, "mptrain diagnose, with the same words and precision=fp32, finds the cause")
        if len(nothing) == len(wide):
            raise NumericsError("all gradients of this step are zero, but for rounding", "look at another step")
        coverage = products.coverage()
        if not coverage.layers:
            named = listed([*coverage.others, *coverage.unknown]) or "none at all"
            what = f"no product of this step was recognised as a layer's, so no format can be looked at: {named}"
            raise ConfigError(what, "weights that are computed from parameters are not recognised")
        return cls(parts, batch, wide, frozenset(nothing), coverage)

    @property
    def compared(self) -> float:
        """Share of the elements of all gradients that are compared."""
        sizes = {name: grad.numel() for name, grad in self.gradients.items()}
        return sum(size for name, size in sizes.items() if name not in self.nothing) / max(sum(sizes.values()), 1)

    def errors(self, name: str, kept: Collection[str] = ()) -> FormatErrors:
        """Compute the step with products in a format, but for those of layers that are kept in FP32, by parameter."""
        rule, scale, grads = RULES[name], 1.0, Gradients()
        for scale in LOSS_SCALES if rule.gradients == FLOAT16 else (1.0,):
            grads = emulated_gradients(self.parts, self.batch, rule, kept, scale)
            if all(bool(grad.isfinite().all()) for grad in grads.values()):
                break
        return self._compared(name, grads, scale)

    def _compared(self, name: str, grads: Gradients, scale: float) -> FormatErrors:
        compared = {key: grad for key, grad in self.gradients.items() if key not in self.nothing}
        differences = {key: distance(grads[key], grad) for key, grad in compared.items()}
        norms = {key: norm(grad) for key, grad in compared.items()}
        errors = {key: min(differences[key] / norms[key], CAP) for key in compared}
        sizes = {key: grad.numel() for key, grad in compared.items()}
        lost = sum(int(((grads[key] == 0) & (grad != 0)).sum()) for key, grad in compared.items())
        present = sum(int((grad != 0).sum()) for grad in compared.values())
        return FormatErrors(
            name,
            error=sum(errors[key] * sizes[key] for key in compared) / max(sum(sizes.values()), 1),
            by_norm=math.hypot(*differences.values()) / (math.hypot(*norms.values()) or 1.0),
            zeros=lost / max(present, 1),
            loss_scale=scale,
            parameters=errors,
        )


def emulated_gradients(
    parts: Parts,
    batch: Batch,
    rule: Rule | None,
    kept: Collection[str] = (),
    scale: float = 1.0,
    report: Callable[[ProductCall, str], None] | None = None,
) -> Gradients:
    """Return the unscaled gradients of a step with the products of layers in a format, float64 by parameter name.

    Args:
        parts: The run in ``precision=fp32``, in training mode.
        batch: The prepared batch.
        rule: The format; None for FP32.
        kept: Names of parameters whose products stay in FP32.
        scale: Loss scale.
        report: Function that is given each product and the name of the module that runs it.
    """
    trail = ModuleTrail(check_finite=False)

    def noted(call: ProductCall) -> None:
        if report is not None:
            report(call, trail.module())

    generator = torch.Generator(parts.device).manual_seed(0)
    emulation = Emulation(EmulatedProducts(parts.model, rule, kept, noted, generator))
    # In every pass, because hooks keep fused layers from running as one operator: all compute the same products.
    with trail.followed(parts.model):
        return scaled_gradients(replace(parts, plan=replace(parts.plan, products=emulation)), batch, scale)


class _Products:
    """Receiver of a step's products that adds up their FLOPs."""

    def __init__(self) -> None:
        self._layers: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()

    def take(self, call: ProductCall, module: str) -> None:
        """Count a product that a module, by name, runs."""
        count, name = flops(call), call.operator.overloadpacket.__name__.strip("_").removesuffix("_backward")
        name = f"{'attention' if 'attention' in name else name} in {module or 'the model'}"
        if count is None:
            self._unknown[name] += 1
        elif call.emulated:
            self._layers[call.layer] += count
        else:
            self._others[name] += count

    def coverage(self) -> Coverage:
        """Return what was counted."""
        return Coverage(dict(self._layers), dict(self._others), dict(self._unknown))


def flops(call: ProductCall) -> int | None:
    """Return the number of floating-point operations of a product, a multiplication and an addition apart.

    None for an operator whose number is not known.
    """
    from torch.utils.flop_counter import flop_registry  # late: with torch's compiler, on machines that have it

    packet = call.operator.overloadpacket
    name, tensors = packet.__name__, [value for value in call.args if isinstance(value, Tensor)]
    # torch's counter multiplies the weight gradient by the number of groups.
    if name == "convolution":
        summed = call.args[0] if call.args[6] else call.result
        return int(2 * summed.numel() * call.args[1][0].numel())
    if name == "convolution_backward":
        gradient, given, weight = tensors[:3]
        summed = given if call.args[7] else gradient
        return int(2 * summed.numel() * weight[0].numel() * sum(call.args[10][:2]))
    if packet in flop_registry:
        return int(flop_registry[packet](*call.args, out_val=call.result))
    if "attention" in name and len(tensors) > 3 - ("backward" not in name):  # that of torch's CPU kernels
        query, key, value = tensors[1:4] if "backward" in name else tensors[:3]
        forward = 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * value.shape[-2:].numel()
        return forward * 5 // 2 if "backward" in name else forward  # five products for two: one is repeated
    if name == "_grouped_mm":  # each row, or each column, belongs to one group
        first, second = tensors[:2]
        rows = first.numel() if second.ndim == 3 else first.shape[-2:].numel()
        return 2 * rows * second.shape[-1]
    if name in ("mv", "addmv", "dot", "vdot"):
        return 2 * max(tensor.numel() for tensor in tensors)
    if name in ("addmm_", "baddbmm_"):
        return 2 * tensors[1].numel() * tensors[2].shape[-1]
    return None
