"""The update of master weights against the same written out with stock operators (C10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.cases.case import Case, Setting
from benchmarks.results import Measurement, measured
from benchmarks.timing import take_turns, timed
from mptrain.optimizer.rules import SGD
from mptrain.optimizer.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCALE = 1024.0
LR = 1e-3


def shapes(parameters: int, tensors: int = 40) -> list[int]:
    """Numbers of elements of so many tensors: half of them large, the others as small as biases and norms."""
    small = 512
    large = (parameters - small * (tensors // 2)) // (tensors - tensors // 2)
    return [large, small] * (tensors // 2)


class Masters:
    """Everything between the backward pass and the next forward pass, as our step does it."""

    def __init__(self, sizes: list[int], gradients: list[Tensor], device: torch.device) -> None:
        drawn = [torch.randn(size, device=device) * 0.05 for size in sizes]
        self.parameters = {str(at): nn.Parameter(value.half()) for at, value in enumerate(drawn)}
        self.gradients = gradients
        self.weights = Weights(self.parameters, SGD(lr=LR, momentum=0.9), master_weights=True)
        self.scale = torch.full((1,), SCALE, device=device)
        self.lr = torch.full((1,), LR, device=device)

    def step(self, index: int) -> None:
        """Gather, judge, unscale, update, round."""
        self.weights.gradients.zero_grad()
        for parameter, gradient in zip(self.parameters.values(), self.gradients, strict=True):
            parameter.grad = gradient
        self.weights.gradients.accumulate()
        verdict = self.weights.judge(self.scale, skip_on_overflow=True)
        self.weights.update(verdict, self.lr, self.scale)


def naive(sizes: list[int], gradients: list[Tensor], device: torch.device) -> Callable[[int], None]:
    """``float()``, unscale, look for inf and NaN, ``optimizer.step()``, copy back."""
    half = [(torch.randn(size, device=device) * 0.05).half() for size in sizes]
    masters = [nn.Parameter(value.float()) for value in half]
    optimizer = torch.optim.SGD(masters, lr=LR, momentum=0.9)

    def step(index: int) -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float().div_(SCALE)
        if all(bool(master.grad.isfinite().all()) for master in masters if master.grad is not None):
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for value, master in zip(half, masters, strict=True):
                value.copy_(master)

    return step


def master_update(setting: Setting) -> list[Measurement]:
    """C10."""
    device = torch.device(setting.device)
    sizes = shapes(200_000 if setting.rehearsal else 20_000_000)
    gradients = [(torch.randn(size, device=device) * 1e-2 * SCALE / 1000).half() for size in sizes]
    ours = Masters(sizes, gradients, device)
    contenders = {"naive": timed(naive(sizes, gradients, device)), "ours": timed(ours.step)}
    times = take_turns(contenders, setting.seconds)
    return [
        measured("C10", "eager", times.ratio("ours", "naive")),
        measured("C10", "milliseconds of the naive update", times.of("naive").value * 1e3, judged=False),
    ]


CASES = (Case("update of master weights", ("C10",), master_update, 1),)
