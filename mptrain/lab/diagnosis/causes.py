"""Causes of a failed training step, their modules, and notes that are no failures, from an observation. Runs nothing.

A step fails at an operator that returns inf or NaN for finite inputs; later operators only pass the values on. A step
may have several such operators that do not feed one another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from mptrain.engine.module_trail import LOSS
from mptrain.engine.observer import Observation, Operation, OperatorError
from mptrain.lab.finding import CLOSE, Finding, label, operator_name, precise_percent
from mptrain.lab.step.accuracy import StepAccuracy
from mptrain.lab.step.module_tensors import HANDED, owner
from mptrain.lab.step.ranges import EPSILONS, ModuleScaling
from mptrain.numerics.exponents import below_tiniest_share, headroom, merged, nonzero, subnormal_share, total
from mptrain.numerics.formats import FLOAT16
from mptrain.precision.policy import NORMS
from mptrain.runlog.diagnosis_file import ModuleRow, ValueRange
from mptrain.system.records import ExponentCounts
from mptrain.system.words import listed, scale_in_words

#: Module, operator, pass, and index among the calls with the same three.
Key = tuple[str, str, str, int]


def first_cause(seen: Observation) -> Finding:
    """Return the first cause of a step's failure (`find_causes`), or a finding of kind ``none`` if there is none."""
    return next(iter(find_causes(seen)), no_fault(seen))


def no_fault(seen: Observation, accuracy: StepAccuracy | None = None) -> Finding:
    """Return the finding of kind ``none``, which tells the user that a training step is correct.

    ``accuracy`` is a comparison of the step with FP64, if there is one.
    """
    at = f"at loss scale {scale_in_words(seen.loss_scale)}" if seen.loss_scale != 1 else "without a loss scale"
    finite = f"step {seen.step:,} is finite, forward and backward, {at}"
    if accuracy is None:
        return Finding("none", (), finite)
    if (module := accuracy.ill_conditioned) is not None:
        far = f"FP32 itself is far from FP64 in {describe_module(seen, module)}: not a problem of half precision"
        return Finding("none", (module,), f"{finite}; but {far}")
    return Finding("none", (), f"{finite}; {describe_errors(accuracy)}")


def find_causes(seen: Observation, exact: Observation | None = None) -> tuple[Finding, ...]:
    """Return all causes of a training step's failure, in the order of the passes, without consequences of other causes.

    A failure in the backward pass of a module that already fails in the forward pass is a consequence. If the batch or
    the weights are not finite, no other cause is reported. ``exact`` is an observation of the same step in FP32: if
    that is finite, operators that return inf or NaN there too are taken as intended and ignored.
    """
    causes: list[Finding] = []
    if seen.inputs:
        causes.append(Finding("input", (), _input(seen)))
    if seen.weights:
        weights = listed([f"{tensor.name} ({tensor.kind})" for tensor in seen.weights])
        causes.append(Finding("weights", (), f"the weights are not finite: {weights}"))
    if causes:
        return tuple(causes)
    causes += _forward(seen, exact)
    broken = {module for cause in causes for module in cause.where}
    if seen.refusal is not None:
        return (_refused(seen, seen.refusal), *causes)
    if not math.isfinite(seen.loss):
        return tuple(causes) or (_handed_on(seen),)
    return (*causes, *(cause for cause in _backward(seen, exact, causes) if cause.module not in broken))


def compare_with_fp32(
    seen: Observation, causes: tuple[Finding, ...], accuracy: StepAccuracy, lost: Sequence[Operation]
) -> tuple[Finding, ...]:
    """Return the causes of failure of a step with a finite loss, revised by a comparison of its values with FP64.

    Infinities of the forward pass are no cause if all outputs are correct and all gradients finite. A wrong output is a
    cause unless an earlier module is. Wrong gradients of a finite step are a cause as well. ``lost`` are the operator
    calls of the forward pass that lose values to underflow, the worst first.
    """
    forward = [cause for cause in causes if cause.phase == "forward"]
    others = [cause for cause in causes if cause.phase != "forward"]
    wrong = accuracy.wrong_output
    if wrong is not None:
        off, module = _off(seen, wrong, accuracy), owner(wrong)
        order = {name: at for at, name in enumerate(seen.calls)}
        until = wrong.rpartition(HANDED)[2]  # the module, or the one to which it hands the wrong values
        last = max((at for name, at in order.items() if f"{name}.".startswith(f"{until}.")), default=0)
        before = [cause for cause in forward if order.get(cause.module or "", 0) <= last]
        if before:
            at = forward.index(before[0])
            forward[at] = replace(before[0], what=f"{before[0].what}: {off}")
        else:
            inexact = accuracy.operator
            first = (
                f"; rounding {inexact.operator} alone makes it {precise_percent(inexact.error)} wrong"
                if inexact
                else ""
            )
            what, operator = f"{off}{first}; all its values are finite", inexact.operator if inexact else ""
            kind = "loss" if module == LOSS else "forward"
            forward.insert(0, Finding(kind, (module,), what, operator=operator, phase="forward"))
        return (*forward, *others)
    if not seen.finite and not others:  # non-finite gradients are a consequence of the forward pass
        return tuple(forward)
    ruined = accuracy.ruined_output([operation.module for operation in lost])
    if ruined is not None:
        worst = lost[0]
        loses = f"loses values to FP16 underflow: {_off(seen, ruined, accuracy)}"
        what = f"{operator_name(worst)} in {describe_module(seen, worst.module)} {loses}"
        return (Finding("forward", (worst.module,), what, operator=worst.operator, phase="forward"), *others)
    if seen.finite and seen.loss_scale != 1 and (moving := accuracy.disproportionate):
        those = listed([describe_module(seen, scaling.name) for scaling in moving])
        what = f"the gradients of {those} are not proportional to the loss scale, not even in FP32"
        others.append(_in_backward(seen, what, accuracy.breaks or (moving[0].name,)))
    elif seen.finite and (gradients := accuracy.wrong_gradients):
        others.append(_inexact(seen, gradients, accuracy))
    return tuple(others)


def first_break(seen: Observation, phase: str) -> Operation | None:
    """Return the first operator call of a pass that returns inf or NaN for finite inputs; None if there is none.

    ``phase`` is ``forward`` or ``backward``.
    """
    return next((operation for operation in seen.of(phase) if operation.breaks), None)


def numbered(operations: Iterable[Operation]) -> Iterator[tuple[Key, Operation]]:
    """Yield operator calls with keys that identify the same call in another precision.

    A key is the module, the operator, the pass, and the index among the calls with the same three.
    """
    met: Counter[tuple[str, str, str]] = Counter()
    for operation in operations:
        name = (operation.module, operation.operator, operation.phase)
        yield (*name, met[name]), operation
        met[name] += 1


def describe_module(seen: Observation, module: str) -> str:
    """Return the name and class of a module for display, such as ``layers.0 (Linear)``, or ``the loss`` for `LOSS`."""
    return "the loss" if module == LOSS else f"{label(module)} ({seen.types.get(module, '?')})"


def describe_errors(accuracy: StepAccuracy) -> str:
    """Return the largest errors of a step, all explained by rounding, as a clause, or its doubt."""
    outputs, gradients = accuracy.largest_errors
    if accuracy.doubt:
        return accuracy.doubt
    return f"outputs are within {precise_percent(outputs)} of FP32, gradients within {precise_percent(gradients)}"


def _input(seen: Observation) -> str:
    parts = []
    for tensor in seen.inputs:
        indices = ", ".join(map(str, tensor.samples[:5])) + (" ..." if tensor.samples[5:] else "")
        where = f" in {len(tensor.samples)} of {seen.samples} samples (index {indices})" if tensor.samples else ""
        parts.append(f"{tensor.name} contain {tensor.kind}{where}")
    wide = any(tensor.widely_finite for tensor in seen.inputs)
    cast = "; the values are finite in FP32 but too large for the input dtype of the model" if wide else ""
    return f"the batch itself is not finite: {'; '.join(parts)}{cast}"


def _refused(seen: Observation, refusal: OperatorError) -> Finding:
    function = f" within {refusal.function}" if refusal.function else ""
    operator = f"{refusal.operator} of {' and '.join(refusal.inputs)}" if refusal.operator else "the code"
    where = f"in the {refusal.phase} pass of {describe_module(seen, refusal.module)}{function}"
    what = f"{operator} raises an error {where}: {refusal.message}"
    return Finding("refused", (refusal.module,), what, operator=refusal.operator, phase=refusal.phase)


def _forward(seen: Observation, exact: Observation | None) -> list[Finding]:
    """Return the causes in the forward pass, one for each module class and operator."""
    shown = ""
    if math.isfinite(seen.loss):
        shown = "; the loss and the gradients stay finite"
        if not seen.finite:
            first = next((operation for operation in seen.of("backward") if not operation.finite), None)
            alone = first is not None and first.breaks
            shown = "; the loss stays finite" + ("" if alone else ", the gradients do not")
    causes: list[Finding] = []
    for group in _groups(seen, "forward", exact):
        kind = "loss" if group[0].module == LOSS else "forward"
        before = "the model's outputs are finite, the loss is not: " if kind == "loss" and not causes else ""
        causes.append(_broken(seen, kind, group, exact, before, shown))
    return causes


def _handed_on(seen: Observation) -> Finding:
    """Return the cause of a non-finite loss if no observed operator returns inf or NaN for finite inputs."""
    module = next((call.module for call in seen.ended if call.finite_inputs and not call.finite_output), None)
    if module is not None:
        what = f"{describe_module(seen, module)} returns non-finite values for finite inputs"
        return Finding("forward", (module,), what, phase="forward")
    return Finding("loss", (LOSS,), f"the model's outputs are finite, the loss is {seen.loss}", phase="forward")


def _backward(seen: Observation, exact: Observation | None, before: list[Finding]) -> list[Finding]:
    """Return the causes in the backward pass of a finite loss, one for each module class and operator."""
    if seen.finite:  # inf and NaN that reach no parameter have no effect
        return []
    causes: list[Finding] = []
    for group in _groups(seen, "backward", exact):
        how = "overflow" if group[0].kind == "inf" else "are not finite"
        begins = f"gradients {how}" if before or causes else f"only gradients {how}"
        causes.append(_broken(seen, "backward", group, exact, f"{begins}: "))
    if causes or before:
        return causes
    first = next((operation for operation in seen.of("backward") if not operation.finite), None)
    if first is not None:
        where = f"first in the backward pass of {describe_module(seen, first.module)}, in {operator_name(first)}"
        what = f"only gradients are not finite, {where}"
        return [Finding("backward", (first.module,), what, operator=first.operator, phase="backward")]
    name, kind = seen.gradients[0]
    what = f"only the gradient of {name} is {kind}, and only after the backward pass"
    return [Finding("backward", (name.rpartition(".")[0],), what, phase="backward")]


def _groups(seen: Observation, phase: str, exact: Observation | None) -> list[list[Operation]]:
    """Return the operators that return inf or NaN for finite inputs, grouped by name and module class."""
    meant = (
        {key for key, operation in numbered(exact.operations) if operation.breaks} if exact and exact.finite else set()
    )
    groups: dict[tuple[str, str, str], list[Operation]] = {}
    for key, operation in numbered(seen.operations):
        if operation.phase == phase and operation.breaks and key not in meant:
            kind = LOSS if operation.module == LOSS else seen.types.get(operation.module, operation.module)
            groups.setdefault((kind, operation.operator, operation.function), []).append(operation)
    return list(groups.values())


def _broken(
    seen: Observation, kind: str, group: list[Operation], exact: Observation | None, before: str, behind: str = ""
) -> Finding:
    first = group[0]
    modules = tuple(dict.fromkeys(operation.module for operation in group))
    more = f"; the same in {listed([label(name) for name in modules[1:]])}" if modules[1:] else ""
    again = exact is not None and any(
        operation.breaks and operation.operator == first.operator and operation.module == first.module
        for operation in exact.of(first.phase)
    )
    dtype = " and ".join(dict.fromkeys(counts.dtype for counts in first.outputs if counts.inf or counts.nan))
    function = f" within {first.function}" if first.function else ""
    backward, scale = "in", ""
    if first.phase == "backward":
        backward = "in the backward pass of"
        scale = f" at loss scale {scale_in_words(seen.loss_scale)}" if seen.loss_scale != 1 and not again else ""
    what = (
        f"{operator_name(first)} {backward} {describe_module(seen, first.module)}{function} returns {first.kind} in "
        f"{dtype}{' and in FP32' if again and dtype != 'float32' else ''}{scale} for {first.given}"
    )
    return Finding(kind, modules, f"{before}{what}{more}{behind}", operator=first.operator, phase=first.phase)


def _off(seen: Observation, boundary: str, accuracy: StepAccuracy) -> str:
    errors, allowed = accuracy.outputs[boundary], accuracy.allowed(boundary)
    module, handed, child = boundary.partition(HANDED)
    subject = f"the output of {describe_module(seen, module)}" if module != LOSS else "the value of the loss"
    if handed:
        subject = f"what {describe_module(seen, module)} computes and hands to {describe_module(seen, child)}"
    if not math.isfinite(errors.half):
        return f"{subject} is not finite, although it is in FP32"
    explained = f", rounding explains {precise_percent(allowed)}" if errors.half > allowed else ""
    if EPSILONS * accuracy.form.epsilon < errors.explained < math.inf:  # rounding errors grow
        explained = f" ({precise_percent(errors.explained)} with only weights, inputs and outputs rounded)"
    return f"{subject} is off by {precise_percent(errors.half)} against FP32{explained}"


def inexact(seen: Observation, accuracy: StepAccuracy) -> list[str]:
    """Return a sentence on gradients that are less exact than rounding explains but still good enough to train.

    The list is empty if there are no such gradients, or if some are too wrong to train.
    """
    gradients = accuracy.inexact_gradients
    return (
        [_inexact(seen, gradients, accuracy).what] if seen.finite and gradients and not accuracy.wrong_gradients else []
    )


def _inexact(seen: Observation, wrong: tuple[ModuleScaling, ...], accuracy: StepAccuracy) -> Finding:
    worst = max(wrong, key=lambda scaling: scaling.best)
    others = f"; so are those of {len(wrong) - 1} more modules" if len(wrong) > 1 else ""
    what = (
        f"the gradients of {describe_module(seen, worst.name)} are finite but off by {precise_percent(worst.best)} at "
        f"loss scale {scale_in_words(seen.loss_scale)}, rounding explains {precise_percent(worst.allowed)}{others}"
    )
    return _in_backward(seen, what, accuracy.breaks or (wrong[0].name,))


def _in_backward(seen: Observation, what: str, modules: tuple[str, ...]) -> Finding:
    where = listed([describe_module(seen, module) for module in modules])
    return Finding("backward", modules, f"{what}; the error arises in the backward pass of {where}", phase="backward")


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
    losing = []
    for key, operation in numbered(seen.of("forward")):
        counts = merged(output for output in operation.outputs if output.dtype == "float16")
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
            losing.append(((lost + small) / of, operation))
    return [operation for _, operation in sorted(losing, key=lambda pair: -pair[0])]


def small_gradients(seen: Observation) -> tuple[float, float] | None:
    """Return the share of a step's nonzero FP16 gradients below 2^-14, if it is high and the loss scale can be raised.

    With the share, in [0, 1], comes the largest power of two by which the loss scale can be multiplied without
    overflow. None if at most half of them are so small, the step is not finite, or the scale cannot be doubled.
    """
    counts = merged(
        output for operation in seen.of("backward") for output in operation.outputs if output.dtype == "float16"
    )
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
    several = [output for operation in operations if operation.phase == phase for output in operation.outputs]
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
        small, zero = precise_percent(_tiny(counts)), precise_percent(counts.zeros / total(counts))
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
        f"{precise_percent(share)} of the nonzero FP16 gradients are below 2^-14 at loss scale "
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
        f"{describe_module(seen, name)} has FP16 values up to {size:,.0f}, "
        f"{precise_percent(size / FLOAT16.max)} of 65,504"
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
