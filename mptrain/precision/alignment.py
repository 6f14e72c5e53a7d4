"""Weights whose dimensions tensor cores do not take well: those that are no multiples of 8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptrain.numerics.words import listed, percent

if TYPE_CHECKING:
    from torch import nn

#: Tensor cores take FP16 operands whose dimensions are multiples of 8 (NVIDIA, "Mixed Precision Training" user guide).
ALIGNMENT = 8

#: Smallest share of weights that is spoken of.
_SPOKEN_OF = 0.1


def unaligned_share(model: nn.Module) -> float:
    """Return the share of a model's matrix and kernel elements in tensors misaligned for tensor cores."""
    whole = sum(weight.numel() for weight in model.parameters() if weight.ndim >= 2)
    return sum(weight.numel() for _, weight in _unaligned(model)) / max(1, whole)


def unaligned_in_words(model: nn.Module) -> str:
    """Return a sentence on a model's misaligned weights with the largest ones; empty if they are few."""
    if (share := unaligned_share(model)) <= _SPOKEN_OF:
        return ""
    sizes = [f"{name} ({'x'.join(map(str, weight.shape))})" for name, weight in _unaligned(model)]
    return (
        f"{percent(share)} of the weights have a dimension that is no multiple of {ALIGNMENT}, for which tensor cores "
        f"are slow or unused: {listed(sizes)}"
    )


def _unaligned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the weights whose first or second dimension (outputs, inputs) is no multiple, the largest first."""
    named = [(name, one) for name, one in model.named_parameters() if one.ndim >= 2]
    odd = [(name, one) for name, one in named if one.shape[0] % ALIGNMENT or one.shape[1] % ALIGNMENT]
    return sorted(odd, key=lambda each: -each[1].numel())
