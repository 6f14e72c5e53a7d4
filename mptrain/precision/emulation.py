"""Products of a network's weights from operands in an emulated number format, such as FP8, forward and backward.

A layer has three products: its output, and the gradients of its input and of its weight. Each operand is replaced by
the values that a format with its scales can hold (`mptrain.numerics.quantization`), and the product is computed in
FP32, as a GPU with such a format multiplies and adds. Everything else stays as it is: products of two activations, as
in attention, norms, embeddings and the optimizer.

A product belongs to a layer if an operand is a parameter of the model, a view of one, or a copy or cast. The gradient
of a weight has no such operand: it has an input of the layer, and autograd's node leads to the parameter. Products that
are not recognised, because their weight is computed from parameters or their input was saved elsewhere, stay in FP32.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from typing_extensions import override

from mptrain.numerics.quantization import RULES, Operand, Rule, hadamard, quantize, round_to
from mptrain.precision.census import PromiseBroken
from mptrain.precision.policy import Policy
from mptrain.precision.upcast import PRODUCTS, EagerMode, Products, products
from mptrain.system.torch_private import (
    current_autograd_node,
    disable_current_modes,
    split_rnn,
    storage_key,
    weak_reference,
)

aten = torch.ops.aten

#: What a layer's product computes.
Role = Literal["output", "input gradient", "weight gradient"]

#: Positions of the operands of matrix products and convolutions among the arguments.
_OPERANDS: Mapping[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
}

#: Operators that multiply and that `PRODUCTS` lacks.
_OTHERS = frozenset(
    {
        aten._trilinear.default,
        aten.vdot.default,
        aten.addmm_.default,
        aten.baddbmm_.default,
        aten.conv_tbc.default,
        aten.conv_tbc_backward.default,
        aten._native_multi_head_attention.default,
        aten._transformer_encoder_layer_fwd.default,
    }
)

#: Operators whose result has the values of their first argument, in memory of its own.
_COPIES = frozenset({aten._to_copy.default, aten.clone.default})

#: Largest number of views and casts between a parameter and a product.
_DEPTH = 32


class ProductCall(NamedTuple):
    """Product of a pass as it was computed.

    Attributes:
        operator: ATen operator (an overload).
        args: Its arguments, as the network gave them.
        result: Its result.
        role: What a layer's product computes; None if no operand is a parameter, as in attention.
        layer: Name of the parameter; empty without a role.
        emulated: Whether the operands were in the format.
    """

    operator: Any
    args: tuple[Any, ...]
    result: Any
    role: Role | None = None
    layer: str = ""
    emulated: bool = False


class EmulatedProducts(EagerMode):
    """Dispatch mode that computes the products of layers from operands in a format, and reports every product.

    Without a rule products are computed as they are, by the same kernels; only a `torch.nn.RNNBase` is split into
    single products, which rounds differently in the last digits. Products in FP32 are emulated, others are not. In a
    gradient of second order (``create_graph=True``) gradients count as activations.

    Args:
        model: Network with the parameters.
        rule: Format and scales of the operands; None for none.
        kept: Names of parameters whose products stay in FP32.
        report: Function that is given each product.
        generator: Generator of stochastic rounding.

    Attributes:
        calls: Number of products so far that were ``emulated``, of layers that were ``kept`` as they are, and of
            ``others``, without a parameter.
        seed: Seed of the generator whenever the mode is entered; None lets it go on.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule | None,
        kept: Collection[str] = (),
        report: Callable[[ProductCall], None] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rule, self.kept = rule, frozenset(kept)
        self.calls: Counter[str] = Counter()
        self.seed: int | None = None
        self._model, self._report, self._generator = model, report, generator
        self._weights: dict[int, list[tuple[int, int, str]]] = {}  # parts of a memory with the names of parameters
        self._inputs: dict[int, set[str]] = {}  # names of the layers that were given an activation, by its memory
        self._referred: list[Any] = []  # so that their memory does not become another tensor's
        self._rounded: dict[Any, Tensor] = {}  # weights of recurrent layers in the format
        self._recurrent = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, nn.RNNBase)
            for name, _ in module.named_parameters()
        }
        self._open = contextlib.ExitStack()
        self._sharded = not all(map(_is_plain, model.parameters()))

    def __enter__(self) -> EmulatedProducts:
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            self._name_parameters()
            if self._generator is not None and self.seed is not None:
                self._generator.manual_seed(self.seed)
            # A recomputation that ends early leaves out the last product, whose input would not be known.
            stack.enter_context(set_checkpoint_early_stop(False))
            if "torch._dynamo" in sys.modules:  # a compiled module would compile the rounding too
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self._model.modules():
                if isinstance(module, nn.RNNBase):
                    stack.enter_context(split_rnn(module))
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.push(super().__exit__)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)

    def _forget(self) -> None:
        for memory in (self._weights, self._inputs, self._referred, self._rounded):
            memory.clear()

    def _name_parameters(self) -> None:
        for name, parameter in self._model.named_parameters():
            if _is_plain(parameter):  # a shard is gathered in other memory
                begin = int(parameter.storage_offset())
                parts = self._weights.setdefault(self._refer(parameter), [])
                if (part := (begin, begin + parameter.numel(), name)) not in parts:
                    parts.append(part)

    def _name(self, tensor: Tensor) -> str:
        """Return the name of the parameter to which a tensor's memory belongs; empty for none."""
        at, parts = tensor.storage_offset(), self._weights.get(_memory(tensor), ())
        return next((name for begin, end, name in parts if begin <= at < end), "")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OPERANDS and all(_is_plain(args[at]) for at in _OPERANDS[func]):
            return self._product(func, args, kwargs)
        if func is aten.convolution_backward.default and all(map(_is_plain, args[:3])):
            return self._convolution_backward(func, args)
        result = func(*args, **kwargs)
        if func in _COPIES and _is_plain(args[0]) and _is_plain(result):
            if name := self._name(args[0]):
                self._weights[self._refer(result)] = [(0, sys.maxsize, name)]
        elif func in PRODUCTS or func in _OTHERS:
            self._note(ProductCall(func, args, result))
        return result

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first, second = _OPERANDS[func]
        role, layer, kinds = self._role(args[first], args[second])
        given = list(args)
        if emulated := self._emulates(layer, args[first], args[second]):
            if func is aten.convolution.default:
                transposed, groups = args[6], args[8]
                given[first] = self._channels(args[first], kinds[0], 1, groups)
                given[second] = self._channels(args[second], kinds[1], 0 if transposed else 1, groups)
            else:
                given[first] = self._in_format(args[first], kinds[0], -1, -2, role)
                given[second] = self._in_format(args[second], kinds[1], -2, -1, role)
        result = func(*given, **kwargs)
        if emulated:
            result = self._stored(result)
        self._note(ProductCall(func, args, result, role, layer, emulated))
        return result

    def _convolution_backward(self, func: Any, args: tuple[Any, ...]) -> Any:
        gradient, given, weight = args[:3]
        layer = self._name(weight)
        emulated = self._emulates(layer, gradient, given, weight)
        rest, transposed, groups, (of_input, of_weight, of_bias) = args[3:10], args[7], args[9], args[10]
        if not emulated:
            result = func(*args)
        else:
            sides: list[Any] = [None, None, None]
            if of_input:
                summed = self._channels(gradient, "gradient", 1, groups)
                kernel = self._channels(weight, "weight", 1 if transposed else 0, groups)
                sides[0] = self._stored(func(summed, given, kernel, *rest, [True, False, False])[0])
            if of_weight:
                rounded = self._positions(gradient, "gradient"), self._positions(given, "input")
                sides[1] = self._stored(func(*rounded, weight, *rest, [False, True, False])[1])
            if of_bias:
                sides[2] = func(*args[:10], [False, False, True])[2]
            result = tuple(sides)
        roles: list[tuple[Role, bool]] = [("input gradient", of_input), ("weight gradient", of_weight)]
        for role in [role for role, asked in roles if asked]:
            mask = [role == "input gradient", role == "weight gradient", False]
            self._note(ProductCall(func, (*args[:10], mask), result, role if layer else None, layer, emulated))
        return result

    def _role(self, first: Tensor, second: Tensor) -> tuple[Role | None, str, tuple[Operand, Operand]]:
        """Return what a matrix product or the output of a convolution is, of which layer, and its operands."""
        operands = (first, second)
        node = current_autograd_node()
        # In a backward pass gradients are enabled only while it recomputes a part of the forward pass.
        backward = node is not None and not torch.is_grad_enabled()
        names = [self._name(operand) for operand in operands]
        if self._sharded and not any(names) and not backward:
            self._name_parameters()  # those that are gathered now
            names = [self._name(operand) for operand in operands]
        given = [self._inputs.get(_memory(operand), set()) for operand in operands]
        if backward and bool(given[0]) != bool(given[1]):
            at = 0 if given[0] else 1
            if layers := (given[at] & set(self._parameters_of(node))) - {names[at]}:
                return "weight gradient", min(layers), ("input", "gradient") if at == 0 else ("gradient", "input")
        if not any(names):
            return None, "", ("input", "input")
        at = 1 if names[1] else 0  # of two parameters the first one is an input, as a table of learned queries
        if not backward and torch.is_grad_enabled():
            self._inputs.setdefault(self._refer(operands[1 - at]), set()).add(names[at])
        other: Operand = "gradient" if backward else "input"
        role: Role = "input gradient" if backward else "output"
        return role, names[at], ("weight", other) if at == 0 else (other, "weight")

    def _parameters_of(self, node: Any) -> Iterator[str]:
        """Yield the names of parameters that are inputs of an autograd node, through functions of one argument."""
        for first, _ in node.next_functions:
            following = first
            for _ in range(_DEPTH):
                variable = getattr(following, "variable", None)
                if isinstance(variable, Tensor) and _is_plain(variable):
                    yield self._name(variable)
                before = [each for each, _ in getattr(following, "next_functions", ()) if each is not None]
                if len(before) != 1:
                    break
                following = before[0]

    def _emulates(self, layer: str, *operands: Tensor) -> bool:
        fits = all(operand.dtype == torch.float32 for operand in operands)
        return fits and self.rule is not None and bool(layer) and layer not in self.kept

    def _in_format(self, values: Tensor, kind: Operand, dim: int, across: int, role: Role | None = None) -> Tensor:
        """Return an operand in the format, with scales along a dimension over which the product sums."""
        assert self.rule is not None
        with disable_current_modes():  # these operators are not the network's
            if self.rule.hadamard and role == "weight gradient":
                values = hadamard(values, dim)
            if kind != "weight" or self._name(values) not in self._recurrent:
                return quantize(values, self.rule, dim=dim, across=across, operand=kind, generator=self._generator)
            key = (_memory(values), values.storage_offset(), values.shape, values.stride(), values._version, dim)
            if key not in self._rounded:  # it is the same at every step of a sequence
                self._rounded[key] = quantize(values, self.rule, dim=dim, across=across, operand=kind)
            return self._rounded[key]

    def _channels(self, values: Tensor, kind: Operand, dim: int, groups: int) -> Tensor:
        """Return an operand of a convolution in the format, with scales along channels, apart in each group."""
        if groups == 1 or (kind == "weight" and dim == 1):
            return self._in_format(values, kind, dim, 1 - dim)
        grouped = values.unflatten(dim, (groups, -1))
        return self._in_format(grouped, kind, dim + 1, 2 if dim == 0 else 0).flatten(dim, dim + 1)

    def _positions(self, values: Tensor, kind: Operand) -> Tensor:
        """Return an operand of the weight gradient of a convolution, with scales along samples and positions.

        A Hadamard transform would not cancel, because a kernel shifts one operand against the other.
        """
        by_channel = values.transpose(0, 1)
        rounded = self._in_format(by_channel.reshape(len(by_channel), -1), kind, 1, 0)
        return rounded.reshape(by_channel.shape).transpose(0, 1)

    def _stored(self, result: Tensor) -> Tensor:
        assert self.rule is not None
        return result if self.rule.results is None else round_to(result, self.rule.results)

    def _refer(self, tensor: Tensor) -> int:
        self._referred.append(weak_reference(tensor.untyped_storage()))
        return _memory(tensor)

    def on(self, model: nn.Module) -> EmulatedProducts:
        """Return the same mode for a model with the same names of parameters."""
        return EmulatedProducts(model, self.rule, self.kept, self._report, self._generator)

    def _note(self, call: ProductCall) -> None:
        self.calls["emulated" if call.emulated else "others" if call.role is None else "kept"] += 1
        if self._report is not None:
            self._report(call)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


class Emulation(Products):
    """Choice of kernels whose context computes the products of layers in an emulated format.

    Random bits are the same in each pass of a step, as an examination of it repeats them.
    """

    def __init__(self, mode: EmulatedProducts) -> None:
        super().__init__()
        self.context = self.mode = mode
        self.calls = mode.calls

    @override
    def leave_out_idle(self, model: nn.Module, in_half: Collection[Any]) -> None:
        """Keep the context, which has no operators in half precision to look for."""

    @override
    def begin_step(self, seed: int, step: int, rank: int = 0) -> None:
        # Not the generators of the run: with the same seed, all modes draw the same numbers for dropout.
        self.mode.seed = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])

    @override
    def of(self, model: nn.Module) -> Products:
        return Emulation(self.mode.on(model))


def products_of(
    policy: Policy, model: nn.Module, kept: Mapping[str, nn.Module], device: torch.device, *, compiled: bool = False
) -> Products:
    """Return the choice of kernels of a run: that of emulated formats, or `mptrain.precision.upcast.products`.

    Args:
        policy: The precision policy.
        model: The model, cast and placed.
        kept: Its modules that are kept in FP32. A parameter that they share with others stays in FP32 in both.
        device: Device of the model.
        compiled: Whether torch.compile generates the kernels.
    """
    if policy.emulate is None:
        return products(policy, device, compiled=compiled)
    rule, own = RULES[policy.emulate], {id(p) for module in kept.values() for p in module.parameters()}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    generator = torch.Generator(device) if rule.stochastic else None
    return Emulation(EmulatedProducts(model, rule, names, generator=generator))


def check_emulated(policy: Policy, calls: Mapping[str, int]) -> str:
    """Return a sentence on the products of a step that stayed in FP32; empty if none did, or the mode emulates none.

    Raises PromiseBroken if all of them did. ``calls`` is that of `Products`, counted in the step.
    """
    if policy.emulate is None:
        return ""
    emulated, kept, others = (calls.get(key, 0) for key in ("emulated", "kept", "others"))
    if not emulated:
        why = "it has no product with a parameter" if not kept else "precision.keep_fp32 keeps all layers with products"
        raise PromiseBroken(
            f"precision={policy.name} means operands in {policy.emulate}, but no product of the model has them: {why}",
            "use precision=fp32" + (", or keep fewer modules in FP32 (precision.keep_fp32)" if kept else ""),
        )
    reasons = {
        "without a parameter as an operand, as in attention": others,
        "of modules in precision.keep_fp32": kept,
    }
    stay = " and ".join(f"{number:,} {reason}" for reason, number in reasons.items() if number)
    return stay and f"of {emulated + kept + others:,} calls of products in a step, these stay in FP32: {stay}"
