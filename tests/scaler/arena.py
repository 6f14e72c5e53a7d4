"""Two ways to train the same small network through the same overflows: as the engine does, and as torch does."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from mptrain.engine.buffer_guard import BufferGuard
from mptrain.engine.ring import Ring
from mptrain.engine.step import Learner, Plan, train_step
from mptrain.optimizer import Weights
from mptrain.precision.upcast import Products
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Objective

VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Tower(nn.Module):
    """A perceptron whose last bias receives whatever `poison` adds to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.poison = 0.0
        self.layers[2].bias.register_hook(lambda grad: grad + torch.tensor([0.0, self.poison, 0.0]))

    def forward(self, inputs):
        return self.layers(inputs)


class Towers(nn.Module):
    """Independent networks side by side, one for each learner."""

    def __init__(self, names) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Tower())


@dataclass(frozen=True)
class Attempt:
    """One step's samples, and for each tower how to spoil it: ``("input" | "loss" | "gradient", value)`` or None."""

    inputs: torch.Tensor
    targets: torch.Tensor
    spoilt: dict

    def batch(self, name) -> Batch:
        kind, value = self.spoilt.get(name) or ("", 0.0)
        inputs = self.inputs.clone()
        if kind == "input":
            inputs[len(inputs) // 2, 3] = value
        return Batch(inputs, self.targets)


def attempts(names, steps=125, seed=0, *, clean_start=True, share=0.12):
    """A deterministic course: overflows at chosen and at random steps, of each value by each way."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    teacher = draw(6, 3)
    ways = [(way, VALUES[value]) for way in ("gradient", "input", "loss") for value in VALUES]
    chosen = {0, 1, 2, 9, 10, 11, 50, 120, 121, 122, 123}
    course = []
    for step in range(steps):
        inputs = draw(16, 6)
        targets = (inputs @ teacher + draw(16, 3)).argmax(1)
        spoilt = {}
        for position, name in enumerate(names):
            picked = torch.rand((), generator=generator).item() < share or step - 5 * position in chosen
            way = ways[int(torch.randint(len(ways), (), generator=generator))]
            if picked and not (clean_start and step == 0):
                spoilt[name] = way
        course.append(Attempt(inputs, targets, spoilt))
    return course


def loss_of(model, name, batch, attempt):
    kind, value = attempt.spoilt.get(name) or ("", 0.0)
    tower = getattr(model, name)
    tower.poison = value if kind == "gradient" else 0.0
    loss = F.cross_entropy(tower(batch.inputs), batch.targets)
    return loss * value if kind == "loss" else loss


@dataclass
class Outcome:
    """What each learner did at each step, and its weights after each."""

    overflows: dict
    scales: dict
    weights: list


def train_as_the_engine_does(course, make, *, accumulate=1, clip_norm=None):
    """``make`` maps a tower's name to its update rule and scaler."""
    torch.manual_seed(1)
    model = Towers(make)
    now = {}
    learners, rings = [], []
    for name, (rule, scaler) in make.items():
        named = {key: p for key, p in model.named_parameters() if key.startswith(name + ".")}
        weights = Weights(named, rule, master_weights=False, clip_norm=clip_norm)
        loss = lambda model, batch, name=name: loss_of(model, name, batch, now["attempt"])  # noqa: E731
        rates = torch.full((len(course) + 1,), rule.lr)
        learners.append(Learner(Objective(name, (name + ".",), loss), weights, scaler, rates, torch.device("cpu")))
        rings.append(Ring(16, len(weights.names), torch.device("cpu")))
    plan = Plan(accumulate, Products(), contextlib.nullcontext(), BufferGuard(model))
    history = []
    for attempt in course:
        now["attempt"] = attempt
        for learner, ring in zip(learners, rings, strict=True):
            ring.record(train_step(learner, model, attempt.batch(learner.name), plan))
        history.append({key: value.detach().clone() for key, value in model.named_parameters()})
    rows = {learner.name: ring.take(wait=True) for learner, ring in zip(learners, rings, strict=True)}
    return Outcome(
        overflows={name: [row.overflow for row in taken] for name, taken in rows.items()},
        scales={name: [row.loss_scale for row in taken] for name, taken in rows.items()},
        weights=history,
    )


def train_as_torch_does(course, make, *, accumulate=1, clip_norm=None):
    """``make`` maps a tower's name to a function from its parameters to an optimizer, and to a `GradScaler`."""
    torch.manual_seed(1)
    model = Towers(make)
    optimizers = {name: build(getattr(model, name)) for name, (build, _) in make.items()}
    scalers = {name: scaler for name, (_, scaler) in make.items()}
    overflows, scales, history = {name: [] for name in make}, {name: [] for name in make}, []
    for attempt in course:
        for name, optimizer in optimizers.items():
            scaler, batch = scalers[name], attempt.batch(name)
            scales[name].append(scaler.get_scale())
            optimizer.zero_grad()
            for micro in batch.split(accumulate):
                scaler.scale(loss_of(model, name, micro, attempt) * batch.share(micro)).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(getattr(model, name).parameters(), clip_norm)
            scaler.step(optimizer)
            found = scaler._found_inf_per_device(optimizer)
            overflows[name].append(any(flag.item() != 0 for flag in found.values()))
            scaler.update()
        history.append({key: value.detach().clone() for key, value in model.named_parameters()})
    return Outcome(overflows, scales, history)


def distance(ours, theirs) -> float:
    """The largest L2 distance over all steps, relative to the norm of all weights at that step."""
    mine, other = (
        torch.stack(
            [torch.cat([value.flatten() for value in weights.values()]) for weights in outcome.weights]
        ).double()
        for outcome in (ours, theirs)
    )
    return ((mine - other).norm(dim=1) / other.norm(dim=1)).max().item()
