"""Parameters, buffers and optimizer state that other people's code changes: right, or refused in words."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.checkpointing import take_snapshot
from mptrain.engine.loop import Loop
from mptrain.engine.rehearsal import rehearse
from mptrain.engine.step import train_step
from mptrain.engine.telemetry import NoStorage
from mptrain.optimizer.weights import Weights
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import ConfigError
from mptrain.workloads.images.datasets import digits
from tests.engine.changing_networks import run
from tests.small_runs import TINY

HOW = ("in place", ".data=", "set_", "assigned")
WHERE = ("forward", "module hook", "step", "step hook")
MODES = ("fp32", "fp16_dynamic")
CASES = ("clean", "skipped and resumed")
STEPS, SKIPPED, RESUMED = 5, 2, 3


@torch.no_grad()
def changed(tensor, how, holder, name):
    """Change a tensor that a mapping or module holds, and return what it now holds."""
    new = tensor.detach() * 0.5 + 0.01
    if how == "in place":
        tensor.copy_(new)
    elif how == ".data=":
        tensor.data = new
    elif how == "set_":
        tensor.set_(new)
    elif isinstance(holder, nn.Module) and isinstance(tensor, nn.Parameter):
        setattr(holder, name, nn.Parameter(new))
    elif isinstance(holder, nn.Module):
        setattr(holder, name, new)
    else:
        holder[name] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new


class Net(nn.Module):
    """Its layers, and what changes something in one of them where."""

    def __init__(self, what="", how="", where=""):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.body.register_buffer("shift", torch.ones(8))
        self.what, self.how, self.where = what, how, where
        if where == "module hook":
            self.body.register_forward_pre_hook(lambda module, given: self.change())

    def change(self):
        name = "weight" if self.what == "parameter" else "shift"
        changed(getattr(self.body, name), self.how, self.body, name)

    def forward(self, images):
        if self.where == "forward" and self.training:
            self.change()
        return self.head(torch.tanh(self.body(images.flatten(1)) + self.body.shift))


class Mine(torch.optim.SGD):
    """SGD whose step, or a hook of it, changes something of its own or of the network."""

    change = None
    __module__ = "torch.optim"

    def __init__(self, params, lr=0.1, momentum=0.5):
        super().__init__(params, lr=lr, momentum=momentum)
        if type(self).change and type(self).change[2] == "step hook":
            self.register_step_post_hook(lambda *_: self.act())

    def act(self):
        what, how, _, net = type(self).change
        group = self.param_groups[0]["params"]
        if what == "parameter":
            changed(group[0], how, group, 0)
        elif what == "state":
            state = self.state[group[0]]
            changed(state["momentum_buffer"], how, state, "momentum_buffer")
        else:
            net[0].what = "parameter" if what == "model's parameter" else "buffer"
            net[0].how = how
            net[0].change()

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        if type(self).change and type(self).change[2] == "step":
            self.act()


CELLS = [
    *itertools.product(("parameter", "buffer"), HOW, ("forward", "module hook")),
    *itertools.product(("parameter", "model's parameter", "buffer", "state"), HOW, ("step", "step hook")),
]


def by_hand(net, optimizer, batches, skipped):
    """The same training in plain torch: a skipped step leaves no trace."""
    net.train()
    for number, (images, labels) in enumerate(batches):
        before = copy.deepcopy(net.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        if number == skipped:
            for name, value in net.state_dict().items():
                value.copy_(before[name])
        else:
            optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


@functools.cache
def configured(mode):
    words = (*TINY, "optimizer=torch", "optimizer.name=Mine", "optimizer.lr=0.1", "schedule=constant")
    return compose((*words, f"precision={mode}", *(("scaler.init_scale=1024",) if mode == "fp16_dynamic" else ())))


def new_loop(mode):
    return Loop(*mptrain.run.build.parts.build(configured(mode)), NoStorage(RunPaths(Path("unused"))))


def outcome(cell, mode, case, monkeypatch):
    """``right``, ``refused: message``, or ``WRONG``."""
    what, how, where = cell
    inside = where in ("forward", "module hook")
    nets = []

    def make(*_):
        nets[:] = [Net(what, how, where) if inside else Net()]
        return nets[0]

    monkeypatch.setattr(mptrain.run.build.parts, "build_model", make)
    monkeypatch.setattr(torch.optim, "Mine", Mine, raising=False)
    monkeypatch.setattr(Mine, "change", None if inside else (what, how, where, nets))
    judge, count = Weights.judge, [0]

    def spoil(self, *given, **more):
        if case != "clean" and count[0] == SKIPPED:
            next(iter(self.gradients.in_place().values())).view(-1)[0] = torch.inf
        count[0] += 1
        return judge(self, *given, **more)

    monkeypatch.setattr(Weights, "judge", spoil)
    loop = new_loop(mode)
    batches = [
        loop.parts.prepare_float32(one) for one in itertools.islice(loop.parts.loaders["train"].batches(0), STEPS)
    ]
    try:
        for number in range(STEPS):
            parts = loop.parts
            if number == 0 or (case != "clean" and number == RESUMED):
                if number:
                    state = copy.deepcopy(take_snapshot(parts, loop.telemetry.step_log, loop.progress))
                    loop = new_loop(mode)
                    assert loop.checkpointing.restore(state, forgive=False) == []
                    parts = loop.parts
                parts.model.train()
                rehearse(parts, parts.prepare_float32(batches[0]).cast(parts.model.head.weight.dtype))
            batch = batches[number].cast(parts.model.head.weight.dtype)
            train_step(parts.learners[0], parts.model, batch, parts.plan)
        parts.plan.guard.settle()
        parts.plan.guard.require_seen()
    except ConfigError as error:
        return f"refused: {error}"
    found = {**parts.model.state_dict(), **parts.full_precision()}
    own = make()
    expected = by_hand(
        own, Mine(own.parameters(), lr=0.1), [(one.inputs, one.targets) for one in batches],
        SKIPPED if case != "clean" else -1,
    )  # fmt: skip
    for name, value in expected.items():
        if mode == "fp32":
            same = torch.equal(found[name], value)
        else:
            same = torch.allclose(found[name].float(), value, rtol=0.02, atol=0.004)
        if not same:
            return f"WRONG: {name} by {(found[name].float() - value).abs().max():.3g}"
    return "right"


@pytest.mark.parametrize("mode", MODES)
def test_whatever_is_changed_is_right_or_refused_by_name(mode, monkeypatch):
    monkeypatch.setattr(digits, "read_digits", functools.cache(digits.read_digits))
    table = {}
    for cell, case in itertools.product(CELLS, CASES):
        with monkeypatch.context() as patch:
            table[(*cell, case)] = outcome(cell, mode, case, patch)
    for key, said in table.items():
        print(mode, " | ".join(key), "|", said)
    assert not [key for key, said in table.items() if said.startswith("WRONG")]


class Idle(torch.optim.SGD):
    """Updates copies of what it was given."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.copies = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        return None


class Counts(torch.optim.SGD):
    """Counts its updates in an attribute, which no checkpoint has."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        return super().step(closure)


class Remembers(Counts):
    """Keeps its velocities in an attribute of its own."""

    def step(self, closure=None):
        self.velocity = {p: torch.ones_like(p) for p in self.param_groups[0]["params"]}
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Idle, "moved no weight"),
        (Counts, "keeps state in its attribute done"),
        (Remembers, "keeps state in its attribute velocity"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_an_optimizer_that_moves_nothing_or_keeps_state_elsewhere_is_refused(kind, said, precision, monkeypatch):
    with pytest.raises(ConfigError, match=said):
        run(Net, f"precision={precision}", kind=kind, monkeypatch=monkeypatch)
