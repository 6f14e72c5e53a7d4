"""Loops that leave out the update of some of their passes, by a guard or on purpose."""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from tests.integrations.loops.judge import batches, body, forward, loop, loss_of, mlp, norm, restored, update


@body(9, functools.partial(torch.optim.AdamW, lr=0.01))
def guarded_by_loss_and_norm(truth, model, optimizer, i, x, y):
    """In BF16, with gradients zeroed in place: passes 2 and 7 are not finite, pass 4 is too large."""
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    loss = F.cross_entropy(out.float(), y) * {2: math.inf, 7: math.inf, 4: 1e3}.get(i, 1)
    loss.backward()
    truth.look(model)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    if total < 50 and loss.isfinite():
        truth.step(loss=loss, norm=total)
        optimizer.step()
    else:
        truth.left_out += 1


@body(5)
def sam(truth, model, optimizer, i, x, y):
    """Sharpness-aware minimisation by a function of the loop; the first pass of batch 3 is not finite."""
    optimizer.zero_grad()
    loss_of(model, x, y, math.inf if i == 3 else None).backward()
    truth.look(model)
    truth.left_out += 1
    total = norm(model)
    with restored(model):
        with torch.no_grad():
            for one in model.parameters() if math.isfinite(total) else ():
                one.add_(one.grad, alpha=0.05 / total)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
    truth.step(loss=loss, norm=norm(model))
    optimizer.step()


@body(6)
def adversarial(truth, model, optimizer, i, x, y):
    """A pass for the gradient of the input (FGSM) comes before that of the update; that of batch 2 is not finite."""
    x.requires_grad_()
    loss_of(model, x, y, math.inf if i == 2 else None).backward()
    truth.look(model)
    truth.left_out += 1
    worse = (x + 0.1 * x.grad.sign().nan_to_num()).detach()
    model.zero_grad()
    update(truth, model, optimizer, loss_of(model, worse, y))


@loop()
def gradient_penalty(watch, truth):
    """WGAN-GP, five updates of the critic for one of the generator; the third penalty is NaN and left out."""
    generator, critic = mlp(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_critic = (torch.optim.Adam(one.parameters(), 0.01) for one in (generator, critic))
    with watch({"G": generator, "D": critic}, [of_generator, of_critic]):
        for i, x, _ in batches(10):
            fake = generator(x[:, :4]).detach()
            mixed = (0.3 * x + 0.7 * fake).requires_grad_()
            (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            norms = (grad * 0).square().sum(1).sqrt() if i == 3 else grad.norm(dim=1)  # the root has no slope at 0
            loss = critic(fake).mean() - critic(x).mean() + 10 * (norms - 1).square().mean()
            update(truth, critic, of_critic, loss, learner="optimizer1", prefix="D.", guarded=True)
            if i % 5 == 0:
                loss = -critic(generator(x[:, :4])).mean()
                update(truth, generator, of_generator, loss, learner="optimizer0")
                truth.left_out += 1  # of the critic
    return [generator, critic]


@loop()
def mean_teacher(watch, truth):
    """A moving average of the watched model, copied inside of the watch, teaches it; its fourth answer is NaN."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watch(model, optimizer):
        teacher = copy.deepcopy(model).requires_grad_(False)
        for i, x, y in batches(7):
            out = model(x)
            taught = teacher(x) * (math.nan if i == 4 else 1)
            loss = F.cross_entropy(out, y) + (out - taught).square().mean()
            if update(truth, model, optimizer, loss, guarded=True):
                with torch.no_grad():
                    for one, student in zip(teacher.parameters(), model.parameters(), strict=True):
                        one.lerp_(student, 0.1)
    return [model, teacher]


@loop()
def stochastic_weight_averaging(watch, truth):
    """Weights are averaged, with statistics of their own at the end; the sixth pass is NaN and the schedule moves on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)
    truth.moved = None
    with watch(model, optimizer):
        for i, x, y in batches(8):
            loss = loss_of(model, x, y, math.nan if i == 6 else None)
            if update(truth, model, optimizer, loss, guarded=True, lr=schedule.get_last_lr()[0]):
                average.update_parameters(model)
            schedule.step()
        update_bn([x for _, x, _ in batches(8)], average)
    return [model, average]


class Lookahead(torch.optim.Optimizer):
    """Optimizer around another one, whose weights it pulls to slow ones every three steps."""

    def __init__(self, parameters):
        self.optimizer, self.count = (optimizer := torch.optim.Adam(parameters, 0.01)), 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for one, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                    slow.add_(one - slow, alpha=0.5)
                    one.copy_(slow)


@body(8, Lookahead)
def lookahead(truth, model, optimizer, i, x, y):
    """The wrapper is watched; the fifth pass is not finite."""
    update(truth, model, optimizer, loss_of(model, x, y, math.inf if i == 5 else None), guarded=True)


@body(6)
def two_passes_over_one_graph(truth, model, optimizer, i, x, y):
    """An auxiliary loss has a pass of its own over the same graph; that of batch 4 alone is NaN."""
    optimizer.zero_grad()
    hidden = model[:2](x)
    loss = F.cross_entropy(model[2](hidden), y)
    other = 0.1 * forward(nn.Sequential(nn.Identity()), hidden, math.nan if i == 4 else None, 1).square().mean()
    loss.backward(retain_graph=True)
    other.backward()
    truth.look(model)
    if math.isfinite(norm(model)):
        truth.step(loss=loss + other, norm=norm(model))
        optimizer.step()
    else:
        truth.left_out += 1


@loop()
def replaced_optimizer(watch, truth):
    """The loop goes over to an optimizer that the watch does not know (as SWATS); the eighth pass is NaN."""
    model = mlp()
    optimizer = first = torch.optim.Adam(model.parameters(), 0.01)
    with watch(model, first):
        for i, x, y in batches(10):
            if i == 5:
                optimizer = torch.optim.SGD(model.parameters(), 0.01)
            optimizer.zero_grad()
            loss = loss_of(model, x, y, math.nan if i == 8 else None)
            loss.backward()
            truth.look(model)
            truth.left_out += i >= 5
            if i < 5:
                truth.step(loss=loss, norm=norm(model))
            if i != 8:
                optimizer.step()
    return model
