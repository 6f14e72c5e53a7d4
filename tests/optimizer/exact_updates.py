"""Single updates of every rule: drawn at random, and what they come to in FP64."""

from __future__ import annotations

import random

import torch

from mptrain.optimizer import SGD, Adagrad, Adam, AdamW
from mptrain.optimizer.rules import UpdateInputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def stride(lr=0.125, step=1.0, grad_scale=1.0, skip=0.0):
    return UpdateInputs(*(torch.tensor([value]) for value in (lr, step, grad_scale, skip)))


def exact(rule, decay, weight, state, grad, taken):
    """One update in FP64: by name each result, and the sum of the magnitudes of what it was added up from."""
    lr, step, scale = (tensor.double() for tensor in (taken.lr, taken.step, taken.grad_scale))
    w, found = weight.double(), {}
    g = grad.double() / scale
    size = g.abs()
    if decay and not isinstance(rule, AdamW):
        g, size = g + decay * w, size + decay * w.abs()

    def average(key, kept, new, value, magnitude):
        old = state[key].double()
        found[key] = kept * old + new * value, kept * old.abs() + new * magnitude
        return found[key]

    if isinstance(rule, SGD):
        if rule.momentum:
            buffer, top = average("momentum_buffer", rule.momentum, 1, g, size)
            g, size = (g + rule.momentum * buffer, size + rule.momentum * top) if rule.nesterov else (buffer, top)
        change, reach = lr * g, lr * size
    elif isinstance(rule, Adagrad):
        total, top = average("sum", 1, 1, g**2, size**2)
        rate = lr / (total.sqrt() + rule.eps)
        change, reach = rate * g, rate * size * top / total.clamp(min=1e-300)
    else:
        beta, gamma = rule.betas
        first, first_top = average("exp_avg", beta, 1 - beta, g, size)
        second, second_top = average("exp_avg_sq", gamma, 1 - gamma, g**2, size**2)
        rate = lr / (1 - beta**step) / ((second / (1 - gamma**step)).sqrt() + rule.eps)
        change, reach = rate * first, rate * first_top * second_top / second.clamp(min=1e-300)
        if isinstance(rule, AdamW):
            change, reach = change + lr * decay * w, reach + lr * decay * w.abs()
    return {**found, "weight": (w - change, w.abs() + reach)}


def random_case(seed):
    """A rule, its weight decay, a weight, its state, a gradient, a stride and a dtype to publish, all drawn."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    eps, kind = 10 ** draw.uniform(-12, -2), draw.choice([SGD, Adam, AdamW, Adagrad])
    if kind is SGD:
        momentum = draw.choice([0.0, draw.random()])
        rule = SGD(momentum=momentum, nesterov=momentum > 0 and draw.random() < 0.5)
    elif kind is Adagrad:
        rule = Adagrad(eps=eps, initial_accumulator=draw.choice([0.0, draw.random()]))
    else:
        betas = draw.choice([0.9, draw.uniform(0.5, 1)]), draw.choice([0.999, draw.uniform(0.5, 1)])
        rule = kind(betas=betas, eps=eps)
    step, scale = draw.choice([1, 2, 10, 1000, 100_000]), draw.choice([1.0, 2.0**16, 10 ** draw.uniform(-3, 5)])
    shape = [draw.randint(0, 12) for _ in range(draw.randint(0, 3))]
    size = 10 ** draw.uniform(-6, 3)
    weight = torch.randn(shape, generator=generator) * 10 ** draw.uniform(-3, 2)
    state = rule.state(weight)
    for key, tensor in state.items():
        if step > 1:
            tensor.normal_(generator=generator).mul_(size)
            if key in ("sum", "exp_avg_sq"):
                tensor.square_()
    grad = (torch.randn(shape, generator=generator) * size * scale).clamp(-6e4, 6e4).to(draw.choice(DTYPES))
    decay, half = draw.choice([0.0, 10 ** draw.uniform(-5, 0)]), draw.choice([*DTYPES[:2], None])
    return rule, decay, weight, state, grad, stride(10 ** draw.uniform(-5, 0), float(step), scale), half
