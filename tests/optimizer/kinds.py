"""Every way to store weights, every update rule, and one hand-made update of them."""

from __future__ import annotations

import torch
from torch import nn

from mptrain.optimizer import SGD, Adagrad, Adam, AdamW, Weights

KINDS = {
    "fp32": (torch.float32, {"master_weights": False}),
    "fp16 master": (torch.float16, {"master_weights": True}),
    "fp16 pure": (torch.float16, {"master_weights": False}),
    "fp16 in place": (torch.float16, {"master_weights": False, "state_in_half": True}),
    "bf16 master": (torch.bfloat16, {"master_weights": True}),
    "bf16 pure": (torch.bfloat16, {"master_weights": False}),
    "bf16 in place": (torch.bfloat16, {"master_weights": False, "state_in_half": True}),
}
RULES = {
    "sgd": SGD(momentum=0.0),
    "sgd momentum": SGD(momentum=0.9, weight_decay=0.01),
    "sgd nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=0.01, decay_norms_and_biases=True),
    "adam": Adam(weight_decay=0.01, eps=1e-4),
    "adamw": AdamW(weight_decay=0.01, eps=1e-4),
    "adagrad": Adagrad(eps=1e-4),
}
SHAPES = {"matrix": (4, 3), "bias": (3,), "scalar": ()}


class Shapes(nn.Module):
    """One parameter of each number of dimensions that matters."""

    def __init__(self, dtype, seed) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def make(kind, rule, *, clip_norm=None, seed=0):
    dtype, options = KINDS[kind]
    model = Shapes(dtype, seed)
    return model, Weights(dict(model.named_parameters()), rule, clip_norm=clip_norm, **options)


def run(model, weights, *, seed=0, scale=1.0, micro=1, poison=None, refuse=1.0, without=()):
    """One update with gradients that depend on the seed alone; ``poison`` replaces one element of the matrix's."""
    generator = torch.Generator().manual_seed(1000 + seed)
    loss_scale = torch.tensor([scale])
    weights.gradients.zero_grad()
    for _ in range(micro):
        for name, parameter in model.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator) * scale
            if name in without:
                continue
            if poison is not None and name == "matrix":
                grad[1, 2] = poison
            grad = grad.to(parameter.dtype)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        weights.gradients.accumulate()
    verdict = weights.judge(loss_scale, skip_on_overflow=bool(refuse))
    weights.update(verdict, torch.tensor([0.125]), loss_scale)
    return verdict


def state_of(model, weights):
    """Copies of everything that an update may change."""
    found = {f"parameter.{name}": p.detach() for name, p in model.named_parameters()}
    found |= {f"best.{name}": value for name, value in weights.masters.full_precision().items()}
    saved = weights.updater.state_dict()
    found |= {f"state.{name}.{key}": value for name, own in saved["state"].items() for key, value in own.items()}
    found["step"] = saved["step"]
    return {key: value.clone() for key, value in found.items()}
