"""Histograms counted value by value, without the code that training counts with."""

import math

from mptrain.system.records import ExponentCounts, HistogramRecord


def counted(values, dtype="float32"):
    """The histogram of a flat list of numbers."""
    numbers = [abs(float(value)) for value in values]
    finite = [number for number in numbers if number > 0 and math.isfinite(number)]
    exponents = [math.frexp(number)[1] - 1 for number in finite]
    lowest = min(exponents, default=0)
    return ExponentCounts(
        dtype=dtype,
        zeros=sum(number == 0 for number in numbers),
        inf=sum(math.isinf(number) for number in numbers),
        nan=sum(math.isnan(number) for number in numbers),
        largest=max(finite, default=0.0),
        lowest=lowest,
        counts=tuple(exponents.count(at) for at in range(lowest, max(exponents, default=-1) + 1)) if finite else (),
    )


def look(
    step=1, gradients=None, weight_gradients=None, scale=1.0, overflow=False, learner="main", unchanged=None, **kinds
):
    """A record of one step: activation gradients and weight gradients by name, lists of numbers or histograms."""
    tensors = {"activation_gradients": gradients or {}, "weight_gradients": weight_gradients or {}, **kinds}
    return HistogramRecord(
        learner=learner,
        step=step,
        loss_scale=scale,
        overflow=overflow,
        tensors={
            kind: {
                name: found if isinstance(found, ExponentCounts) else counted(found) for name, found in named.items()
            }
            for kind, named in tensors.items()
        },
        unchanged=unchanged or {},
    )
