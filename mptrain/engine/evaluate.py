"""Measures a model on a split: never in a training region, never touching training's random numbers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from mptrain.records import EvalRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from mptrain.dataset.loader import Loader
    from mptrain.engine.job import Parts


def evaluate(
    parts: Parts, loader: Loader, split: str, step: int, epoch: int, stop: Callable[[], bool]
) -> EvalRecord | None:
    """Metrics of the current weights on all samples of a split.

    The sums are kept on the device and read once, at the end.

    Args:
        parts: The built run.
        loader: Over the split, without shuffling.
        split: ``val`` or ``test``.
        step: Attempts so far, for the record.
        epoch: Completed epochs, for the record.
        stop: Asked between batches whether to give up.

    Returns:
        The outcome, or None if evaluation was given up.
    """
    model, prepare_batch, contexts = parts.model, parts.prepare, (parts.plan.products, parts.plan.autocast)
    if parts.policy.eval == "fp32" and parts.policy.half:
        contexts, prepare_batch = (torch.no_grad, torch.no_grad), parts.prepare_float32
        if parts.policy.parameters != "float32":
            model = in_float32(parts.model, parts.full_precision())
    was_training = model.training
    model.eval()
    parts.plan.guard.snapshot()
    sums: dict[str, Tensor] = {}
    terms = 0
    try:
        with torch.no_grad(), contexts[0]():
            for batch in loader.batches(epoch=0):
                if stop():
                    return None
                prepared = prepare_batch(batch)
                with contexts[1]():
                    measured = parts.task.measure(model, prepared)
                for name, value in measured.items():
                    sums[name] = sums[name] + value if name in sums else value
                terms += prepared.terms
    finally:
        parts.plan.guard.restore(torch.ones(1, device=parts.device))  # a model may keep state in its buffers
        model.train(was_training)
    names = list(sums)
    values = torch.stack([sums[name] for name in names]).tolist()  # the one wait of an evaluation
    metrics = parts.task.summarise(dict(zip(names, values, strict=True)), terms)
    return EvalRecord(split=split, step=step, epoch=epoch, samples=terms, metrics=metrics)


def in_float32(model: nn.Module, full_precision: Mapping[str, Tensor]) -> nn.Module:
    """An FP32 copy of a model with the best copy of each weight: masters where there are any.

    Args:
        model: The model as it trains.
        full_precision: Best copies by parameter name (see `Weights.full_precision`); others are widened.
    """
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if name in full_precision:
                parameter.copy_(full_precision[name])
    return wide
