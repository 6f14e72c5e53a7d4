"""Observer of every operator of a forward and a backward pass: in which module, in which dtypes, how large its results were.

It looks and never touches: what is computed has the same bits with it and without. It reads every result on the host,
so it is for one step that somebody asked about, not for training.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from mptrain.numerics.exponent_counts import count_exponents, read_counts
from mptrain.precision.census import Observed, Pass, cast_of, computes, current_pass, dtype_names, floating_in
from mptrain.precision.upcast import EagerMode, Products
from mptrain.probe.module_trail import ModuleCall, ModuleTrail
from mptrain.records import ExponentCounts
from mptrain.torch_private import current_autograd_node, input_metadata, number_of_node


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of a pass.

    Attributes:
        phase: ``forward`` or ``backward``.
        module: The module it belongs to: a qualified name, empty for the model itself, or `LOSS`.
        function: The custom autograd function whose backward it is in; empty where there is none.
        operator: Its name in torch.
        inputs: The floating dtypes that went in, each once.
        outputs: What came out: one for each floating tensor.
        finite_inputs: Neither a tensor nor a number that went in was infinite or NaN.
        largest_input: The largest finite magnitude that went in.
        zero_inputs: How many of the values that went in were zero.
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

    @property
    def finite(self) -> bool:
        """Nothing that came out is infinite or NaN."""
        return not any(counts.inf or counts.nan for counts in self.outputs)

    @property
    def breaks(self) -> bool:
        """True where all inputs are finite and an output is not."""
        return self.finite_inputs and not self.finite

    @property
    def kind(self) -> str:
        """``inf`` where something that came out is infinite, else ``NaN``."""
        return "inf" if any(counts.inf for counts in self.outputs) else "NaN"


@dataclass
class CustomFunction:
    """A custom autograd function (`torch.autograd.Function`) that was called.

    Attributes:
        name: Of its node in the graph: the class's name with ``Backward`` behind it.
        module: Where it was called.
        takes: The dtypes of those of its inputs that get a gradient.
        gives: The dtypes of its outputs.
        corrected: Gradients that it returned in another dtype than that of the input, and that autograd cast: from, to.
    """

    name: str
    module: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    corrected: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OperatorError:
    """An operator that torch refused: what was raised, where.

    Attributes:
        phase: ``forward`` or ``backward``.
        module: As in `Operation`.
        function: As in `Operation`.
        operator: Its name; empty where no operator was reached.
        inputs: The dtypes that were to go in.
        message: The first line of what was raised, with the exception's name.
    """

    phase: Pass
    module: str
    function: str
    operator: str
    inputs: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class NonfiniteTensor:
    """A tensor that holds something else than finite numbers.

    Attributes:
        name: Of the tensor of a batch, of a parameter or a buffer.
        kind: ``inf`` or ``nan``.
        samples: In which samples of a batch, by place; empty for weights.
        widely_finite: The same values were finite in FP32, before they were cast to what the model takes.
    """

    name: str
    kind: str
    samples: tuple[int, ...] = ()
    widely_finite: bool = False


@dataclass(frozen=True)
class Observation:
    """A forward and a backward pass of one learner, without an update.

    Attributes:
        learner: Its name.
        step: Which attempt it is, or would be.
        loss_scale: What the loss was multiplied by.
        loss: Unscaled; NaN where torch refused an operator before there was one.
        samples: Of the batch.
        operations: Every operator, in order.
        calls: How often each module was called, in the order of their first calls.
        ended: Every call of a module, in the order in which they ended.
        types: The class of each module.
        functions: Custom autograd functions.
        refusal: What torch refused; None if the passes came to their end.
        inputs: What of the batch is not finite.
        weights: What of parameters and buffers is not finite.
        largest_weight: The largest finite magnitude among the parameters, and its name.
        gradients: Parameters whose gradients are not finite: name and kind.
        untrained: `mptrain.engine.rehearsal.Rehearsal.untrained`.
        census: `mptrain.precision.census.OperatorCensus.table`.
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
        """The step could be applied: its loss and all gradients are finite."""
        return self.refusal is None and math.isfinite(self.loss) and not self.gradients

    def of(self, phase: str) -> list[Operation]:
        """The operators of one pass."""
        return [operation for operation in self.operations if operation.phase == phase]


class ModuleObserver(EagerMode):
    """A dispatch mode that knows the module at work.

    Args:
        trail: Knows it; follow it on the model that is observed.
    """

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trail = trail

    def inside(self, products: Products) -> Products:
        """A choice of kernels with this observer in front of it, so that it sees what is asked of them."""
        return Observed(self, products)


class Observer(ModuleObserver):
    """Keeps what it sees of one pass forward and backward.

    Args:
        trail: Knows the module at work; follow it on the model that is observed.

    Attributes:
        operations: In the order in which they were computed.
        functions: The custom autograd functions that took part, once each for module and name.
        refusal: The operator that raised, if one did.
    """

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__(trail)
        self.operations: list[Operation] = []
        self.functions: dict[tuple[str, str], CustomFunction] = {}
        self.refusal: OperatorError | None = None
        self._explored = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        phase, function = current_pass(), self._function()
        given = list(floating_in((args, kwargs)))
        wanted = bool(given) and (computes(func) or func.overloadpacket.__name__ == "_to_copy")
        # Before it is changed in place.
        finite, largest, zeros = _operands(given, args, kwargs) if wanted else (True, 0.0, 0)
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
                seen = Operation(phase, module, function, name, inputs, outputs, finite, largest, zeros)
                self.operations.append(seen)
        return result

    def _function(self) -> str:
        """The custom autograd function whose backward is running; looks for all of them once the first node runs."""
        node: Any = current_autograd_node()
        if node is None:
            self._explored = False  # the next backward pass has another graph
            return ""
        if not self._explored:
            self._explored = True
            for one in _custom_nodes(node):
                self._describe(one)
        return str(node.name()) if _is_custom(node) else ""

    def _describe(self, node: Any) -> None:
        known = self._named(node.name(), self.trail.of_node(number_of_node(node)))
        takes = [input_metadata(after)[at].dtype for after, at in node.next_functions if after is not None]
        gives = [one.dtype for one in input_metadata(node) if one is not None]
        known.takes, known.gives = _names(takes), _names(gives)

    def _named(self, name: str, module: str) -> CustomFunction:
        return self.functions.setdefault((name, module), CustomFunction(name, module, (), ()))


def one_line(error: BaseException) -> str:
    """An exception's name and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _names(dtypes: list[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _operands(tensors: list[torch.Tensor], *arguments: Any) -> tuple[bool, float, int]:
    """Return whether all that goes into an operator is finite, plain numbers included; its largest magnitude; how much is zero.

    So filling with -inf, as a mask of attention does, does not count as making it.
    """
    finite, largest, zeros = all(math.isfinite(number) for number in _numbers(arguments)), 0.0, 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        zeros += tensor.numel() - int(tensor.count_nonzero())
        low, high = (abs(value.item()) for value in tensor.detach().float().aminmax())  # waits for the device
        if math.isfinite(low) and math.isfinite(high):
            largest = max(largest, low, high)
        else:
            finite = False
            largest = max(largest, read_counts(count_exponents(tensor).tolist(), tensor.dtype).largest)
    return finite, largest, zeros


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
    """The nodes of custom autograd functions below a node of the graph."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if _is_custom(node):
            yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


#: Modules of torch's and ours that stand between an operator and who asked for it.
_BETWEEN = (
    *("torch._dynamo", "torch._compile", "torch.utils._python_dispatch", "torch._ops", "mptrain.precision"),
    __name__,
)


def _asked_by_autograd() -> bool:
    """Return whether autograd itself asked for the operator, rather than the Python code of a custom function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_BETWEEN):
            return name == "torch.autograd.graph"
        frame = frame.f_back
    return True  # on a thread of autograd's own, as on a GPU
