"""Check that a real training step computed in the dtypes that the precision policy promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from mptrain.numerics.words import listed
from mptrain.precision.apply import DTYPES
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.torch_private import Convolution

if TYPE_CHECKING:
    from mptrain.precision.census import OperatorCensus
    from mptrain.precision.policy import Policy


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
    if any(one.dtype == DTYPES[policy.compute] for one in census.product_calls):
        return
    hint = "use precision=fp32, or keep fewer modules in FP32 (precision.keep_fp32)"
    layers = (name for name, half in modules.items() if half and isinstance(model.get_submodule(name), _MULTIPLIES))
    if any(one.module in modules for one in census.product_calls):
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
