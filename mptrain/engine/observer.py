"""Observer of every operator of a step, to find where inf or NaN first appears, and the classes of overflows.

Results are bit for bit the same with and without it. It reads every result on the host, so it is meant for single steps
under diagnosis, not for training.

Dynamic loss scaling overflows by design: at the start, while the scale descends from its first value, and whenever
growth tries a higher one. These overflows are no failures. They are labelled so that the others stand out:

- *calibrating*: no scale has lasted `SETTLED` clean steps in a row yet; or the scale has never grown, so that it is
  still descending from its first value, and none has lasted `DESCENDED` clean steps.
- *growth probe*: after calibration, if the current scale was reached by growth.
- *unexpected*: any other overflow. An overflow that a lower scale cannot fix is always unexpected: the loss itself is
  not finite, or the scale is at its floor (a static scale always is).

A scale that starts at 2^16 may overflow at steps 1, 66 and 81, each time because the gradients are larger than ever
before. A rule that grows after 2,000 clean steps accepts one overflow in 2,000 steps. Until a scale has lasted that
long, an overflow therefore means that the scale is still descending.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from mptrain.engine.module_trail import ModuleCall, ModuleTrail
from mptrain.numerics.formats import FLOAT32
from mptrain.numerics.tensors import count_exponents, read_counts, widened
from mptrain.precision.census import Observed, Pass, cast_of, computes, current_pass, dtype_names, floating_in
from mptrain.precision.upcast import EagerMode, Products
from mptrain.system.records import MAX_TENSORS, ExponentCounts, Phase
from mptrain.system.torch_private import current_autograd_node, input_metadata, number_of_node


@dataclass(frozen=True, slots=True)
class Operation:
    """Call of a torch operator in a forward or backward pass, with the exponents of its results.

    Attributes:
        module: Qualified name of the module that it belongs to; empty for the model itself, `LOSS` outside all modules.
        function: Name of the custom autograd function whose backward called it; empty if none did.
        operator: Name of the operator in torch, such as ``addmm``.
        inputs: Names of the floating-point dtypes of the inputs, each once.
        outputs: Exponent counts of each floating-point output.
        finite_inputs: All tensors and numbers among the inputs are finite.
        largest_input: Largest finite magnitude of the inputs.
        zero_inputs: Number of zeros in the inputs.
        nan_inputs: An input contains NaN, or an earlier operator overflowed, so that NaN may follow.
    """

    phase: Pass
    module: str
    function: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[ExponentCounts, ...]
    finite_inputs: bool
    largest_input: float
    zero_inputs: int = 0
    nan_inputs: bool = True

    @property
    def finite(self) -> bool:
        """True if no output of the operator contains inf or NaN."""
        return not any(counts.inf or counts.nan for counts in self.outputs)

    @property
    def breaks(self) -> bool:
        """True if this operator produces inf or NaN: from finite inputs, or NaN from infinities, as 0 * inf does."""
        makes_nan = not self.nan_inputs and any(counts.nan for counts in self.outputs)
        return makes_nan or (self.finite_inputs and not self.finite)

    @property
    def given(self) -> str:
        """Description of the inputs, as part of a sentence about an operator that `breaks`."""
        return f"finite inputs up to {self.largest_input:.3g}" if self.finite_inputs else "infinite inputs"

    @property
    def kind(self) -> str:
        """Kind of a non-finite output: ``inf`` if an output contains infinities, else ``NaN``."""
        return "inf" if self.finite_inputs and any(counts.inf for counts in self.outputs) else "NaN"


@dataclass
class CustomFunction:
    """Custom autograd function (`torch.autograd.Function`) that was called in an observed step, with its dtypes.

    ``name`` is that of its graph node: the class followed by ``Backward``. ``takes`` has the dtypes of the inputs that
    get a gradient, ``gives`` those of the outputs, ``corrected`` source and target dtype of each gradient that autograd
    cast because its dtype was not that of the input.
    """

    name: str
    module: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    corrected: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OperatorError:
    """Exception raised by an operator in an observed forward or backward pass, with the names of `Operation`.

    ``operator`` is empty if the exception was raised outside any operator. ``message`` is the name of the exception and
    the first line of its message.
    """

    phase: Pass
    module: str
    function: str
    operator: str
    inputs: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class NonfiniteTensor:
    """Tensor of a batch or a model (parameter or buffer) that contains ``inf`` or ``nan``.

    ``samples`` are the affected ones of a batch. ``widely_finite`` values were finite in FP32, before the cast to the
    input dtype of the model.
    """

    name: str
    kind: str
    samples: tuple[int, ...] = ()
    widely_finite: bool = False


@dataclass(frozen=True)
class Observation:
    """Observation of one forward and backward pass of one learner, without an update.

    Attributes:
        loss: Unscaled loss; NaN if an operator raised an exception before the loss was computed.
        operations: Operator calls of both passes, in order.
        calls: Number of calls of each module in the forward pass, in the order of the first calls.
        ended: Module calls in the order in which they ended.
        types: Class name of each module.
        refusal: Exception that an operator raised; None if both passes completed.
        inputs: Tensors of the batch that are not finite; ``weights`` are such parameters and buffers.
        largest_weight: Largest finite magnitude of the parameters, and the name of that parameter.
        gradients: Name and kind (``inf`` or ``nan``) of each parameter whose gradient is not finite.
        untrained: Names of the parameters that are not trained, by reason.
        census: Result of `mptrain.precision.census.OperatorCensus.table`.
    """

    learner: str
    step: int
    loss_scale: float
    loss: float
    samples: int
    operations: tuple[Operation, ...]
    calls: Mapping[str, int]
    ended: tuple[ModuleCall, ...]
    types: Mapping[str, str]
    functions: tuple[CustomFunction, ...]
    refusal: OperatorError | None
    inputs: tuple[NonfiniteTensor, ...]
    weights: tuple[NonfiniteTensor, ...]
    largest_weight: tuple[float, str]
    gradients: tuple[tuple[str, str], ...]
    untrained: Mapping[str, list[str]]
    census: Mapping[str, list[dict[str, Any]]]

    @property
    def finite(self) -> bool:
        """True if the loss and all gradients are finite, so that an update could be applied."""
        return self.refusal is None and math.isfinite(self.loss) and not self.gradients

    def of(self, phase: str) -> list[Operation]:
        """Return the operator calls of one pass, ``forward`` or ``backward``, in order."""
        return [operation for operation in self.operations if operation.phase == phase]


def can_be_read(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have values: those on the meta device, with which torch derives others, have none."""
    return not any(tensor.is_meta for tensor in tensors)


class ModuleObserver(EagerMode):
    """Base class of modes that see every operator with its module; the caller enters `ModuleTrail.followed`."""

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trail = trail

    def inside(self, products: Products) -> Products:
        """Return a choice of kernels that lets this observer see every operator as called, before an upcast."""
        return Observed(self, products)


class Observer(ModuleObserver):
    """Dispatch mode that records all operators of one forward and backward pass, and an exception that one raises."""

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__(trail)
        self.operations: list[Operation] = []
        self.functions: dict[tuple[str, str], CustomFunction] = {}
        self.refusal: OperatorError | None = None
        self._explored = self._overflowed = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        phase, function = current_pass(), self._function()
        given = list(floating_in((args, kwargs)))
        wanted = bool(given) and can_be_read(given) and (computes(func) or func.overloadpacket.__name__ == "_to_copy")
        # Read before the operator changes an input in place.
        finite, largest, zeros, nan = _operands(given, args, kwargs) if wanted else (True, 0.0, 0, False)
        inputs, name = dtype_names(given), func.overloadpacket.__name__
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            self.refusal = OperatorError(phase, self.trail.module(), function, name, inputs, one_line(error))
            raise
        module = self.trail.module()
        if function and (cast := cast_of(func, args, result)) is not None and _asked_by_autograd():
            self._named(function, module).corrected.append(cast)
        if wanted:
            outputs = tuple(read_counts(count_exponents(t).tolist(), t.dtype) for t in floating_in(result))
            if outputs:
                seen = Operation(
                    phase, module, function, name, inputs, outputs, finite, largest, zeros, nan or self._overflowed
                )
                self.operations.append(seen)
                self._overflowed |= seen.breaks  # NaN follows from it
        return result

    def _function(self) -> str:
        """Return the custom autograd function whose backward is running, and register all of them at the first node."""
        node: Any = current_autograd_node()
        if node is None:
            self._explored = False  # the next backward pass has a new graph
            return ""
        if not self._explored:
            self._explored = True
            for custom_node in _custom_nodes(node):
                self._describe(custom_node)
        return str(node.name()) if _is_custom(node) else ""

    def _describe(self, node: Any) -> None:
        known = self._named(node.name(), self.trail.of_node(number_of_node(node)))
        takes = [input_metadata(after)[at].dtype for after, at in node.next_functions if after is not None]
        gives = [metadata.dtype for metadata in input_metadata(node) if metadata is not None]
        known.takes, known.gives = _names(takes), _names(gives)

    def _named(self, name: str, module: str) -> CustomFunction:
        return self.functions.setdefault((name, module), CustomFunction(name, module, (), ()))


def one_line(error: BaseException) -> str:
    """Return the class name of an exception and the first line of its message: ``ValueError: no such key``."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _names(dtypes: list[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _operands(tensors: list[torch.Tensor], *arguments: Any) -> tuple[bool, float, int, bool]:
    """Return whether all inputs are finite, their largest finite magnitude, their number of zeros, and any NaN.

    Plain numbers count as inputs, so that filling an attention mask with -inf is not an operator that produces inf.
    """
    numbers = list(_numbers(arguments))
    finite, largest, zeros, nan = all(map(math.isfinite, numbers)), 0.0, 0, any(map(math.isnan, numbers))
    for tensor in tensors:
        if not tensor.numel():
            continue
        zeros += tensor.numel() - int(widened(tensor).count_nonzero())
        low, high = (abs(value.item()) for value in tensor.detach().float().aminmax())  # waits for the device
        if math.isfinite(low) and math.isfinite(high):
            largest = max(largest, low, high)
        else:
            finite, nan = False, nan or math.isnan(low)
            largest = max(largest, read_counts(count_exponents(tensor).tolist(), tensor.dtype).largest)
    return finite, largest, zeros, nan


def _numbers(values: Any) -> Iterator[float]:
    if isinstance(values, float):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, dict):
        yield from _numbers(list(values.values()))


def _is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _custom_nodes(root: Any) -> Iterator[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if _is_custom(node):
            yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


#: Modules of torch and mptrain on the stack between an operator and its caller.
_BETWEEN = (
    *("torch._dynamo", "torch._compile", "torch.utils._python_dispatch", "torch._ops", "mptrain.precision"),
    __name__,
)


def _asked_by_autograd() -> bool:
    """Return whether autograd itself called the operator, rather than the Python code of a custom function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_BETWEEN):
            return name == "torch.autograd.graph"
        frame = frame.f_back
    return True  # in a thread of autograd, as on a GPU


#: Clean steps in a row after which a scale counts as settled, once it has grown.
SETTLED = 50

#: Clean steps in a row after which a scale that never grew counts as settled: the growth interval of
#: `torch.amp.GradScaler`.
DESCENDED = 2000


@dataclass
class OverflowHistory:
    """Record of one learner's overflows and clean steps, from which the next overflow is classified.

    Attributes:
        floor: Lowest loss scale that the scaler can reach.
        consecutive: Current number of overflows in a row; ``clean`` is that of clean steps.
        settled: A scale has lasted `SETTLED` clean steps.
        descended: The descent from the first scale is over: a scale has lasted `DESCENDED` clean steps, or has grown.
        grown: The current scale was reached by growth.
    """

    floor: float = 0.0
    consecutive: int = 0
    clean: int = 0
    settled: bool = False
    descended: bool = False
    grown: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def observe(self, *, overflow: bool, loss: float, scale: float, next_scale: float) -> Phase | None:
        """Add a training step, with its unscaled loss, and return the phase of its overflow; None without overflow."""
        phase: Phase | None = None
        if overflow:
            if not math.isfinite(loss) or scale <= self.floor * (1 + FLOAT32.epsilon):  # scales are rounded to FP32
                phase = "unexpected"
            else:
                calibrated = self.settled and self.descended
                phase = "calibrating" if not calibrated else "growth probe" if self.grown else "unexpected"
            self.counts[phase] = self.counts.get(phase, 0) + 1
            self.consecutive += 1
            self.clean = 0
        else:
            self.consecutive = 0
            self.clean += 1
            self.settled = self.settled or self.clean >= SETTLED
            self.descended = self.descended or self.clean >= DESCENDED
        if next_scale != scale:
            self.grown = next_scale > scale
            self.descended = self.descended or self.grown
        return phase

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values by name, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, saved: Mapping[str, Any], floor: float) -> OverflowHistory:
        """Return the history that a checkpoint has saved, with the present scaler's floor."""
        return cls(**{**saved, "floor": floor})


def nonfinite_parameters(names: Sequence[str], norms: Sequence[float]) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return the number of parameters with non-finite gradients, and name and kind of the first `MAX_TENSORS`.

    ``nan`` means NaN elements or infinities of both signs.
    """
    nonfinite = [
        (name, "nan" if math.isnan(norm) else "inf")
        for name, norm in zip(names, norms, strict=True)
        if not math.isfinite(norm)
    ]
    return len(nonfinite), tuple(nonfinite[:MAX_TENSORS])


def boundary(names: Sequence[str], norms: Sequence[float]) -> tuple[str, str]:
    """Return the modules between which a backward pass ceased to be finite, or two empty names.

    ``names`` are in module order, and the backward pass goes through them from the last to the first. If the gradients
    of all parameters up to one are not finite and those of all later ones are, the modules of these two are returned. A
    norm of -1 stands for no gradient.
    """
    present = [
        (name, math.isfinite(norm)) for name, norm in zip(names, norms, strict=True) if norm >= 0 or norm != norm
    ]
    broken = sum(not finite for _, finite in present)
    if not 0 < broken < len(present) or any(finite for _, finite in present[:broken]):
        return "", ""
    before, after = (present[at][0].rpartition(".")[0] for at in (broken - 1, broken))
    return (before, after) if before != after else ("", "")
