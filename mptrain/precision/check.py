"""Check that a real training step computed in the dtypes that the precision policy promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from mptrain.errors import EnvironmentRefused
from mptrain.precision.apply import DTYPES

if TYPE_CHECKING:
    from mptrain.precision.census import OperatorCensus
    from mptrain.precision.policy import Policy


#: Products that torch's autocast casts on CUDA but not on a CPU (used by spectral_norm, torch 2.14).
_NOT_CAST_ON_CPU = frozenset({"mv", "addmv", "dot"})


def check_step(policy: Policy, model: nn.Module, kept: Mapping[str, nn.Module], census: OperatorCensus) -> None:
    """Raise an error if parameters or products of a training step had other dtypes than its precision policy specifies.

    Products are matrix products, convolutions, attention and LSTM layers. FP32 products are accepted if a module kept
    in FP32 has weight matrices.

    Args:
        policy: The precision policy.
        model: The model after `mptrain.precision.apply.cast_model` and one step.
        kept: The modules kept in FP32, by qualified name.
        census: Census of the step, with the dtypes of its products.

    Raises:
        EnvironmentRefused: A parameter or product has another dtype than the policy specifies.
    """
    promised = DTYPES[policy.parameters]
    in_kept = {id(p) for module in kept.values() for p in module.parameters()}
    wrong = [
        f"parameter {name} is {parameter.dtype}"
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dtype != (torch.float32 if id(parameter) in in_kept else promised)
    ]
    allowed = {DTYPES[policy.compute]}
    if any(True for module in kept.values() for p in module.parameters() if p.ndim > 1):
        allowed.add(torch.float32)  # a kept module with weight matrices multiplies in FP32 as configured
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    wrong += [
        f"{count} {name} products were {dtype}"
        for name, by_dtype in census.products.items()
        for dtype, count in by_dtype.items()
        if dtype not in allowed
        and not (policy.autocast and on_cpu and name in _NOT_CAST_ON_CPU and dtype == torch.float32)
    ]
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise EnvironmentRefused(
            f"precision={policy.name} means parameters {policy.parameters} and compute {policy.compute}, but {listed}",
            "add the module to precision.keep_fp32, or fix its forward: it casts tensors itself or disables autocast",
        )
