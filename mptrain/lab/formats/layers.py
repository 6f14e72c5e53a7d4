"""Layers that must stay in FP32 for a network's gradients to be right in a number format.

What a layer does to the gradients of others shows only in a whole step, so each candidate is tried in one: the format
without that layer. The error of a layer's own gradient times its norm chooses the candidates, with the last layer and
the first ones, because each try costs a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mptrain.lab.formats.look import CAP, FormatErrors, Look
from mptrain.lab.step.module_tensors import norm

#: Number of layers that are tried in each round.
CANDIDATES = 6

#: Smallest part of the remaining error that a layer must take away to be kept in FP32.
WORTH = 0.1


class KeptLayers(NamedTuple):
    """Layers of a network to keep in FP32 while all others are in a format.

    Attributes:
        modules: Qualified names of the modules, in the order in which they were chosen.
        share: Share of the FLOPs of all products that are theirs.
        errors: Errors with these layers kept, after each choice.
        steps: Number of steps that were computed.
    """

    modules: tuple[str, ...]
    share: float
    errors: tuple[FormatErrors, ...]
    steps: int


def layers_to_keep(look: Look, errors: FormatErrors, budget: float, enough: float) -> KeptLayers:
    """Return the layers whose products, kept in FP32, take most of a format's error away, one after the other.

    Args:
        look: The step.
        errors: Those of that step with all layers in the format.
        budget: Largest share of the FLOPs of all products in the layers that are kept.
        enough: Error at which no further layer is looked for.
    """
    modules = _modules(look)
    total = sum(look.coverage.layers.values()) + sum(look.coverage.others.values())
    shares = {name: sum(look.coverage.layers[each] for each in of) / max(total, 1) for name, of in modules.items()}
    kept: list[str] = []
    after: list[FormatErrors] = []
    steps = 0
    now = errors
    while now.error > enough:
        left = budget - sum(shares[name] for name in kept)
        fits = [name for name in modules if name not in kept and shares[name] <= left]
        tried: dict[str, FormatErrors] = {}
        for name in _candidates(look, now, modules, fits):
            names = [parameter for each in (*kept, name) for parameter in modules[each]]
            tried[name] = look.errors(errors.name, names)
        steps += len(tried)
        best = min(tried, key=lambda name: tried[name].error, default=None)
        if best is None or tried[best].error > (1 - WORTH) * now.error:
            break
        kept.append(best)
        after.append(now := tried[best])
    return KeptLayers(tuple(kept), sum(shares[name] for name in kept), tuple(after), steps)


def _modules(look: Look) -> dict[str, list[str]]:
    """Return the parameters with products by the module that has them, in the order of the forward pass.

    Those of the model itself are left out: it cannot be kept without all others.
    """
    modules: dict[str, list[str]] = {}
    for name in look.coverage.layers:
        if module := name.rpartition(".")[0]:
            modules.setdefault(module, []).append(name)
    return modules


def _candidates(look: Look, errors: FormatErrors, modules: Mapping[str, list[str]], fits: list[str]) -> list[str]:
    """Return the layers to try: the last and the first one, and those with the largest errors of their gradients."""
    size = {
        name: sum(
            errors.parameters.get(each, CAP) * norm(look.gradients[each]) for each in of if each in look.gradients
        )
        for name, of in modules.items()
    }
    ranked = sorted(fits, key=lambda name: -size[name])
    ends = [name for name in (*list(modules)[-1:], *list(modules)[:1]) if name in fits]
    return list(dict.fromkeys((*ends, *ranked)))[:CANDIDATES]
