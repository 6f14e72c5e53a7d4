"""The largest gradient of a step in FP16 by its histograms, and of the steps between two such looks.

Both who foretells static scales and who replays a scaling rule ask here, so that they cannot disagree on one run. Nothing
here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mptrain.numerics.exponents import TINIEST
from mptrain.numerics.formats import FLOAT16
from mptrain.records import ExponentCounts, HistogramRecord


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a look that went through FP16, as the device saw them; all of them where none did.

    Attributes:
        modules: At the outputs of modules, by name.
        parameters: By name.
        half: Whether the step computed in FP16 at all. Where it did not, all that is said of FP16 is foretold.
    """

    modules: dict[str, ExponentCounts]
    parameters: dict[str, ExponentCounts]
    half: bool

    @property
    def named(self) -> dict[str, ExponentCounts]:
        """Both; a name that a module and a parameter share is the parameter's."""
        return {**self.modules, **self.parameters}


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest gradient of a step that did not overflow, without the loss scale.

    Attributes:
        value: The magnitude; 0 where no gradient was.
        where: Which module's or parameter's it is.
        certain: The largest of those that were kept in FP16. A larger ``value`` is that of an FP32 tensor that seems to have
            come through FP16.
    """

    value: float
    where: str
    certain: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """A look from which the steps around it are told.

    Attributes:
        step: The attempt.
        largest: log2 of its largest gradient, without the loss scale.
        ratio: log2 of that over the norm of all gradients.
    """

    step: int
    largest: float
    ratio: float


def gradients_of(record: HistogramRecord) -> Gradients:
    """The gradients of a look that FP16 judges.

    In a step that computes in FP16 those are the tensors kept in FP16, and the FP32 ones that were FP16 numbers on their way:
    gradients of FP32 parameters under autocast, copies for master weights, and sums over micro-batches. Such a tensor has
    nothing below FP16's smallest number. One that has was FP32 all along, and no loss scale makes it overflow.
    """
    kinds = [record.tensors.get(kind, {}) for kind in ("activation_gradients", "weight_gradients")]
    half = any(counts.dtype == "float16" for named in kinds for counts in named.values())
    modules, parameters = (
        {name: counts for name, counts in named.items() if not half or _is_half(counts)} for named in kinds
    )
    return Gradients(modules, parameters, half)


def largest_of(gradients: Gradients, loss_scale: float) -> Largest:
    """The largest of them.

    FP32 sums over micro-batches may exceed what each of them held. Where the step was clean at its scale none of those did
    overflow there, so nothing is taken for more than FP16's largest number.

    Args:
        gradients: Of a step that did not overflow.
        loss_scale: What they carry; above 0.
    """
    both = (*gradients.modules.items(), *gradients.parameters.items())
    found = [(counts.largest, name, counts.dtype) for name, counts in both]
    value, where, _ = max(found, key=lambda each: each[0], default=(0.0, "", ""))
    if gradients.half:
        value = min(value, FLOAT16.max)
    certain = max((largest for largest, _, dtype in found if dtype == "float16"), default=0.0)
    return Largest(value / loss_scale, where, certain / loss_scale)


def anchor(step: int, largest: float, norm: float) -> HistogramSample | None:
    """Return the evidence of a look for the steps around it; None where it or the norm of its gradients is zero or not finite."""
    if not (0 < largest < math.inf and 0 < norm < math.inf):
        return None
    return HistogramSample(step, math.log2(largest), math.log2(largest / norm))


def between(before: HistogramSample, after: HistogramSample, step: int, norm: float) -> float:
    """The largest gradient of a step between two looks, both of which may be the same.

    Args:
        before: The look before the step, or the nearest.
        after: The look after it, or the nearest.
        step: The step.
        norm: Of its unscaled gradients, which is on record of every clean step. Where it is none, as after an overflow, the
            largest gradient itself is interpolated.

    Returns:
        The norm times the ratio of the two at the looks, interpolated in logarithms.
    """
    span = after.step - before.step
    share = (step - before.step) / span if span else 0.0
    if 0 < norm < math.inf:
        return float(norm * 2.0 ** (before.ratio + share * (after.ratio - before.ratio)))
    return float(2.0 ** (before.largest + share * (after.largest - before.largest)))


def _is_half(counts: ExponentCounts) -> bool:
    return counts.dtype == "float16" or (counts.dtype == "float32" and (not counts.counts or counts.lowest >= TINIEST))
