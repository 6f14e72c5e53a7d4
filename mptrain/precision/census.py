"""Counts the operators of a step by what they were computed in: is the softmax in FP32, why is there no speed-up?

It sees what is asked of torch, before a choice of kernels widens anything. It changes nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch

from mptrain.precision.upcast import PRODUCTS, EagerMode, Products
from mptrain.torch_private import current_autograd_node

Pass = Literal["forward", "backward"]

aten = torch.ops.aten

#: Operators that compute nothing and are no views by torch's own account: their results are constants, are not written yet,
#: or share memory.
_NOTHING_COMPUTED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_",
        "as_strided_", "_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "_to_copy", "record_stream",
        "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "fill_", "zero_",
    }
)  # fmt: skip

#: Operators that copy, perhaps into another dtype.
_COPIES = frozenset({aten._to_copy.default, aten.copy_.default})


class Operator(NamedTuple):
    """An operator, as it was called in a step: the names of the floating dtypes that went in and came out."""

    phase: Pass
    name: str
    inputs: str
    outputs: str


class Cast(NamedTuple):
    """A copy of a tensor into another dtype."""

    phase: Pass
    from_dtype: str
    to_dtype: str


class OperatorCensus(EagerMode):
    """Counts operators on floating-point tensors by dtypes and pass, and casts apart from them.

    Attributes:
        operators: How often each was called; views and reservations of memory are left out.
        casts: How often tensors were copied into another dtype.
        products: Of products (of matrices, convolutions, attention, LSTM layers): operator name to operand dtype to
            number of calls.
        in_half: The operators that were called with half-precision tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[Operator] = Counter()
        self.casts: Counter[Cast] = Counter()
        self.in_half: set[Any] = set()
        self.products: dict[str, dict[torch.dtype, int]] = defaultdict(lambda: defaultdict(int))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            # The first alone: statistics among the others, such as an attention's, are FP32 in every mode.
            floating = (a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
            if (dtype := next(floating, None)) is not None:
                self.products[func.overloadpacket.__name__][dtype] += 1
        if (cast := cast_of(func, args, result)) is not None:
            self.casts[Cast(current_pass(), *cast)] += 1
        elif computes(func) and (inputs := dtype_names(floating_in((args, kwargs)))):
            if "float16" in inputs or "bfloat16" in inputs:
                self.in_half.add(func)
            outputs = dtype_names(floating_in(result))
            if outputs:
                name = func.overloadpacket.__name__
                self.operators[Operator(current_pass(), name, ", ".join(inputs), ", ".join(outputs))] += 1
        return result

    def inside(self, products: Products) -> Products:
        """A choice of kernels with this census in front of it, so that it sees what is asked of them."""
        return Observed(self, products)

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """``operators`` and ``casts`` as JSON values, the most frequent of each pass first."""
        return {
            "operators": [
                {"phase": one.phase, "operator": one.name, "inputs": one.inputs, "outputs": one.outputs, "calls": calls}
                for one, calls in _ranked(self.operators)
            ],
            "casts": [
                {"phase": one.phase, "from": one.from_dtype, "to": one.to_dtype, "calls": calls}
                for one, calls in _ranked(self.casts)
            ],
        }


class Observed(Products):
    """A choice of kernels with a dispatch mode in front of it.

    Args:
        mode: The mode; it sees what is asked of the kernels.
        products: The choice.
    """

    def __init__(self, mode: EagerMode, products: Products) -> None:
        super().__init__(products.operators)
        self.context = _Nested(products.context, mode)


class _Nested(AbstractContextManager[Any]):
    """Contexts that are entered one within the other, again and again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> _Nested:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def current_pass() -> Pass:
    """In which pass this thread is now: backward while a node of autograd's graph is evaluated."""
    return "forward" if current_autograd_node() is None else "backward"


def computes(func: Any) -> bool:
    """Whether an operator writes values, and into no list: those on lists are the engine's own, on gradients."""
    name = func.overloadpacket.__name__
    return not (func.is_view or name in _NOTHING_COMPUTED or name.startswith("_foreach_"))


def cast_of(func: Any, args: tuple[Any, ...], result: Any) -> tuple[str, str] | None:
    """From which dtype to which an operator casts; None where it does not, or no floating-point tensor is concerned."""
    if func not in _COPIES or not isinstance(result, torch.Tensor):
        return None
    source = args[1] if func is aten.copy_.default else args[0]
    if source.dtype == result.dtype or not (source.is_floating_point() or result.is_floating_point()):
        return None
    return dtype_name(source), dtype_name(result)


def floating_in(values: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors among arguments or results, inside of sequences and mappings too."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from floating_in(value)
    elif isinstance(values, Mapping):
        yield from floating_in(list(values.values()))


def dtype_names(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The names of their dtypes, each once, in their order."""
    return tuple(dict.fromkeys(dtype_name(tensor) for tensor in tensors))


def dtype_name(tensor: torch.Tensor) -> str:
    """``float16``, ``float32`` ..."""
    return str(tensor.dtype).removeprefix("torch.")


def _ranked(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Forward before backward, then by number of calls, then by name."""
    return sorted(counts.items(), key=lambda item: (item[0].phase == "backward", -item[1], item[0]))
