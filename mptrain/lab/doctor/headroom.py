"""Operators of a network that are right in half precision now and close to the end of its range, at first or later.

A first batch does not show what training brings: logits grow from 0.3 to 20 within some epochs, and an exponential
that a network computes in FP16 overflows at 11.09. So the network is trained for some steps in FP32, in memory, and
the same operators are looked at again with those weights in half precision. How far a value may come follows from the
format, with room for what a longer training adds: half of the largest exponent for exponentials (11.09 / 2), a quarter
of the largest number for sums and products, no subnormal number or zero for logarithms, roots and reciprocals. What is
bounded, such as the exponentials of a softmax that subtracts its maximum, never comes that far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mptrain.config.schema import Config
from mptrain.engine.observer import Operation
from mptrain.lab.finding import CLOSE
from mptrain.lab.step.gradients import operators
from mptrain.lab.step.repetition import restore_step, saved_step_at
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.apply import input_dtype
from mptrain.run.build.parts import build

#: Steps of FP32 training before the second look, and of networks with more than so many outputs and weights in a step.
STEPS, FEW_STEPS, LARGE = 100, 10, 2**23

#: Operators whose results leave the range of half precision where their inputs grow only some times.
GROWING = frozenset({"exp", "expm1", "sinh", "cosh", "pow", "prod", "sum", "cumsum", "norm", "linalg_vector_norm"})
SUMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution", "square", "index_add", "scatter_add"})
SHRINKING = frozenset({"log", "log2", "log10", "rsqrt", "reciprocal"})

#: Share of the largest number above which a result at the first step is worth a second look: six doublings are left.
_WORTH = 2.0**-6

_EXPONENTIALS = frozenset({"exp", "expm1", "sinh", "cosh"})
_LOGARITHMS = {"log": 1.0, "log2": math.log(2), "log10": math.log(10)}


class CloseCall(NamedTuple):
    """Result of an operator in half precision close to the end of the format's range.

    Attributes:
        module: Qualified name of the module, empty for the model itself.
        operator: Name of the operator in torch.
        what: What it reaches, as a clause.
        ratio: How far it is, relative to the limit at which it counts as close: 1 or more.
    """

    module: str
    operator: str
    what: str
    ratio: float


def close_calls(operations: Iterable[Operation], form: Format) -> tuple[CloseCall, ...]:
    """Return the worst result of each operator of a module that is close to the end of a half-precision format.

    Results that are not finite are among them.
    """
    worst: dict[tuple[str, str], CloseCall] = {}
    for operation in operations:
        for call in _of(operation, form) if operation.phase == "forward" else ():
            known = worst.get((call.module, call.operator))
            if known is None or call.ratio > known.ratio:
                worst[call.module, call.operator] = call
    return tuple(worst.values())


def _of(op: Operation, form: Format) -> Iterator[CloseCall]:
    name = op.operator.strip("_")
    largest = max((counts.largest for counts in op.outputs if counts.dtype == form.name), default=0.0)
    if op.breaks and any(counts.dtype == form.name for counts in op.outputs):
        yield CloseCall(op.module, name, f"{name} returns {op.kind} for {op.given}", math.inf)
    elif not largest or not op.finite_inputs:
        return
    elif name in _EXPONENTIALS:
        reached, most = math.log(largest), math.log(form.max)
        if reached >= most / 2:
            yield CloseCall(op.module, name, f"{name} reaches {reached:.3g} of {most:.4g}", 2 * reached / most)
    elif name in _LOGARITHMS:
        reached, most = largest * _LOGARITHMS[name], -math.log(form.smallest_normal)
        if reached >= most:
            what = f"{name} is given numbers down to {math.exp(-reached):.2g}, below the smallest normal one"
            yield CloseCall(op.module, name, what, reached / most)
    elif name in SHRINKING:
        reached, most = largest ** (2 if name == "rsqrt" else 1), 1 / form.smallest_normal
        if reached >= most:
            what = f"{name} is given numbers down to {1 / reached:.2g}, below the smallest normal one"
            yield CloseCall(op.module, name, what, reached / most)
    elif largest >= CLOSE * form.max:
        ratio, what = largest / form.max / CLOSE, f"reaches {largest:,.0f} of {form.max:,.0f}"
        if name == "to_copy" and form.name not in op.inputs:  # the result of a module in a wider dtype
            yield CloseCall(op.module, "a cast", f"a cast {what}", ratio)
        elif name in GROWING | SUMS and op.largest_input < CLOSE * form.max:  # a mask of large numbers comes with them
            yield CloseCall(op.module, name, f"{name} {what}", ratio)


def worth_a_look(operations: Sequence[Operation], form: Format) -> bool:
    """Return whether a network has operators in half precision whose results may leave the range in a later step."""
    for operation in operations:
        half = [counts for counts in operation.outputs if counts.dtype == form.name]
        if not half or operation.phase != "forward":
            continue
        largest = max(counts.largest for counts in half)
        name = operation.operator.strip("_")
        if name in GROWING | SHRINKING or (
            name in SUMS | {"mul", "to_copy"} and largest >= _WORTH * form.max > operation.largest_input
        ):
            return True
    return False


def after_some_steps(config: Config, wide: Config, values: int) -> tuple[int, tuple[CloseCall, ...]]:
    """Train in memory in FP32, and return the number of steps and the close calls of one in half precision after them.

    ``wide`` is the configuration in FP32, and ``values`` the number of outputs and weights in a step. If FP32 itself
    ends in values that are not finite, there are none.
    """
    parts, options = build(wide)
    planned = options.train.planned(parts.loaders["train"].steps_per_epoch)
    steps = min(FEW_STEPS if values > LARGE else STEPS, planned)
    saved = saved_step_at(parts, options, None, steps)
    if saved is None or not all(bool(tensor.isfinite().all()) for tensor in parts.full_precision().values()):
        return 0, ()
    half, _ = build(config)
    restore_step(half, saved)
    seen = operators(half, saved.batch.cast(input_dtype(config.precision)))
    return steps, close_calls(seen, FORMATS[config.precision.compute])
