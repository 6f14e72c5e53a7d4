"""Loops whose passes are all of updates, without loss scaling: of several kinds of models, passes and optimizers."""

from __future__ import annotations

import functools
import math

import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from tests.integrations.loops.judge import batches, body, forward, loop, loss_of, mlp, norm, restored, update


@body(8, functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
def plain(truth, model, optimizer, _, x, y):
    update(truth, model, optimizer, loss_of(model, x, y), lr=0.05)


@loop()
def gan(watch, truth):
    """The generator's passes leave gradients in the discriminator that no step takes; its own in the fourth are NaN."""
    generator, critic = mlp(4, 6), mlp(6, 1, seed=2)
    of_generator, of_critic = (torch.optim.Adam(one.parameters(), 0.01) for one in (generator, critic))
    loss_of = F.binary_cross_entropy_with_logits
    with watch([generator, critic], [of_generator, of_critic]):
        for i, x, _ in batches(6):
            real, fake = critic(x), critic(generator(x[:, :4]).detach())
            loss = loss_of(real, torch.ones_like(real)) + loss_of(fake, torch.zeros_like(fake))
            update(truth, critic, of_critic, loss, learner="optimizer1", prefix="1.")
            fake = critic(forward(generator, x[:, :4], math.nan if i == 4 else None, at=3))
            loss = loss_of(fake, torch.ones_like(fake))
            update(truth, generator, of_generator, loss, learner="optimizer0", prefix="0.", restore=i == 4)
            truth.left_out += 1  # of the discriminator
    return [generator, critic]


@body(4, functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"))
def lbfgs(truth, model, optimizer, i, x, y):
    """A step of LBFGS calls its closure many times, first before the update; all passes of the third are NaN."""
    losses, norms = [], []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * (math.nan if i == 3 else 1)
        loss.backward()
        if not losses:
            truth.look(model)
        losses.append(loss.item())
        norms.append(norm(model))
        return loss

    with restored(model, optimizer, when=i == 3):
        optimizer.step(closure)
    truth.step(loss=losses[0], norm=norms[0])


@loop(said=("compiled autograd: gradients are looked at when the optimizer steps",), looked=False)
def compiled_autograd(watch, truth):
    """The backward pass is compiled; the third is NaN and left out."""
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @torch.compile(backend="aot_eager")
    def backward(loss):
        loss.backward()

    with torch._dynamo.config.patch(compiled_autograd=True), watch(compiled, optimizer):
        for i, x, y in batches(5):
            optimizer.zero_grad()
            x[:, 1] *= math.nan if i == 3 else 1
            backward(F.cross_entropy(compiled(x), y))
            truth.look(model)
            if math.isfinite(norm(model)):
                truth.step(norm=norm(model))
                optimizer.step()
            else:
                truth.left_out += 1
    torch._dynamo.reset()
    return model


@body(5, functools.partial(torch.optim.Adam, lr=0.01))
def out_of_memory(truth, model, optimizer, i, x, y):
    """The third backward pass runs out of memory half-way; the batch is tried again in halves."""

    def fail(grad):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    optimizer.zero_grad()
    try:
        hidden = model[:2](x)
        if i == 3:
            hidden.register_hook(fail)
        losses = [F.cross_entropy(model[2](hidden), y)]
        losses[0].backward()
    except RuntimeError:
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x[half]), y[half]) / 2 for half in (slice(8), slice(8, 16))]
        for loss in losses:
            loss.backward()
    truth.step(loss=sum(losses).item(), norm=norm(model))
    optimizer.step()


@loop()
def unfreezing(watch, truth):
    """Layers are thawed one after the other, with rates of their own; the fifth update is not finite in a thawed layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[:4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[4].parameters(), 0.05)
    with watch(model, optimizer):
        for i, x, y in batches(9):
            if i in (4, 7):
                layer = model[2 if i == 4 else 0].requires_grad_(True)
                optimizer.add_param_group({"params": [*layer.parameters()], "lr": 0.01})
            optimizer.zero_grad()
            loss = loss_of(model, x, y, math.inf if i == 5 else None, at=3)
            loss.backward()
            truth.look(model)
            truth.step(loss=loss, norm=norm(model))
            if i != 5:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with restored(model, when=i == 5):
                optimizer.step()
    return model


@loop(said=("grad_norm of updates whose gradients the loop sets itself is that as applied",))
def optimizers_in_backward(watch, truth):
    """Each parameter has an optimizer, which steps and zeroes in a hook inside of the backward pass (as LOMO)."""
    model = mlp()
    optimizers = [torch.optim.SGD([one], 0.05) for one in model.parameters()]
    known = {one: (f"optimizer{at}", name, optimizers[at]) for at, (name, one) in enumerate(model.named_parameters())}

    def step(parameter):
        learner, name, optimizer = known[parameter]
        truth.spoiled([name] * (not parameter.grad.isfinite().all()), learner)
        truth.step(learner, norm=norm([parameter]))
        optimizer.step()
        optimizer.zero_grad()

    with watch(model, optimizers):
        handles = [one.register_post_accumulate_grad_hook(step) for one in known]
        for i, x, y in batches(5):
            with restored(model, when=i == 3):
                loss_of(model, x, y, math.inf if i == 3 else None).backward()
        for handle in handles:
            handle.remove()
    return model


@body(6, said=("grad_norm of updates whose gradients the loop sets itself is that as applied",))
def backward_of_many(truth, model, optimizer, i, x, y):
    """Losses of several, a vector of losses, and gradients of autograd.grad take turns; the fourth, of these, is NaN."""
    optimizer.zero_grad()
    out = model(x)
    losses = F.cross_entropy(out, y, reduction="none")
    if i % 3 == 0:
        weights = [torch.tensor(1.0), torch.tensor(0.1)]
        torch.autograd.backward([losses.mean(), out.square().mean()], weights)
    elif i % 3 == 1:
        grads = torch.autograd.grad(losses.mean(), [*model.parameters()])
        for (name, one), grad in zip(model.named_parameters(), grads, strict=True):
            one.grad = grad * (math.nan if i == 4 and name.startswith("2.") else 1)
    else:
        losses.backward(torch.full((16,), 1 / 16))
    truth.look(model)
    truth.step(norm=norm(model))
    with restored(model, when=i == 4):
        optimizer.step()


@loop()
def recurrent(watch, truth):
    """An LSTM of packed sequences, a parametrized layer, and saliency maps; a NaN loss is not passed back at all."""
    torch.manual_seed(0)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    model = nn.ModuleDict({"rnn": nn.LSTM(6, 8, batch_first=True), "out": head})
    optimizer = torch.optim.RMSprop(model.parameters(), 0.005)

    def scores(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 3], batch_first=True)
        return model["out"](model["rnn"](packed)[1][0][-1])

    with watch(model, optimizer):
        for i, rows, y in batches(7):
            x = torch.stack([rows[:5], rows[5:10], rows[10:15]])
            loss = F.cross_entropy(scores(x), y[:3]) * (math.nan if i == 5 else 1)
            if loss.isnan():
                continue
            update(truth, model, optimizer, loss)
            model.eval()
            x.requires_grad_()
            torch.autograd.grad(scores(x).sum(), x)
            model.train()
    return model


@body(6, functools.partial(torch.optim.AdamW, lr=0.01))
def closure_that_fails(truth, model, optimizer, i, x, y):
    """AdamW steps with a closure: the third loss is NaN, and the fifth closure raises after its pass."""
    told = {}

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * (math.nan if i == 3 else 1)
        loss.backward()
        truth.look(model)
        told.update(loss=loss, norm=norm(model))
        if i == 5:
            raise ValueError("bad batch")
        return loss

    with restored(model, optimizer, when=i == 3):
        try:
            optimizer.step(closure)
            truth.step(**told)
        except ValueError:
            truth.left_out += 1
