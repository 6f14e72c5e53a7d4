"""A step without an update before the first one: is what the precision mode promises what really happens?

Everything that the passes touch is put back, so a run that was rehearsed trains as if it had not been.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mptrain.engine.randomness import other_random_numbers
from mptrain.engine.step import accumulate_gradients
from mptrain.precision.check import ProductCensus, check_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mptrain.dataset.batch import Batch
    from mptrain.engine.job import Parts


def rehearse(parts: Parts, batch: Batch) -> dict[str, list[str]]:
    """Run every learner's forward and backward pass on a batch under a census of products.

    Args:
        parts: The run; the model in training mode, not compiled yet.
        batch: Prepared.

    Returns:
        Names of the parameters that will not be trained, by why: ``frozen``, ``no_learner``, ``no_gradient``; and
        of the buffers that no refused step can restore: ``unguarded``.

    Raises:
        EnvironmentRefused: A parameter or a product has another dtype than the precision mode promises.
        ConfigError: A loss is not a float32 scalar.
    """
    census, guard = ProductCensus(), parts.plan.guard
    plan = replace(parts.plan, products=census.inside(parts.plan.products))
    missing: list[str] = []
    guard.snapshot()
    try:
        with other_random_numbers(parts.device):
            for learner in parts.learners:
                learner.weights.clear()
                accumulate_gradients(learner, parts.model, batch, plan)
                missing += learner.weights.without_gradient()
                learner.weights.clear()
    finally:
        unguarded = guard.recapture()
        guard.restore(torch.ones(1, device=parts.device))
    check_step(parts.policy, parts.model, parts.kept, census)
    parameters = dict(parts.model.named_parameters())
    owned = {name for learner in parts.learners for name in learner.weights.names}
    return {
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
        "no_learner": [name for name, p in parameters.items() if p.requires_grad and name not in owned],
        "no_gradient": missing,
        "unguarded": unguarded,
    }


_WARNED = (
    ("no_gradient", "parameters get no gradient and are not trained"),
    ("no_learner", "parameters belong to no learner and are not trained"),
    ("unguarded", "buffers are replaced instead of changed in place, so that a refused step cannot restore them"),
)


def warnings_about(found: Mapping[str, list[str]]) -> list[str]:
    """What a user should be warned of, one sentence each: frozen parameters are their own wish.

    Args:
        found: What `rehearse` found.
    """
    sentences = []
    for kind, why in _WARNED:
        if names := found[kind]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            sentences.append(f"{len(names)} {why}: {', '.join(names[:3])}{more}")
    return sentences
