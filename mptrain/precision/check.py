"""Reads from a real step which dtypes it had, and compares them with what the policy promised."""

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


#: Products that torch's autocast casts on CUDA and leaves as they are on a CPU (spectral_norm has them, torch 2.14).
_NOT_CAST_ON_CPU = frozenset({"mv", "addmv", "dot"})


def check_step(policy: Policy, model: nn.Module, kept: Mapping[str, nn.Module], census: OperatorCensus) -> None:
    """Compare what a step did with what its policy says.

    Args:
        policy: The mode.
        model: After `cast_model`, and after one step.
        kept: The modules kept in FP32.
        census: What the step's products were made of.

    Raises:
        EnvironmentRefused: A parameter or a product had another dtype than promised.
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
        allowed.add(torch.float32)  # a kept module with kernels or matrices multiplies in FP32 by request
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
            f"precision={policy.name} promises parameters {policy.parameters} and compute {policy.compute}, but {listed}",
            "the model casts by itself or leaves autocast: name the module in precision.keep_fp32, or mend its forward",
        )
