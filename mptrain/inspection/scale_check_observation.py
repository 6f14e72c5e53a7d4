"""One rehearsed step in half precision under observation: all that is known of it without numbers of gradients.

That is what becomes of constants, which sums and exponentials are computed in half precision, casts, norms, small epsilons, and what modules say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mptrain.device import beside_fp64
from mptrain.engine.parts import Parts
from mptrain.engine.rehearsal import rehearse
from mptrain.errors import EnvironmentRefused, FirstBatchError
from mptrain.inspection.module_tensors import Outputs, hook_outputs, record_outputs
from mptrain.inspection.scale_check_ranges import ScalingEvidence
from mptrain.numerics.formats import FORMATS, Format
from mptrain.precision.census import cast_of, current_pass, dtype_name, floating_in
from mptrain.precision.policy import NORMS
from mptrain.probe.module_trail import ModuleTrail
from mptrain.probe.observer import ModuleObserver
from mptrain.scaler.static import NoScaler, StaticScaler
from mptrain.torch_private import Dropout
from mptrain.workloads.base.batch import Batch

#: Operators of which a number is an operand that the tensor's format has to hold.
_WITH_CONSTANT = frozenset(
    {
        "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "masked_fill", "masked_fill_", "where", "full", "full_like",
        "fill", "fill_", "new_full", "scalar_tensor", "index_fill", "constant_pad_nd",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum",
    }
)  # fmt: skip

#: Those of them in which a small number keeps something away from zero.
_GUARDS = frozenset({"add", "add_", "sub", "sub_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})

#: What torch's autocast computes in FP32 on CUDA ("CUDA Ops that can autocast to float32" in its documentation), by the
#: names of the operators that these functions end in. Norms are not among them: a mode says what becomes of those.
_WIDE_IN_AUTOCAST = frozenset(
    {
        "_softmax", "_log_softmax", "logsumexp", "softplus", "exp", "expm1", "log", "log2", "log10", "log1p", "pow",
        "reciprocal", "rsqrt", "sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "_cdist_forward",
        "nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
        "acos", "asin", "cosh", "sinh", "tan", "erfinv",
    }
)  # fmt: skip


class Constant(NamedTuple):
    """A number that a half-precision format does not hold.

    Attributes:
        module: Where: a qualified name, empty for the model itself, or `mptrain.probe.module_trail.LOSS`.
        operator: What it was an operand of.
        value: As it was written.
        becomes: ``zero``, or ``infinite``.
    """

    module: str
    operator: str
    value: float
    becomes: Literal["zero", "infinite"]


class HalfArithmetic(ModuleObserver):
    """Keeps what is suspicious about a forward pass in half precision.

    Args:
        trail: Knows the module at work; follow it on the model that is observed.

    Attributes:
        constants: How often each constant was met that the format does not hold.
        casts: How often tensors were cast to each half-precision dtype, forward and backward, by module.
        narrow: How often each operator that autocast would have computed in FP32 was computed in half, by module.
    """

    def __init__(self, trail: ModuleTrail) -> None:
        super().__init__(trail)
        self.constants: Counter[Constant] = Counter()
        self.casts: Counter[tuple[str, str]] = Counter()
        self.narrow: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        forward = current_pass() == "forward"
        if forward and name in _WITH_CONSTANT and (half := _half_dtype(args, kwargs)):
            for value in _numbers(args, kwargs):
                self._note(name, value, half)  # before the call, which torch may refuse
        result = func(*args, **(kwargs or {}))
        if (cast := cast_of(func, args, result)) is not None and cast[1] in _HALVES:
            self.casts[self.trail.module(), cast[1]] += 1
        if forward and name in _WIDE_IN_AUTOCAST and any(dtype_name(one) in _HALVES for one in floating_in(result)):
            self.narrow[self.trail.module(), name.strip("_").removesuffix("_forward")] += 1
        return result

    def _note(self, operator: str, value: float, dtype: str) -> None:
        form, magnitude = FORMATS[dtype], abs(value)
        if math.isfinite(magnitude) and magnitude > form.max:
            self.constants[Constant(self.trail.module(), operator, value, "infinite")] += 1
        elif operator in _GUARDS and 0 < magnitude < form.smallest_subnormal:
            self.constants[Constant(self.trail.module(), operator, value, "zero")] += 1


_HALVES = ("float16", "bfloat16")


def _half_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str:
    """The half-precision format in which an operator computes; empty where it computes in another."""
    if (asked := (kwargs or {}).get("dtype")) is not None:
        names = {str(asked).removeprefix("torch.")}
    else:
        tensors = list(floating_in((args, kwargs)))
        names = {dtype_name(one) for one in [one for one in tensors if not _is_number(one)] or tensors}
    return names.pop() if len(names) == 1 and names <= set(_HALVES) else ""


def _numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Iterator[float]:
    """The numbers among the operands: plain ones, and tensors of no dimension in a wider format."""
    for value in (*args, *(value for key, value in (kwargs or {}).items() if key not in ("alpha", "dtype"))):
        if isinstance(value, torch.Tensor) and _is_number(value):
            yield value.item()  # waits for the device
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class StepInspection:
    """Facts about a run in its own precision, without any numbers of its gradients.

    Attributes:
        evidence: Constants, narrow arithmetic, casts, norms, parameters without gradient, scales and epsilons.
        order: The modules in the order of their first call.
        values: The largest magnitude of each parameter and buffer.
        outputs: What each module said, call by call.
        weights: The parameters that are half.
    """

    evidence: ScalingEvidence
    order: tuple[str, ...]
    values: dict[str, float]
    outputs: Outputs
    weights: dict[str, Tensor]


def inspect_step(parts: Parts, batch: Batch, form: Format) -> StepInspection:
    """Rehearse one step under observation; to be called before anything else here.

    Args:
        parts: The run in its own precision.
        batch: Prepared.
        form: Its half-precision format.

    Raises:
        EnvironmentRefused: As `rehearse`, unless what was refused is a constant that the format does not hold.
        ConfigError: Likewise.
    """
    parts.model.train()
    policy = parts.policy
    scales = {one.name: (one.scale.item(), isinstance(one.scaler, (StaticScaler, NoScaler))) for one in parts.learners}
    trail, refused, untrained = ModuleTrail(), "", {}
    disable_dropout(parts.model)
    said: Outputs = {}
    half = HalfArithmetic(trail)
    observed = replace(parts, plan=replace(parts.plan, products=half.inside(parts.plan.products)))
    try:
        with trail.followed(parts.model), hook_outputs(parts.model, record_outputs(said)):
            untrained = rehearse(observed, batch).untrained
    except (FirstBatchError, EnvironmentRefused) as error:
        if not any(constant.becomes == "infinite" for constant in half.constants):
            raise
        refused = str(error.__cause__ or error).splitlines()[0]
    evidence = ScalingEvidence(
        policy.compute,
        constants=tuple(half.constants),
        narrow=tuple(half.narrow),
        casts=tuple(half.casts),
        half_norms=_half_norms(parts),
        no_gradient=(*untrained.get("no_gradient", ()), *untrained.get("no_learner", ())),
        scales=scales,
        epsilons=_small_epsilons(parts.model, form),
        refused=refused,
        keep_fp32=policy.keep_fp32,
        autocast=policy.autocast,
    )
    values, weights = largest_values(parts.model), half_weights(parts.model)
    return StepInspection(evidence, tuple(trail.calls), values, said, weights)


def half_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model that are half, by name."""
    return {name: value.detach() for name, value in model.named_parameters() if value.dtype.itemsize == 2}


def largest_values(model: nn.Module) -> dict[str, float]:
    """The largest magnitude in each parameter and floating-point buffer; inf where one is not finite."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: beside_fp64(tensor.detach()).double().abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }


def disable_dropout(model: nn.Module) -> tuple[str, ...]:
    """Turn off all dropout that modules do, for good.

    Returns:
        A sentence about it where there was any.
    """
    dropouts, found = Dropout, 0
    for module in model.modules():
        name = "p" if isinstance(module, dropouts) else "dropout"
        if isinstance(module, (dropouts, nn.RNNBase, nn.MultiheadAttention)) and getattr(module, name):
            setattr(module, name, 0.0)
            found += 1
    return (f"dropout is off ({found} modules): what it draws may depend on the dtype",) if found else ()


def _half_norms(parts: Parts) -> tuple[str, ...]:
    """Normalisation layers that a mode with half parameters does not keep in FP32."""
    if parts.policy.parameters == "float32":
        return ()
    kept = {id(inside) for module in parts.kept.values() for inside in module.modules()}
    return tuple(
        name
        for name, module in parts.model.named_modules()
        if id(module) not in kept and {base.__name__ for base in type(module).__mro__} & set(NORMS)
    )


def _small_epsilons(model: nn.Module, form: Format) -> dict[str, str]:
    """By module, the attribute that is called an epsilon and that a format rounds to zero or to its smallest number."""
    return {
        name: attribute
        for name, module in model.named_modules()
        for attribute in ("eps", "epsilon", "variance_epsilon")
        if isinstance(value := getattr(module, attribute, None), float) and 0 < value < form.smallest_subnormal
    }
