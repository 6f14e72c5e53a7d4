"""Parameters, buffers and optimizer state that other people's code changes: right, or refused in words."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import TINY
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.checkpointing import take_snapshot
from mptrain.engine.loop import Loop
from mptrain.engine.rehearsal import rehearse, rounded_tensors
from mptrain.engine.step import train_step
from mptrain.engine.telemetry import NoStorage
from mptrain.optimizer import SGD
from mptrain.optimizer.weights import Weights
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import ConfigError
from mptrain.workloads.images.datasets import digits

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


#: Tensors in which the newest `run` loses small changes.
ROUNDED: list[str] = []


def run(net, *words, batches=8, kind=None, monkeypatch):
    """The parts of a run of a network after some steps, and all that was said to the user."""
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: net())
    if kind is not None:
        kind.__module__ = "torch.optim"
        monkeypatch.setattr(torch.optim, kind.__name__, kind, raising=False)
        words += ("optimizer=torch", f"optimizer.name={kind.__name__}")
    else:
        words += ("optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.nesterov=false")
    parts, _ = mptrain.run.build.parts.build(compose((*TINY, "schedule=constant", "optimizer.lr=0.1", *words)))
    taken = list(itertools.islice(parts.loaders["train"].batches(0), batches))
    parts.model.train()
    for number, one in enumerate(taken * 2):
        batch = parts.prepare(one)
        if not number:
            ROUNDED[:] = rounded_tensors(parts, batch, rehearse(parts, batch))
        train_step(parts.learners[0], parts.model, batch, parts.plan)
    parts.plan.guard.require_seen()
    return parts


class Embeds(nn.Module):
    """Two embeddings with a largest norm, one with sparse gradients, of which the passes shorten the rows they read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Embedding(4, 16, max_norm=0.5, sparse=True)
        self.second = nn.EmbeddingBag(4, 16, max_norm=0.5, mode="sum", sparse=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        words = (images.flatten(1)[:, :5].float() * 3.99).clamp(0, 3).long()
        return self.head(self.first(words).mean(1) + self.second(words).to(self.head.weight.dtype))


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "fp16_dynamic", "bf16_pure"])
def test_rows_that_a_pass_shortens_stay_short_in_training(precision, monkeypatch):
    parts = run(Embeds, f"precision={precision}", monkeypatch=monkeypatch)
    weights = parts.full_precision()
    read = weights["first.weight"].float().norm(dim=1)
    assert read.max() < 0.8  # an update comes after the last pass; at the start they are about 4


class OwnSparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(4, 16)), nn.Linear(16, 10)

    def forward(self, images):
        words = (images.flatten(1)[:, :5].float() * 3.99).clamp(0, 3).long()
        return self.head(F.embedding(words, self.table, sparse=True).mean(1))


def test_any_other_sparse_gradient_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"the gradient of table is sparse"):
        run(OwnSparse, "precision=fp16_dynamic", monkeypatch=monkeypatch)


class Small(nn.Module):
    """Two layers, drawn alike each time, with a tanh between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images):
        return self.head(torch.tanh(self.body(images.flatten(1))))


class Clips(Small):
    """Clips its weights through ``.data`` where the caller says: nothing in a version counter shows it."""

    begins = passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes > type(self).begins:
            self.body.weight.data.clamp_(-0.05, 0.05)
        return super().forward(images)


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_a_change_through_data_in_place_reaches_the_master_weights(precision, monkeypatch):
    parts = run(Clips, f"precision={precision}", monkeypatch=monkeypatch)
    assert parts.full_precision()["body.weight"].abs().max() < 0.08


def test_one_that_begins_later_is_right_without_master_weights_and_refused_with_them(monkeypatch):
    monkeypatch.setattr(Clips, "begins", 5)
    parts = run(Clips, "precision=fp32", "train.batch_size=4", batches=20, monkeypatch=monkeypatch)
    assert parts.full_precision()["body.weight"].abs().max() < 0.08
    with pytest.raises(ConfigError, match=r"body.weight was changed through \.data"):
        run(Clips, "precision=bf16", "train.batch_size=4", batches=20, monkeypatch=monkeypatch)


class Later(Small):
    """Halves a weight in place from some pass on: seen in that very step."""

    passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes > 3:
            with torch.no_grad():
                self.body.weight.mul_(0.5)
        return super().forward(images)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_that_begins_later_in_place_is_written_through_at_once(accumulate, monkeypatch):
    words = f"train.accumulate={accumulate}"
    wide, half = (
        run(Later, f"precision={one}", words, monkeypatch=monkeypatch).full_precision()
        for one in ("fp32", "fp16_dynamic")
    )
    for name, value in wide.items():
        torch.testing.assert_close(half[name], value, rtol=0.01, atol=2e-3)


class Averages(nn.Module):
    """A frozen copy of a layer that follows it, in place or as a new parameter, as target networks do."""

    assigns, rate = False, 0.02

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.slow, self.head = nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(16, 10)
        self.slow.requires_grad_(False)

    def forward(self, images):
        if self.training:
            new = torch.lerp(self.slow.weight, self.body.weight.detach(), type(self).rate)
            if type(self).assigns:
                self.slow.weight = nn.Parameter(new, requires_grad=False)
            else:
                self.slow.weight.copy_(new)
        images = images.flatten(1)
        return self.head(torch.tanh(self.body(images) + 0.1 * self.slow(images)))


@pytest.mark.parametrize("assigns", [False, True])
def test_a_frozen_average_is_saved_as_it_is_and_small_changes_in_half_precision_are_warned_of(assigns, monkeypatch):
    monkeypatch.setattr(Averages, "assigns", assigns)
    wide = run(Averages, "precision=fp32", monkeypatch=monkeypatch)
    assert ROUNDED == []
    half = run(Averages, "precision=fp16_dynamic", monkeypatch=monkeypatch)
    assert ROUNDED == ["slow.weight"]
    saved = {**dict(half.model.named_parameters()), **half.full_precision()}
    assert "slow.weight" not in half.full_precision()
    assert "slow.bias" in half.full_precision()  # not changed, so as precise as it was drawn
    torch.testing.assert_close(saved["slow.weight"].float(), wide.model.slow.weight, rtol=0.02, atol=2e-3)


class Accumulates(Small):
    """A step counter, a running mean that is assigned, the last mean, and the rows of a queue: only two accumulate."""

    rate = 0.02

    def __init__(self):
        super().__init__()
        for name, shape in {"steps": (), "mean": 16, "last": 16, "queue": (64, 16)}.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, images):
        hidden = torch.tanh(self.body(images.flatten(1)))
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean = torch.lerp(self.mean, hidden.mean(0).to(self.mean.dtype), type(self).rate)
                self.last.copy_(hidden.mean(0))
                self.queue[:4].copy_(hidden[:4])
        return self.head(hidden)


class Writes(Accumulates):
    """A clamp that leaves its buffer as it is, and an average that half precision never moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bounded", torch.linspace(0.1, 1, 16))
        self.register_buffer("stalled", torch.ones(16))

    def forward(self, images):
        with torch.no_grad():
            self.bounded.clamp_(-100, 100)
            self.stalled.mul_(1 - 1e-4).add_(3e-4)
        return super().forward(images)


class Observes(Small):
    """Statistics of BatchNorm, as a mean over all batches or not, and observers as in quantisation, which start at inf."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=momentum)
        for name, value in {"low": torch.inf, "high": -torch.inf, "most": -torch.inf}.items():
            self.register_buffer(name, torch.full((17,), value))

    def forward(self, images):
        hidden = self.norm(self.body(images.flatten(1)))
        if self.training:
            with torch.no_grad():
                for buffer, now in ((self.low, hidden.amin(0)), (self.high, hidden.amax(0))):
                    own = buffer[:16]  # the last one never gets a value
                    own.copy_(torch.where(own.isinf(), now.to(own.dtype), torch.lerp(own, now.to(own.dtype), 0.01)))
                self.most[:16] = hidden.amax(0)
        return self.head(hidden)


@pytest.mark.parametrize(("momentum", "accumulate"), [(0.1, 1), (None, 1), (None, 8)])
def test_means_over_all_batches_and_observers_that_start_at_inf_accumulate(momentum, accumulate, monkeypatch):
    words = ("precision=bf16", "precision.keep_fp32=[]", f"train.accumulate={accumulate}")
    run(lambda: Observes(momentum), *words, monkeypatch=monkeypatch)
    assert ROUNDED == ["high", "low", "norm.running_mean", "norm.running_var"]
    run(lambda: Observes(momentum), *words[1:], "precision=fp16_dynamic", monkeypatch=monkeypatch)
    slow = ["norm.running_mean", "norm.running_var"] if momentum is None else []
    assert ["high", "low", *slow] == ROUNDED


@pytest.mark.parametrize(
    ("kind", "names"), [(Clips, "body.weight"), (Embeds, "first.weight"), (Accumulates, "mean, steps")]
)
def test_what_forward_passes_change_in_half_precision_is_warned_of(kind, names, monkeypatch):
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: kind())
    for precision, warns in (("fp32", False), ("amp_bf16", False), ("bf16", True)):
        parts, options = mptrain.run.build.parts.build(compose((*TINY, "train.max_steps=2", f"precision={precision}")))
        said = []
        loop = Loop(parts, options, NoStorage(RunPaths(Path("u"))))
        monkeypatch.setattr(loop.telemetry, "warn", said.append)
        loop.run()
        found = [one for one in said if one.startswith(f"forward passes change {names}")]
        assert len(found) == warns, (precision, said)
        assert all("precision.keep_fp32" in one for one in found)


class Begins(nn.Module):
    """Sets its shift by its first batch, and keeps what it has seen in plain attributes, some of them new."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.shift = nn.Linear(64, 10), nn.Parameter(torch.zeros(64))
        self.begun, self.mean, self.seen, self.table = False, None, [], torch.eye(64).to_sparse()
        self.grid, self.sums = torch.zeros(1).expand(4), torch.zeros(64)
        self._calls, self._sizes = 0, Counter()

    def forward(self, images):
        images = images.flatten(1)
        if self.training:
            if not self.begun:
                self.shift.data.copy_(-images.mean(0))
            self.begun, self.last = True, images[0]
            self.mean = images.mean(0) if self.mean is None else torch.lerp(self.mean, images.mean(0), 0.1)
            self.sums += images.sum(0)
            self.seen.append(len(images))
            self._calls += 1
            self._sizes[len(images)] += 1
        return self.body(torch.sparse.mm(self.table, (images + self.shift).T).T)


def test_a_rehearsal_leaves_no_trace_in_plain_attributes(monkeypatch):
    parts = run(Begins, "precision=fp32", monkeypatch=monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(f"{__name__}.rehearse", lambda *_: None)
        patched.setattr(f"{__name__}.rounded_tensors", lambda *_: ())
        alone = run(Begins, "precision=fp32", monkeypatch=patched)
    assert parts.model.seen == alone.model.seen
    assert (parts.model._calls, parts.model._sizes) == (alone.model._calls, alone.model._sizes)
    for name in ("mean", "sums", "last", "shift"):
        assert torch.equal(getattr(parts.model, name), getattr(alone.model, name)), name


class Tied(nn.Module):
    """A table that shortens the rows it reads, tied to the matrix of the head, and a count that two modules share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.body, self.head = nn.Embedding(10, 16, max_norm=0.5), nn.Linear(64, 16), nn.Linear(16, 10)
        self.head.weight = self.table.weight
        self.body.register_buffer("seen", torch.zeros(()))
        self.head.register_buffer("seen", self.body.seen)

    def forward(self, images):
        if self.training:
            with torch.no_grad():
                self.body.seen.add_(1)
        words = images.flatten(1).argmax(1) % 10
        return self.head(torch.tanh(self.body(images.flatten(1))) + self.table(words))


class Refuses(Accumulates):
    def forward(self, images):
        assert self.steps == self.steps.round(), "a count is a whole number"
        return super().forward(images)


@pytest.mark.parametrize(
    ("kind", "rate", "precision", "rounded"),
    [
        (Accumulates, 0.02, "fp16_dynamic", ["mean", "steps"]),
        (Accumulates, 0.02, "bf16", ["mean", "steps"]),
        (Accumulates, 0.02, "amp_dynamic", []),
        (Accumulates, 0.2, "fp16_dynamic", ["steps"]),  # a fast running mean loses nothing
        (Writes, 0.02, "fp16_dynamic", ["mean", "stalled", "steps"]),  # and a clamp without effect
        (
            Averages,
            0.02,
            "fp16_dynamic",
            ["slow.weight"],
        ),  # an average stops about eps / (2 rate) beside the right value:
        (Averages, 0.02, "bf16", ["slow.weight"]),  # 0.2 % in FP16 with a rate of 0.25, and 1.6 % in BF16
        (Averages, 0.25, "fp16_dynamic", []),
        (Averages, 0.25, "bf16", ["slow.weight"]),
        (Averages, 0.5, "fp16_dynamic", []),
        (Averages, 0.5, "bf16", []),
        (Tied, None, "bf16", ["body.seen"]),  # casting gives each module a buffer of its own
        (Tied, None, "fp32", []),
        (Refuses, 0.02, "bf16", ["last", "mean", "queue", "steps"]),
    ],
)
def test_tensors_that_half_precision_rounds_away_are_found(kind, rate, precision, rounded, monkeypatch):
    monkeypatch.setattr(kind, "rate", rate, raising=False)
    run(kind, f"precision={precision}", monkeypatch=monkeypatch)
    assert rounded == ROUNDED


class Casts(Small):
    def forward(self, images):
        self.head.bias.data = self.head.bias.data.double()
        return self.body(images.flatten(1)) @ self.head.weight.T + self.head.bias.float()


def test_a_parameter_that_gets_another_dtype_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"head.bias is replaced by torch.float64"):
        run(Casts, "precision=fp32", monkeypatch=monkeypatch)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = parametrizations.spectral_norm(nn.Linear(64, 16))
        self.norm = nn.BatchNorm1d(16)
        self.old = spectral_norm(nn.Linear(16, 16))
        self.dir = parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = prune.l1_unstructured(nn.Linear(16, 10), "weight", 0.3)
        self.one, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.one.weight

    def forward(self, images):
        hidden = torch.relu(self.norm(self.body(images.flatten(1))))
        return self.head(self.dir(self.old(self.tied(self.one(hidden)))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norms_parametrizations_pruning_and_batch_statistics_are_nobodys_business(precision, monkeypatch):
    parts = run(Spectral, f"precision={precision}", monkeypatch=monkeypatch)
    assert parts.learners[0].updates == 12


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


def test_complex_parameters_are_refused_by_name_in_every_mode(monkeypatch):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.ones(33, dtype=torch.complex64)), nn.Linear(64, 10)

    for precision in ("fp32", "amp_bf16", "fp16_dynamic"):
        with pytest.raises(ConfigError, match=r"the parameter filter is torch\.complex64"):
            run(Filter, f"precision={precision}", monkeypatch=monkeypatch)


def test_master_weights_keep_what_rounding_took_unless_the_change_is_larger():
    half = nn.Parameter(torch.tensor([1.0, 1.0, 5.0]).bfloat16())
    weights = Weights({"w": half}, SGD(), master_weights=True)
    (wide,) = weights.masters.work
    wide.copy_(torch.tensor([1.001, 1.001, 5.009]))
    weights.masters.mark()
    with torch.no_grad():
        half.copy_(torch.tensor([1.0, 0.5, 0.01]))
    weights.masters.take_changes(torch.tensor([False]))
    assert torch.equal(wide, torch.tensor([1.001, 1.001, 5.009]))
    weights.masters.take_changes(torch.tensor([True]))
    torch.testing.assert_close(wide, torch.tensor([1.001, 0.501, half[2].item()]), rtol=0, atol=1e-6)
    assert torch.equal(wide.bfloat16(), half)


@pytest.mark.parametrize("name", ["targets", "mask"])
def test_float64_in_a_batch_is_named(name):
    parts, _ = mptrain.run.build.parts.build(compose(TINY))
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    wide = torch.ones(len(batch.inputs), dtype=torch.float64)
    batch = replace(batch, targets=wide) if name == "targets" else replace(batch, extras={"mask": wide})

    def loss(model, micro):
        return (model(micro.inputs).mean(1) * micro.extras.get("mask", micro.targets)).mean()

    object.__setattr__(parts.learners[0].objective, "loss", loss)
    with pytest.raises(ConfigError, match=f"not a float32 scalar: the batch's {name} is float64") as caught:
        rehearse(parts, batch)
    assert caught.value.hint == f"convert in the data set: {name}.float()"
