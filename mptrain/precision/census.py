"""Census of the tensor operators of a training step by dtype, and the check that they follow the precision policy.

It records the operators as the model calls them, before `mptrain.precision.upcast` runs any of them in FP32, and does
not change results.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from mptrain.precision.apply import DTYPES
from mptrain.precision.upcast import PRODUCTS, EagerMode, Products
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.torch_private import Convolution, current_autograd_node, storage_key, written_tensors
from mptrain.system.words import listed

if TYPE_CHECKING:
    from mptrain.precision.policy import Policy


Pass = Literal["forward", "backward"]

aten = torch.ops.aten

_HALVES = ("float16", "bfloat16")

#: Operators that compute nothing but that torch does not mark as views: their results are constants, uninitialised or
#: share memory.
_NOTHING_COMPUTED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "set_",
        "as_strided_", "_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "_to_copy", "record_stream",
        "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "fill_", "zero_",
    }
)  # fmt: skip

#: Operators that copy a tensor, possibly to another dtype.
_COPIES = frozenset({aten._to_copy.default, aten.copy_.default})


class Operator(NamedTuple):
    """Kind of operator call in a step: ATen name without overload, distinct dtypes joined by commas."""

    phase: Pass
    name: str
    inputs: str
    outputs: str


class Cast(NamedTuple):
    """Kind of dtype conversion of a tensor in a training step, with dtypes by name, such as ``float32``."""

    phase: Pass
    from_dtype: str
    to_dtype: str


class Product(NamedTuple):
    """Kind of product (matrix product, convolution, attention, LSTM layer) in a step.

    ``dtype`` is that of the first operand. ``module`` called it in the forward pass or before its backward pass, in
    ``line`` of the code (``FILE:LINE``; empty in the backward pass). ``widened`` says whether an operand is, or is
    computed from, a half-precision tensor that the code itself cast to FP32.
    """

    name: str
    dtype: torch.dtype
    module: str
    line: str
    widened: bool = False


class OperatorCensus(EagerMode):
    """Dispatch mode that counts a step's operators on floating-point tensors by dtype and pass, and casts separately.

    Without ``current_module``, which returns the name of the module that runs, products have none.

    Attributes:
        operators: Number of calls of each operator that computes values, without views, allocations and casts.
        casts: Number of copies to another dtype.
        product_calls: Number of calls of products. Not counted are those by which autograd differentiates an operator
            that is none, such as a Cholesky decomposition.
        in_half: Operator overloads (``torch.ops.aten`` objects) called with half-precision tensors.
        written: Memory that operators wrote in place (`mptrain.system.torch_private.storage_key`).
    """

    def __init__(self, current_module: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[Operator] = Counter()
        self.casts: Counter[Cast] = Counter()
        self.in_half: set[Any] = set()
        self.written: set[int] = set()
        self.product_calls: Counter[Product] = Counter()
        self._current_module = current_module
        self._widened: set[int] = set()  # memory of tensors that the code cast to FP32, and of those computed from them

    @property
    def products(self) -> dict[str, dict[torch.dtype, int]]:
        """Number of calls of products by operator name and dtype of the first operand."""
        products: dict[str, dict[torch.dtype, int]] = {}
        for (name, dtype, *_), calls in self.product_calls.items():
            by_dtype = products.setdefault(name, {})
            by_dtype[dtype] = by_dtype.get(dtype, 0) + calls
        return products

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.written.update(storage_key(t.untyped_storage()) for t in written_tensors(func, args, kwargs or {}))
        if func in PRODUCTS and _is_own(current_autograd_node()):
            # Only the first tensor: others may be statistics, e.g. of attention, which are FP32 in every mode.
            floating = (a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
            if (dtype := next(floating, None)) is not None:
                name = func.overloadpacket.__name__
                location = self._current_module(), _calling_line()
                self.product_calls[Product(name, dtype, *location, self._is_widened(args))] += 1
        cast = cast_of(func, args, result)
        wide = cast[1] == "float32" and cast[0] in _HALVES if cast is not None else self._is_widened((args, kwargs))
        if not func.is_view:  # memory may have been another tensor's before
            memory = _memory(floating_in(result))
            (self._widened.update if wide else self._widened.difference_update)(memory)
        if cast is not None:
            self.casts[Cast(current_pass(), *cast)] += 1
        elif computes(func) and (inputs := dtype_names(floating_in((args, kwargs)))):
            if "float16" in inputs or "bfloat16" in inputs:
                self.in_half.add(func)
            outputs = dtype_names(floating_in(result))
            if outputs:
                name = func.overloadpacket.__name__
                self.operators[Operator(current_pass(), name, ", ".join(inputs), ", ".join(outputs))] += 1
        return result

    def _is_widened(self, values: Any) -> bool:
        return not self._widened.isdisjoint(_memory(t for t in floating_in(values) if t.dtype == torch.float32))

    def inside(self, products: Products) -> Products:
        """Return a choice of kernels whose context also enters this census, which sees operators before an upcast."""
        return Observed(self, products)

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """Return the counts as JSON values, forward before backward, within each the most frequent first.

        ``operators`` have ``phase``, ``operator``, ``inputs``, ``outputs`` and ``calls``; ``casts`` have ``phase``,
        ``from``, ``to`` and ``calls``.
        """
        return {
            "operators": [
                {"phase": op.phase, "operator": op.name, "inputs": op.inputs, "outputs": op.outputs, "calls": calls}
                for op, calls in _ranked(self.operators)
            ],
            "casts": [
                {"phase": cast.phase, "from": cast.from_dtype, "to": cast.to_dtype, "calls": calls}
                for cast, calls in _ranked(self.casts)
            ],
        }


class Observed(Products):
    """Choice of kernels whose context also enters a dispatch mode that sees each operator before an upcast."""

    def __init__(self, mode: EagerMode, products: Products) -> None:
        super().__init__(products.operators)
        self.calls = products.calls
        self.context = _Nested(products.context, mode)


class _Nested(AbstractContextManager[Any]):
    """Nested contexts that can be entered repeatedly."""

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


#: Products by the names that autograd gives to their nodes.
_NODES = frozenset(func.overloadpacket.__name__.replace("_", "") for func in PRODUCTS)


def _is_own(node: Any) -> bool:
    """Return whether a product that runs now is the code's own: forward, or the derivative of a product."""
    if node is None or isinstance(node, BackwardCFunction):
        return True
    return node.name().rpartition("::")[2].partition("Backward")[0].lower() in _NODES


def _calling_line() -> str:
    """Return the innermost line of the model's or task's code on the stack as ``FILE:LINE``; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package, _, rest = str(frame.f_globals.get("__name__", "")).partition(".")
        if package == "mptrain" and rest.startswith("engine"):  # called by the training step, as a backward pass is
            return ""
        if package != "torch" and (package != "mptrain" or rest.startswith("workloads")):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage_key(tensor.untyped_storage()) for tensor in tensors if tensor.layout == torch.strided}


def current_pass() -> Pass:
    """Return the pass that this thread executes: ``backward`` while autograd evaluates a node, else ``forward``."""
    return "forward" if current_autograd_node() is None else "backward"


def computes(func: Any) -> bool:
    """Return whether an operator of a model computes values, unlike views, allocations, fills, casts and foreach."""
    name = func.overloadpacket.__name__
    return not (func.is_view or name in _NOTHING_COMPUTED or name.startswith("_foreach_"))


def cast_of(func: Any, args: tuple[Any, ...], result: Any) -> tuple[str, str] | None:
    """Return the names of source and target dtype of an operator call that casts a floating-point tensor, else None."""
    if func not in _COPIES or not isinstance(result, torch.Tensor):
        return None
    source = args[1] if func is aten.copy_.default else args[0]
    if not isinstance(source, torch.Tensor):  # a number, which torch.func copies
        return None
    if source.dtype == result.dtype or not (source.is_floating_point() or result.is_floating_point()):
        return None
    return dtype_name(source), dtype_name(result)


def floating_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors among an operator's arguments or results, also inside sequences and mappings."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from floating_in(value)
    elif isinstance(values, Mapping):
        yield from floating_in(list(values.values()))


def dtype_names(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """Return the distinct dtype names of tensors, such as ``float16``, in order of first occurrence."""
    return tuple(dict.fromkeys(dtype_name(tensor) for tensor in tensors))


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype without the prefix ``torch.``, such as ``float16``."""
    return str(tensor.dtype).removeprefix("torch.")


def _ranked(counts: Counter[Any]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: (item[0].phase == "backward", -item[1], item[0]))


#: Products that torch's autocast casts on CUDA but not on a CPU (used by spectral_norm, torch 2.14).
_NOT_CAST_ON_CPU = frozenset({"mv", "addmv", "dot"})

#: Layers whose forward pass runs at least one product.
_MULTIPLIES = (nn.Linear, nn.RNNBase, nn.MultiheadAttention, Convolution)

#: Dtypes of products that code outside the policy's half precision may use: the task, and modules kept in FP32.
_WIDE = (torch.float32, torch.float64)


class PromiseBroken(EnvironmentRefused):
    """Training step with parameters or products of other dtypes than its precision mode means."""


def check_step(policy: Policy, model: nn.Module, kept: Mapping[str, nn.Module], census: OperatorCensus) -> None:
    """Raise PromiseBroken if parameters or products of a training step had other dtypes than the policy specifies.

    Products are matrix products, convolutions, attention and LSTM layers. FP32 and FP64 products are accepted in the
    task (the loss), in the modules kept in FP32, given by qualified name, and of tensors that the code itself casts to
    FP32, as routers of published mixtures of experts do. In half precision, at least one product of
    the model must be half; a model without products must compute something else in half precision. The model has been
    cast and has run the step of the census.
    """
    promised, compute = DTYPES[policy.parameters], DTYPES[policy.compute]
    in_kept = {id(p) for module in kept.values() for p in module.parameters()}
    wrong = [
        f"parameter {name} is {parameter.dtype}"
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dtype != (torch.float32 if id(parameter) in in_kept else promised)
    ]
    inside = {id(part) for module in kept.values() for part in module.modules()}
    modules = {name: id(module) not in inside for name, module in model.named_modules()}  # True: in half precision
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    counts: Counter[tuple[str, torch.dtype, str]] = Counter()
    lines: dict[tuple[str, torch.dtype, str], str] = {}
    for (name, dtype, module, line, widened), calls in census.product_calls.items():
        if dtype == compute or (dtype in _WIDE and (widened or not modules.get(module, False))):
            continue
        if not (policy.autocast and on_cpu and name in _NOT_CAST_ON_CPU and dtype == torch.float32):
            counts[name, dtype, module] += calls
            lines[name, dtype, module] = lines.get((name, dtype, module)) or line
    for (name, dtype, module), calls in counts.items():
        where = (module or type(model).__name__) if module in modules else "the task"
        line = lines[name, dtype, module]
        wrong.append(f"{calls} {name} products were {dtype} in {where}{f' ({line})' if line else ''}")
    if wrong:
        means = f"precision={policy.name} means parameters {policy.parameters} and compute {policy.compute}"
        raise PromiseBroken(
            f"{means}, but {listed(wrong, 5, '; ')}",
            _hint(policy, [module for (_, dtype, module) in counts if dtype in _WIDE and module in modules]),
        )
    if policy.half:
        _require_half(policy, model, modules, census)


def _hint(policy: Policy, modules: list[str]) -> str:
    """Return advice for products of another dtype; ``modules`` are those that multiply in a wider one."""
    casts = "fix the forward pass: FP32 tensors of its own promote others, or it disables autocast"
    if not (policy.half and modules):
        return casts
    if "" in modules:
        return f"{casts}; or move these products into a module of their own, and add it to precision.keep_fp32"
    return f"add {', '.join(dict.fromkeys(modules))} to precision.keep_fp32, or {casts}"


def _require_half(policy: Policy, model: nn.Module, modules: Mapping[str, bool], census: OperatorCensus) -> None:
    if any(product.dtype == DTYPES[policy.compute] for product in census.product_calls):
        return
    hint = "use precision=fp32, or keep fewer modules in FP32 (precision.keep_fp32)"
    layers = (name for name, half in modules.items() if half and isinstance(model.get_submodule(name), _MULTIPLIES))
    if any(product.module in modules for product in census.product_calls):
        why = "every product of the model is computed in FP32, in a module kept in FP32 or after a cast of its own"
    elif (layer := next(layers, None)) is not None and not policy.force:
        why = f"no known product ran in the step, not even in {layer or type(model).__name__}"
        hint = "use precision=fp32, or set precision.force=true if the model multiplies with kernels of its own"
    elif not census.in_half:
        casts = ", and autocast casts only products, of which it has none" if policy.autocast else ""
        why = f"no operator of the model ran in {policy.compute}{casts}"
        hint = "use precision=fp32"
    else:
        return
    raise PromiseBroken(f"precision={policy.name} means compute {policy.compute}, but {why}", hint)
