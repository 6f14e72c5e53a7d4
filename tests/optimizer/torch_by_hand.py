"""A mixed precision training loop around an optimizer of torch, written by hand: masters, unscaling, clipping, skipping."""

from __future__ import annotations

import math

import torch
from torch import nn

#: A small network with convolutions (in channels_last), batch normalisation and a matrix.
SMALL = (
    "model=cnn",
    "model.widths=[4,6]",
    "dataset.train_samples=96",
    "train.batch_size=16",
    "checkpoint.every_epochs=null",
    "threads=1",
)


def kept_batches(monkeypatch):
    """Copies of the batches that runs train on from now on."""
    from mptrain.engine import step_runner

    kept, step = [], step_runner.train_step

    def keep(learner, model, batch, plan, watch=None):
        kept.append(batch.clone())
        return step(learner, model, batch, plan, watch)

    monkeypatch.setattr(step_runner, "train_step", keep)
    return kept


def train_by_hand(parts, batches, optimizers_of, *, clip=None, overflows=(), scale=1.0, factors=None):
    """Return the masters after steps on batches, and the number of updates.

    ``optimizers_of`` makes optimizers of the masters by name. In each step of ``overflows`` one gradient is inf. ``factors`` are
    those of the learning rate, for each group of the first optimizer.
    """
    model, (learner,) = parts.model.train(), parts.learners
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    best = learner.weights.masters.full_precision()
    masters = {name: nn.Parameter(best[name].clone()) for name in named}
    optimizers = optimizers_of(masters)
    updates = 0
    for number, batch in enumerate(batches, 1):
        for parameter in named.values():
            parameter.grad = None
        before = {name: value.clone() for name, value in model.named_buffers()}
        with parts.plan.products.context:
            with parts.plan.autocast:
                loss = learner.objective.loss(model, batch)
            (loss * scale).backward()
        grads = {name: parameter.grad.float() for name, parameter in named.items()}
        if number in overflows:
            next(iter(grads.values())).view(-1)[0] = math.inf
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values())) / scale
        if not math.isfinite(norm):
            scale /= 2
            for name, value in model.named_buffers():
                value.copy_(before[name])
            continue
        divisor = torch.tensor(scale / min(1.0, clip / (norm + 1e-6)) if clip else scale)
        rate = learner.rates[updates].item()
        for name, master in masters.items():
            master.grad = torch.empty_like(master).copy_(grads[name] / divisor)
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                group["lr"] = rate * factors[index] if factors else rate
            optimizer.step()
        updates += 1
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}, updates


def decaying(masters, decay, every=False):
    """Groups of torch: matrices and kernels decay, and the others only if all do."""
    return [
        {"params": [p for p in masters.values() if every or p.ndim > 1], "weight_decay": decay},
        *([] if every else [{"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0}]),
    ]
