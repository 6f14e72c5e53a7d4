"""One rehearsed step under observation, for `mptrain.inspection.scale_check_gradients`: all that is known without numbers of gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mptrain.device import beside_fp64
from mptrain.engine.rehearsal import rehearse
from mptrain.errors import EnvironmentRefused, FirstBatchError
from mptrain.inspection.half_arithmetic import HalfArithmetic
from mptrain.inspection.module_outputs import Outputs, each_output, keep_in
from mptrain.precision.policy import NORMS
from mptrain.probe.module_trail import Trail
from mptrain.scaler.static import NoScaler, StaticScaler

if TYPE_CHECKING:
    from mptrain.engine.job import Parts
    from mptrain.numerics.formats import Format
    from mptrain.workloads.base.batch import Batch


@dataclass(frozen=True)
class Inspection:
    """What is known of a run in its own precision without any numbers of its gradients.

    Attributes:
        constants: See `mptrain.inspection.scale_check_ranges.ScalingEvidence`, as for all that follow.
        narrow: Likewise.
        casts: Likewise.
        half_norms: Likewise.
        no_gradient: Likewise.
        scales: Likewise.
        epsilons: Likewise.
        refused: Likewise.
        order: The modules in the order of their first call.
        values: The largest magnitude of each parameter and buffer.
        outputs: What each module said, call by call.
        weights: The parameters that are half.
    """

    constants: tuple[tuple[str, str, float, str], ...]
    narrow: tuple[tuple[str, str], ...]
    casts: tuple[tuple[str, str], ...]
    half_norms: tuple[str, ...]
    no_gradient: tuple[str, ...]
    scales: dict[str, tuple[float, bool]]
    epsilons: dict[str, tuple[str, float]]
    refused: str
    order: tuple[str, ...]
    values: dict[str, float]
    outputs: Outputs
    weights: dict[str, Tensor]


def inspect_step(parts: Parts, batch: Batch, form: Format) -> Inspection:
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
    scales = {one.name: (one.scale.item(), isinstance(one.scaler, (StaticScaler, NoScaler))) for one in parts.learners}
    trail, refused, untrained = Trail(), "", {}
    without_dropout(parts.model)
    said: Outputs = {}
    half = HalfArithmetic(trail)
    observed = replace(parts, plan=replace(parts.plan, products=half.inside(parts.plan.products)))
    try:
        with trail.followed(parts.model), each_output(parts.model, keep_in(said)):
            untrained = rehearse(observed, batch).untrained
    except (FirstBatchError, EnvironmentRefused) as error:
        if not any(constant.becomes == "infinite" for constant in half.constants):
            raise
        refused = str(error.__cause__ or error).splitlines()[0]
    return Inspection(
        constants=tuple(half.constants),
        narrow=tuple(half.narrow),
        casts=tuple(half.casts),
        half_norms=_half_norms(parts),
        no_gradient=(*untrained.get("no_gradient", ()), *untrained.get("no_learner", ())),
        scales=scales,
        epsilons=_small_epsilons(parts.model, form),
        refused=refused,
        order=tuple(trail.calls),
        values=largest_values(parts.model),
        outputs=said,
        weights=half_weights(parts.model),
    )


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


def without_dropout(model: nn.Module) -> tuple[str, ...]:
    """Turn off all dropout that modules do, for good.

    Returns:
        A sentence about it where there was any.
    """
    found = 0
    for module in model.modules():
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        if isinstance(module, (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)) and getattr(
            module, name
        ):
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


def _small_epsilons(model: nn.Module, form: Format) -> dict[str, tuple[str, float]]:
    """By module, the attribute that is called an epsilon and that a format rounds to zero or to its smallest number."""
    found = {}
    for name, module in model.named_modules():
        for attribute in ("eps", "epsilon", "variance_epsilon"):
            value = getattr(module, attribute, None)
            if isinstance(value, float) and 0 < value < form.smallest_subnormal:
                found[name] = attribute, value
    return found
