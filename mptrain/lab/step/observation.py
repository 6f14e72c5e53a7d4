"""Observation of one rehearsed training step (without an update) in half precision, for ``mptrain doctor``.

It covers constants that the format cannot hold, sums and exponentials in half precision, casts, norm layers, small
epsilons, and module outputs. Gradient errors are measured elsewhere (`mptrain.lab.step.gradients`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.engine.module_trail import ModuleTrail
from mptrain.engine.observer import ModuleObserver, can_be_read
from mptrain.engine.parts import Parts
from mptrain.engine.rehearsal import rehearse, rounded_tensors
from mptrain.lab.step.module_tensors import Outputs, hook_step, record_outputs
from mptrain.lab.step.ranges import EPSILONS, ScalingEvidence
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.census import cast_of, current_pass, dtype_name, floating_in
from mptrain.precision.policy import NORMS
from mptrain.precision.upcast import EagerMode
from mptrain.scaler.static import NoScaler, StaticScaler
from mptrain.system.device import beside_fp64, in_widest
from mptrain.system.errors import EnvironmentRefused, FirstBatchError
from mptrain.system.torch_private import Dropout, tree_map, written_tensors
from mptrain.system.words import listed
from mptrain.workloads.base.batch import Batch

#: Operators that can take a number as operand, which the dtype of the tensor has to hold.
_WITH_CONSTANT = frozenset(
    {
        "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "masked_fill", "masked_fill_", "where", "full",
        "full_like", "fill", "fill_", "new_full", "scalar_tensor", "index_fill", "constant_pad_nd",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum",
    }
)  # fmt: skip

#: Those among them in which a small number keeps a value away from zero.
_GUARDS = frozenset({"add", "add_", "sub", "sub_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})

#: Operators that torch's autocast runs in FP32 on CUDA ("CUDA Ops that can autocast to float32" in its documentation),
#: by the names of the underlying operators. Norm layers are not included: the precision mode decides about them.
_WIDE_IN_AUTOCAST = frozenset(
    {
        "_softmax", "_log_softmax", "logsumexp", "softplus", "exp", "expm1", "log", "log2", "log10", "log1p", "pow",
        "reciprocal", "rsqrt", "sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "_cdist_forward",
        "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
        "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    }
)  # fmt: skip


#: Operators that normalise, and whether they do so over single elements, by their arguments.
_NORMALISES: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    "_softmax": lambda args: args[0].ndim > 0 and args[0].shape[args[1]] == 1,
    "_log_softmax": lambda args: args[0].ndim > 0 and args[0].shape[args[1]] == 1,
    "native_layer_norm": lambda args: math.prod(args[1]) == 1,
    "native_group_norm": lambda args: args[4] * args[5] == args[6],  # channels times places, in as many groups
    "native_batch_norm": lambda args: bool(args[5]) and args[0].numel() == args[0].shape[1],
}


class Constant(NamedTuple):
    """Number in a model's code that its half-precision format cannot hold.

    Attributes:
        module: Qualified name of the module, empty for the model itself, or `mptrain.engine.module_trail.LOSS`.
        operator: Name of the operator with the number as operand.
        value: The number.
        becomes: Its value in the format: ``zero`` or ``infinite``; ``unneeded`` if it rounds to zero, but the results
            are as in FP32. torch converts a number to FP32 in most operators and rounds only the result.
    """

    module: str
    operator: str
    value: float
    becomes: Literal["zero", "infinite", "unneeded"]


class HalfArithmetic(ModuleObserver):
    """Dispatch mode that records suspicious half-precision arithmetic of a model.

    The caller makes the trail, which tells the current module, follow the observed model.

    Attributes:
        constants: Constants in the forward pass that the format cannot hold. If the results of their operators differ
            from those in FP32 for the same inputs by no more than rounding explains, infinite ones are left out.
        casts: Number of casts to each half-precision dtype, forward and backward, by module and dtype.
        narrow: Number of half-precision calls in the forward pass of operators that torch's autocast runs in FP32 on
            CUDA, by module and operator.
        of_one: Module and operator of normalisations of the forward pass over single elements, in any precision.
    """

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__(trail)
        self.constants: dict[Constant, None] = {}
        self.casts: Counter[tuple[str, str]] = Counter()
        self.narrow: Counter[tuple[str, str]] = Counter()
        self.of_one: dict[tuple[str, str], None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        forward = current_pass() == "forward" and can_be_read(list(floating_in((args, kwargs))))
        half = _half_dtype(args, kwargs) if forward and name in _WITH_CONSTANT else ""
        noted = list(self._constants(name, half, args, kwargs)) if half else []
        exact = _in_fp32(func, args, kwargs) if noted else None  # before the call, which may write to its inputs
        known = dict(self.constants)
        self.constants |= dict.fromkeys(noted)  # before the call, which may raise an error
        result = func(*args, **(kwargs or {}))
        if exact is not None and not _differs(result, exact, FORMATS[half]):
            needless = (constant._replace(becomes="unneeded") for constant in noted if constant.becomes == "zero")
            self.constants = known | dict.fromkeys(needless)
        if forward and name in _NORMALISES and _NORMALISES[name](args):
            self.of_one[self.trail.module(), name.strip("_").removeprefix("native_")] = None
        if (cast := cast_of(func, args, result)) is not None and cast[1] in _HALVES:
            self.casts[self.trail.module(), cast[1]] += 1
        if (
            forward
            and name in _WIDE_IN_AUTOCAST
            and any(dtype_name(tensor) in _HALVES for tensor in floating_in(result))
        ):
            self.narrow[self.trail.module(), name.strip("_").removesuffix("_forward")] += 1
        return result

    def _constants(
        self, operator: str, dtype: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Iterator[Constant]:
        form = FORMATS[dtype]
        for value in _numbers(args, kwargs):
            if form.max < abs(value) < math.inf:
                yield Constant(self.trail.module(), operator, value, "infinite")
            elif operator in _GUARDS and 0 < abs(value) < form.smallest_subnormal:
                yield Constant(self.trail.module(), operator, value, "zero")


_HALVES = ("float16", "bfloat16")


def _half_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str:
    """Return the half-precision format in which an operator computes; empty if it computes in another."""
    if (asked := (kwargs or {}).get("dtype")) is not None:
        names = {str(asked).removeprefix("torch.")}
    else:
        tensors = list(floating_in((args, kwargs)))
        names = {dtype_name(tensor) for tensor in [tensor for tensor in tensors if not _is_number(tensor)] or tensors}
    return names.pop() if len(names) == 1 and names <= set(_HALVES) else ""


def _in_fp32(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Tensor:
    def wide(arg: Any) -> Any:
        return arg.float() if isinstance(arg, Tensor) and dtype_name(arg) in _HALVES else arg

    kwargs = {key: torch.float32 if key == "dtype" else wide(value) for key, value in (kwargs or {}).items()}
    return func(*tree_map(wide, args), **kwargs)  # type: ignore[no-any-return]


def _differs(result: Tensor, exact: Tensor, form: Format) -> bool:
    """Return whether an operator's result differs from that in FP32 in a value by more than rounding explains."""
    near = (result.float() - exact).abs() <= EPSILONS * form.epsilon * exact.abs()
    return bool((exact.isfinite() & ~near).any())  # waits for the device


def _numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[float]:
    """Yield the numbers among the operands: Python numbers, and 0-d tensors in a wider format."""
    for value in (*args, *(value for key, value in (kwargs or {}).items() if key not in ("alpha", "dtype"))):
        if isinstance(value, torch.Tensor) and _is_number(value):
            yield value.item()  # waits for the device
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class StepInspection:
    """Result of observing a training step in the precision of the run, without gradient errors.

    Attributes:
        evidence: Constants, half-precision arithmetic, casts, norms, parameters without gradient, scales and epsilons.
        order: Qualified names of the modules in the order of their first call.
        values: Largest magnitude of each parameter and buffer.
        outputs: Outputs of each module, call by call.
        weights: Half-precision parameters by name.
    """

    evidence: ScalingEvidence
    order: tuple[str, ...]
    values: dict[str, float]
    outputs: Outputs
    weights: dict[str, Tensor]


def inspect_step(parts: Parts, batch: Batch, form: Format) -> StepInspection:
    """Rehearse one training step, without an update, under observation; must be the first pass of the parts.

    Dropout of the model is turned off. Raises the errors of `mptrain.engine.rehearsal.rehearse`, but no
    EnvironmentRefused if the format cannot hold a constant.
    """
    parts.model.train()
    policy = parts.policy
    scales = {
        learner.name: (learner.scale.item(), isinstance(learner.scaler, (StaticScaler, NoScaler)))
        for learner in parts.learners
    }
    trail, refused, raised_in, untrained = ModuleTrail(), "", None, {}
    rounded: tuple[str, ...] = ()
    disable_dropout(parts.model)
    outputs: Outputs = {}
    half = HalfArithmetic(trail)
    observed = replace(parts, plan=replace(parts.plan, products=half.inside(parts.plan.products)))
    try:
        with SameDraws(), trail.followed(parts.model), hook_step(parts, record_outputs(outputs)):
            rehearsed = rehearse(observed, batch)
        untrained, rounded = rehearsed.untrained, rounded_tensors(parts, batch, rehearsed)
    except (FirstBatchError, EnvironmentRefused) as error:
        if not any(constant.becomes == "infinite" for constant in half.constants):
            if isinstance(error, EnvironmentRefused) or trail.raised_in is None:
                raise
            raised_in = trail.raised_in[0]
        refused = str(error.__cause__ or error).splitlines()[0]
    evidence = ScalingEvidence(
        policy.compute,
        constants=tuple(half.constants),
        narrow=tuple(half.narrow),
        of_one=tuple(half.of_one),
        casts=tuple(half.casts),
        half_norms=_half_norms(parts),
        no_gradient=(*untrained.get("no_gradient", ()), *untrained.get("no_learner", ())),
        scales=scales,
        floors={
            learner.name: learner.scaler.floor
            for learner in parts.learners
            if getattr(learner.scaler, "min_scale", None)
        },
        rounded=rounded,
        raised_in=raised_in,
        epsilons=_small_epsilons(parts.model, form),
        refused=refused,
        keep_fp32=policy.keep_fp32,
        autocast=policy.autocast,
    )
    values, weights = largest_values(parts.model), half_weights(parts.model)
    return StepInspection(evidence, tuple(trail.calls), values, outputs, weights)


def half_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the half-precision parameters of a model by name, detached."""
    return {name: value.detach() for name, value in model.named_parameters() if value.dtype.itemsize == 2}


def largest_values(model: nn.Module) -> dict[str, float]:
    """Return the largest magnitude of each parameter and floating-point buffer, by name; inf if it is not finite."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: beside_fp64(tensor.detach()).double().abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }


def disable_dropout(model: nn.Module) -> tuple[str, ...]:
    """Permanently turn off the dropout of a model's layers: torch's dropout, recurrent and attention layers.

    Returns a note for the user if there was any dropout, else nothing.
    """
    dropouts, count = Dropout, 0
    for module in model.modules():
        name = "p" if isinstance(module, dropouts) else "dropout"
        if isinstance(module, (dropouts, nn.RNNBase, nn.MultiheadAttention)) and getattr(module, name):
            setattr(module, name, 0.0)
            count += 1
    return (f"dropout is off ({count} modules): its random numbers may depend on the dtype",) if count else ()


def _half_norms(parts: Parts) -> tuple[str, ...]:
    """Return the normalisation layers that a mode with half-precision parameters does not keep in FP32."""
    if parts.policy.parameters == "float32":
        return ()
    kept = {id(inside) for module in parts.kept.values() for inside in module.modules()}
    return tuple(
        name
        for name, module in parts.model.named_modules()
        if id(module) not in kept and {base.__name__ for base in type(module).__mro__} & set(NORMS)
    )


def _small_epsilons(model: nn.Module, form: Format) -> dict[str, str]:
    return {
        name: attribute
        for name, module in model.named_modules()
        for attribute in ("eps", "epsilon", "variance_epsilon")
        if isinstance(value := getattr(module, attribute, None), float) and 0 < value < form.smallest_subnormal
    }


#: Fused operators that draw random numbers only inside, for their own dropout: computing them in FP32 would be no draw.
_FUSED = ("attention", "rnn")


class SameDraws(EagerMode):
    """Dispatch mode in which random numbers are drawn in FP32 and cast to the dtype that the model asks for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or any(part in name for part in _FUSED):
            return func(*args, **kwargs)
        given = next(floating_in((args, kwargs)), None)
        dtype = kwargs.get("dtype") or (torch.float32 if given is None else given.dtype)
        written = list(written_tensors(func, args, kwargs))
        if not dtype.is_floating_point or (dtype == torch.float32 and not written):
            return func(*args, **kwargs)
        if kwargs.get("dtype") is not None:
            kwargs["dtype"] = torch.float32
        wide = tree_map(
            lambda leaf: leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf, _cast(args, torch.float32)
        )
        drawn = func(*wide, **_cast(kwargs, torch.float32))
        for own, other in zip(args, wide, strict=True):
            if any(own is tensor for tensor in written):
                own.copy_(other)
                drawn = own if drawn is other else drawn
        return _cast(drawn, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, values
    )


#: Share of a column's deviation that rounding may change; beyond it most of what the column tells is lost.
LOST = 0.5


def lost_columns(batch: Batch, dtype: torch.dtype) -> str:
    """Return the input columns whose differences between samples a cast loses, such as ``columns 0, 3``, or nothing.

    The batch is one before the cast to ``dtype``. Inputs of another rank than ``[N, columns]`` are one column.
    """
    inputs = batch.inputs
    if not inputs.is_floating_point() or inputs.dtype == dtype:
        return ""
    rows = in_widest(inputs if inputs.ndim == 2 else inputs.flatten().unsqueeze(1))
    spread = (rows - rows.mean(0)).square().mean(0).sqrt()
    cast = in_widest(rows.to(dtype))
    off = (cast - rows).square().mean(0).sqrt()
    infinite = rows.isfinite().all(0) & ~cast.isfinite().all(0)
    lost = ((spread > 0) & ~(off <= LOST * spread) | infinite).nonzero().flatten().tolist()
    if not lost or inputs.ndim != 2:
        return "the inputs" if lost else ""
    return f"column{'s' * (len(lost) > 1)} {listed(list(map(str, lost)), 5)}"
