"""Notes on an observed training step that are no failures, and rows of the module table. Runs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mptrain.lab.findings import Finding, describe_module, find_causes, label, numbered, operator_name, percent
from mptrain.numerics.exponents import below_tiniest_share, headroom, merged, nonzero, subnormal_share, total
from mptrain.numerics.formats import FLOAT16, scale_in_words
from mptrain.numerics.words import listed
from mptrain.precision.policy import NORMS
from mptrain.probe.module_trail import LOSS
from mptrain.probe.observer import Observation, Operation
from mptrain.runlog.diagnosis_file import ModuleRow, ValueRange
from mptrain.system.records import ExponentCounts

#: Share of FP16's range above which a value counts as close to its end: at most two doublings are left.
CLOSE = 0.25

#: Share of values below 2^-14 above which an operator or a backward pass counts as losing values to underflow.
MUCH = 0.5

#: Operators whose results are zero only because of underflow or of zeros in their inputs.
NEVER_ZERO = frozenset({"_softmax", "_safe_softmax", "exp", "sigmoid", "div", "reciprocal", "rsqrt", "softplus"})

#: Maximum number of sentences of one kind; the module table has all of them.
_MOST = 3


def step_notes(seen: Observation, exact: Observation | None = None) -> tuple[str, ...]:
    """Return the notes on a training step for the user, one sentence each.

    They name custom functions that compute in another dtype, values lost to underflow (judged with ``exact``, the same
    step in FP32), small or zero gradients, values close to FP16's largest number, and parameters that are not trained.
    """
    return (
        *_functions(seen),
        *_underflow(seen, exact),
        *_gradients(seen),
        *only_zeros(module_rows(seen)),
        *_close(seen),
        *_untrained(seen),
    )


def underflows(seen: Observation, exact: Observation | None = None) -> list[Operation]:
    """Return the operator calls of the forward pass that lose values to FP16's underflow, the worst first.

    A call counts if most of its results are below 2^-14, or zero although exact ones never are. Results that are zero
    in FP32 too (``exact``, the same step), such as those of a softmax after a mask of -1e4, are not lost. Without
    ``exact``, only the zeros in the inputs of a cast or a division are excluded.
    """
    wide = numbered(exact.of("forward")) if exact is not None else ()
    zeros = {key: sum(counts.zeros for counts in operation.outputs) for key, operation in wide}
    found = []
    for key, operation in numbered(seen.of("forward")):
        counts = merged(one for one in operation.outputs if one.dtype == "float16")
        if operation.module == LOSS or total(counts) < 2 or not operation.finite_inputs or not operation.largest_input:
            continue
        lost = 0
        if operation.operator == "_to_copy":
            lost = max(counts.zeros - operation.zero_inputs, 0)
        elif operation.operator in NEVER_ZERO:
            given = operation.zero_inputs if operation.operator == "div" else 0
            lost = max(counts.zeros - zeros.get(key, given), 0)
        small = _tiny(counts) * nonzero(counts)
        of = nonzero(counts) + lost
        if of and (lost + small) / of > MUCH:
            found.append(((lost + small) / of, operation))
    return [operation for _, operation in sorted(found, key=lambda pair: -pair[0])]


def small_gradients(seen: Observation) -> tuple[float, float] | None:
    """Return the share of a step's nonzero FP16 gradients below 2^-14, if it is high and the loss scale can be raised.

    With the share, in [0, 1], comes the largest power of two by which the loss scale can be multiplied without
    overflow. None if at most half of them are so small, the step is not finite, or the scale cannot be doubled.
    """
    counts = merged(one for operation in seen.of("backward") for one in operation.outputs if one.dtype == "float16")
    share = _tiny(counts)
    room = 2.0 ** math.floor(headroom(counts.largest)) if counts.largest else 1.0
    return (share, room) if share > MUCH and seen.finite and room >= 2 else None


def module_rows(seen: Observation, causes: Iterable[Finding] | None = None) -> tuple[ModuleRow, ...]:
    """Return the rows of the table of modules in a diagnosis: value ranges of each module in a training step.

    Modules with operators of their own come in the order of the forward pass, the loss last. ``causes`` mark the
    modules that fail; None finds them without a comparison with FP32.
    """
    wrong = {
        module: cause.phase
        for cause in reversed(tuple(find_causes(seen) if causes is None else causes))
        if cause.phase
        for module in (cause.where if cause.operator else cause.where[:1])
    }
    rows = []
    for name in [*seen.calls, LOSS]:
        own = [operation for operation in seen.operations if operation.module == name]
        if not own:
            continue
        largest = max((counts for operation in own for counts in operation.outputs), key=total)
        rows.append(
            ModuleRow(
                name=name,
                type=seen.types.get(name, ""),
                calls=seen.calls.get(name, 0),
                dtype=largest.dtype,
                forward=_reach(own, "forward"),
                backward=_reach(own, "backward"),
                breaks=wrong.get(name, ""),
            )
        )
    return tuple(rows)


def _reach(operations: list[Operation], phase: str) -> ValueRange | None:
    several = [one for operation in operations if operation.phase == phase for one in operation.outputs]
    if not several:
        return None
    counts = merged(several)
    count = total(counts)
    return ValueRange(counts.largest, _tiny(counts), counts.zeros / count if count else 0.0, counts.inf, counts.nan)


def _tiny(counts: ExponentCounts) -> float:
    return subnormal_share(counts) + below_tiniest_share(counts)


def only_zeros(rows: tuple[ModuleRow, ...]) -> list[str]:
    """Return a sentence on the modules that only zero gradients reach; empty if there is none."""
    names = [row.name for row in rows if row.type and row.backward and row.backward.zero == 1.0]
    return [f"only zero gradients reach {listed([label(name) for name in names])}"] if names else []


def _functions(seen: Observation) -> list[str]:
    sentences = []
    for function in seen.functions:
        where, gives = f"{function.name} in {describe_module(seen, function.module)}", function.gives
        sentences += [
            f"{where} returns a gradient in {source} for an input in {to}, and autograd casts it: the function "
            "computes in another dtype than the model"
            for source, to in dict.fromkeys(function.corrected)
        ]
        if function.takes and gives and not set(gives) <= set(function.takes):
            dtypes = f"{' and '.join(gives)} for {' and '.join(function.takes)}"
            sentences.append(f"{where} returns {dtypes}: the following operators compute in {gives[0]}")
    return _abridged(sentences, "custom functions")


def _underflow(seen: Observation, exact: Observation | None) -> list[str]:
    sentences = []
    for operation in underflows(seen, exact):
        counts = merged(operation.outputs)
        small, zero = percent(_tiny(counts)), percent(counts.zeros / total(counts))
        sentences.append(
            f"{operator_name(operation)} in {describe_module(seen, operation.module)} loses values to FP16 underflow: "
            f"{small} of its nonzero results are below 2^-14, {zero} of all are zero"
        )
    return _abridged(sentences, "operators lose values to underflow")


def _gradients(seen: Observation) -> list[str]:
    small = small_gradients(seen)
    if small is None:
        return []
    share, room = small
    return [
        f"{percent(share)} of the nonzero FP16 gradients are below 2^-14 at loss scale "
        f"{scale_in_words(seen.loss_scale)}; the scale can be multiplied by {scale_in_words(room)} before the largest "
        "gradient overflows"
    ]


def _close(seen: Observation) -> list[str]:
    """Return notes on modules that handle values close to the largest FP16 number, normalisation layers first."""
    if not all(operation.finite for operation in seen.of("forward")):
        return []  # values are too large already
    reached: dict[str, float] = {}
    for operation in seen.of("forward"):
        sizes = [counts.largest for counts in operation.outputs if counts.dtype == "float16"]
        if operation.inputs == ("float16",):  # the largest of all inputs is known, not whose it is
            sizes.append(operation.largest_input)
        reached[operation.module] = max([reached.get(operation.module, 0.0), *sizes])
    close = sorted(((size, name) for name, size in reached.items() if size >= CLOSE * FLOAT16.max and name != LOSS))
    close.sort(key=lambda pair: (seen.types.get(pair[1]) not in NORMS, -pair[0]))
    sentences = [
        f"{describe_module(seen, name)} has FP16 values up to {size:,.0f}, {percent(size / FLOAT16.max)} of 65,504"
        for size, name in close
    ]
    return _abridged(sentences, "modules come close to the end of FP16's range")


_WHY = {
    "frozen": "frozen and not trained",
    "no_learner": "in no learner and not trained",
    "no_gradient": "without a gradient and not trained",
}


def _untrained(seen: Observation) -> list[str]:
    return [
        f"{len(names)} of the parameters {'is' if len(names) == 1 else 'are'} {why}: {listed(names)}"
        for kind, why in _WHY.items()
        if (names := seen.untrained.get(kind, []))
    ]


def _abridged(sentences: list[str], what: str) -> list[str]:
    more = len(sentences) - _MOST
    return sentences[:_MOST] + ([f"{more} more {what}; see the table"] if more > 0 else [])
