"""Loops that write or change their gradients between backward pass and update."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

from tests.integrations.loops.judge import batches, body, forward, loop, loss_of, mlp, norm, restored

AS_APPLIED = "grad_norm of updates whose gradients the loop sets itself is that as applied, after clipping"
CHANGED = "the loop changes its gradients more than once between pass and update; if a loss scale is among that"


class Private(torch.optim.Optimizer):
    """Optimizer around another one, as that of Opacus: clips gradients of samples, adds noise and writes the sum."""

    def __init__(self, original, before_step):
        self.original_optimizer, self.before_step = original, before_step

    param_groups = property(lambda self: self.original_optimizer.param_groups)
    state = property(lambda self: self.original_optimizer.state)
    defaults = property(lambda self: self.original_optimizer.defaults)

    def zero_grad(self, set_to_none=True):
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        for one, samples in self.samples:
            clipped = (1 / samples.flatten(1).norm(dim=1).clamp(min=1e-6)).clamp(max=1.0)
            one.grad = torch.einsum("i,i...", clipped, samples) / len(samples) + 0.01 * torch.randn(one.shape)
        self.before_step()
        self.original_optimizer.step()


@loop(said=(AS_APPLIED,))
def private(watch, truth):
    """Gradients of samples replace those of the pass; the noise of the third update is not finite in one bias."""
    model, at = mlp(), 0

    def before_step():
        if at == 3:
            model[2].bias.grad[0] = math.inf
        truth.look(model)
        truth.step(norm=norm(model))

    def sample_loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    optimizer = Private(torch.optim.SGD(model.parameters(), 0.05), before_step)
    with watch(model, optimizer):
        torch.manual_seed(7)
        for at, x, y in batches(5):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            weights = {name: one.detach() for name, one in model.named_parameters()}
            grads = vmap(grad(sample_loss), (None, 0, 0))(weights, x, y)
            optimizer.samples = [(one, grads[name]) for name, one in model.named_parameters()]
            with restored(model[2], when=at == 3):
                optimizer.step()
    return model


@body(6, functools.partial(torch.optim.Adam, lr=0.01), said=(AS_APPLIED,))
def functional_gradients(truth, model, optimizer, i, x, y):
    """Gradients of torch.func are set by hand and clipped, which spreads the NaN of one bias over all."""
    loss_of = grad_and_value(lambda weights: F.cross_entropy(functional_call(model, weights, (x,)), y))
    grads, loss = loss_of({name: one.detach() for name, one in model.named_parameters()})
    for name, one in model.named_parameters():
        one.grad = grads[name].clone()
    if i == 4:
        model[0].bias.grad[1] = math.nan
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    truth.look(model)
    truth.step(loss=(loss.item(), math.nan), norm=norm(model))
    with restored(model, optimizer, when=i == 4):
        optimizer.step()


@body(5, functools.partial(torch.optim.Adam, lr=0.01), said=(AS_APPLIED,))
def projected(truth, model, optimizer, i, x, y):
    """PCGrad: gradients of two tasks are projected and summed up; the fourth has NaN in part of one, which spreads to all."""
    flat = []
    for task in (0, 1):
        optimizer.zero_grad()
        out = forward(model, x, math.nan if (i, task) == (4, 1) else None)
        (out.square().mean() if task else F.cross_entropy(out, y)).backward()
        truth.look(model)  # the first look has the names
        flat.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    dot = flat[0] @ flat[1]
    total = flat[0] + flat[1] - (0 if dot >= 0 else dot / flat[1].square().sum() * flat[1])
    sizes = [one.numel() for one in model.parameters()]
    for one, part in zip(model.parameters(), total.split(sizes), strict=True):
        one.grad = part.view_as(one).clone()
    truth.left_out += 1  # the first pass, whose gradients are taken away
    truth.step(norm=norm(model))
    with restored(model, optimizer, when=i == 4):
        optimizer.step()


@body(6, functools.partial(torch.optim.SGD, lr=0.02), said=(CHANGED,))
def noise(truth, model, optimizer, i, x, y):
    """Noise is added to clipped gradients; that of the third update is not finite in one weight."""
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    total = norm(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    for name, one in model.named_parameters():
        one.grad.add_(torch.randn_like(one), alpha=math.inf if (i, name) == (3, "0.weight") else 0.05)
    truth.look(model)
    truth.step(loss=loss, norm=math.inf if i == 3 else total)
    with restored(model, when=i == 3):
        optimizer.step()


@body(6, said=(CHANGED,))
def clipped_by_value(truth, model, optimizer, i, x, y):
    """Clipping by value hides the inf of the third pass, and replacing NaN that of the fifth: both are applied."""
    optimizer.zero_grad()
    loss = loss_of(model, x, y, {3: math.inf, 5: math.nan}.get(i))
    loss.backward()
    truth.look(model)
    total = norm(model)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for one in model.parameters():
        one.grad.nan_to_num_(0.0)
    truth.step(loss=loss, norm=total)
    optimizer.step()


@loop()
def hooks_that_write(watch, truth):
    """Hooks write an inf: of a tensor in the second update, after accumulation in the fourth, before the step in the sixth."""
    model, at = mlp(), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def after_accumulation(weight):
        if at == 4:
            weight.grad[0, 0] = math.inf

    def before_step(*_):
        if at == 6:
            model[2].weight.grad[0, 0] = math.inf
        truth.look(model)
        truth.step(loss=loss, norm=norm(model))

    with watch(model, optimizer):
        model[2].bias.register_hook(lambda grad: grad + math.inf if at == 2 else grad)
        model[0].weight.register_post_accumulate_grad_hook(after_accumulation)
        optimizer.register_step_pre_hook(before_step)
        for at, x, y in batches(7):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            with restored(model, when=at in (2, 4, 6)):
                optimizer.step()
    return model
