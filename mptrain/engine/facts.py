"""What about a model and its device explains how fast it trains: plain values for the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mptrain.precision.support import supports
from mptrain.precision.upcast import upcasts

if TYPE_CHECKING:
    from torch import nn

    from mptrain.engine.job import Parts

#: Tensor cores take FP16 operands whose dimensions are multiples of 8 (NVIDIA, "Mixed Precision Training" user guide).
ALIGNMENT = 8


def facts(parts: Parts) -> dict[str, Any]:
    """What stands under ``facts`` in ``summary.json``.

    Returns:
        ``parameters`` (how many), ``unaligned`` (see `unaligned_share`), ``convolutions`` (whether there are any),
        ``upcast`` (half products are computed in FP32 and rounded once, on a CPU without half arithmetic), ``support``
        (what the device says to the precision mode, in words).
    """
    return {
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "unaligned": unaligned_share(parts.model),
        "convolutions": any(parameter.ndim >= 4 for parameter in parts.model.parameters()),
        "upcast": upcasts(parts.policy, parts.device),
        "support": supports(parts.policy, parts.device).reason,
    }


def unaligned_share(model: nn.Module) -> float:
    """The share, 0 to 1, of the elements of all matrices and kernels that have an odd size for tensor cores.

    Those whose first or second dimension (outputs, inputs) is not a multiple of `ALIGNMENT`.
    """
    weights = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    odd = [weight.numel() for weight in weights if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT]
    return sum(odd) / max(1, sum(weight.numel() for weight in weights))
