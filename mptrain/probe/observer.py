"""Sees every operator of a forward and a backward pass: in which module, in which dtypes, how large its results were.

It looks and never touches: what is computed has the same bits with it and without. It reads every result on the host,
so it is for one step that somebody asked about, not for training.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from mptrain.numerics.bits import count_exponents, read_counts
from mptrain.precision.census import Observed, Pass, cast_of, computes, current_pass, dtype_names, floating_in
from mptrain.precision.upcast import EagerMode, Products
from mptrain.probe.module_trail import Trail

if TYPE_CHECKING:
    from mptrain.records import ExponentCounts


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
        """What went in is finite and what came out is not."""
        return self.finite_inputs and not self.finite


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
class Refusal:
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


class Observer(EagerMode):
    """Keeps what it sees of one pass forward and backward.

    Args:
        trail: Knows the module at work; follow it on the model that is observed.

    Attributes:
        operations: In the order in which they were computed.
        functions: The custom autograd functions that took part, once each for module and name.
        refusal: The operator that raised, if one did.
    """

    def __init__(self, trail: Trail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trail = trail
        self.operations: list[Operation] = []
        self.functions: dict[tuple[str, str], CustomFunction] = {}
        self.refusal: Refusal | None = None
        self._explored = False

    def inside(self, products: Products) -> Products:
        """A choice of kernels with this observer in front of it, so that it sees what is asked of them."""
        return Observed(self, products)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        phase, function = current_pass(), self._function()
        given = list(floating_in((args, kwargs)))
        wanted = (computes(func) or func.overloadpacket.__name__ == "_to_copy") and bool(given)
        finite, largest, zeros = (
            _operands(given, args, kwargs) if wanted else (True, 0.0, 0)
        )  # before it is changed in place
        inputs = dtype_names(given)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            name = func.overloadpacket.__name__
            self.refusal = Refusal(phase, self.trail.module(), function, name, inputs, in_one_line(error))
            raise
        module = self.trail.module()
        if function and (cast := cast_of(func, args, result)) is not None and _asked_by_autograd():
            self._named(function, module).corrected.append(cast)
        if wanted:
            outputs = tuple(read_counts(count_exponents(t).tolist(), t.dtype) for t in floating_in(result))
            if outputs:
                name = func.overloadpacket.__name__
                self.operations.append(
                    Operation(phase, module, function, name, inputs, outputs, finite, largest, zeros)
                )
        return result

    def _function(self) -> str:
        """The custom autograd function whose backward is running; looks for all of them once the first node runs."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._explored = False  # the next backward pass has another graph
            return ""
        if not self._explored:
            self._explored = True
            for one in _custom_nodes(node):
                self._describe(one)
        return str(node.name()) if _is_custom(node) else ""

    def _describe(self, node: Any) -> None:
        known = self._named(node.name(), self.trail.of_node(node._sequence_nr()))
        takes = [after._input_metadata[at].dtype for after, at in node.next_functions if after is not None]
        gives = [one.dtype for one in node._input_metadata if one is not None]
        known.takes, known.gives = _names(takes), _names(gives)

    def _named(self, name: str, module: str) -> CustomFunction:
        return self.functions.setdefault((name, module), CustomFunction(name, module, (), ()))


def in_one_line(error: BaseException) -> str:
    """An exception's name and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _names(dtypes: list[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _operands(tensors: list[torch.Tensor], *arguments: Any) -> tuple[bool, float, int]:
    """Whether all that goes into an operator is finite, plain numbers included; its largest magnitude; how much is zero.

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
    "torch._dynamo",
    "torch._compile",
    "torch.utils._python_dispatch",
    "torch._ops",
    "mptrain.precision",
    __name__,
)


def _asked_by_autograd() -> bool:
    """Whether autograd itself asked for the operator, rather than the Python code of a custom function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_BETWEEN):
            return name == "torch.autograd.graph"
        frame = frame.f_back
    return True  # on a thread of autograd's own, as on a GPU
