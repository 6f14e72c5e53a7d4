"""Buffers that grow, TorchScript, private state, parameters outside the model: as in a plain loop, or named."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import TINY
from torch import nn
from torch.nn import functional as F

import mptrain.run.build.parts
from mptrain.config.compose import compose
from mptrain.engine.buffer_guard import Thawed
from mptrain.engine.checkpointing import take_snapshot
from mptrain.engine.loop import Loop
from mptrain.engine.private_state import PrivateState
from mptrain.engine.rehearsal import rehearse, rounded_numbers
from mptrain.engine.step import train_step
from mptrain.engine.telemetry import NoStorage
from mptrain.run.build.parallelism import require_still_shared, sharing_memory
from mptrain.runlog.run_paths import RunPaths
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch

STEPS, RESUMED = 5, 3
WORDS = (*TINY, "optimizer=sgd", "optimizer.lr=0.1", "optimizer.nesterov=false", "optimizer.momentum=0.9")
PLAIN = ("optimizer.weight_decay=0", "schedule=constant")
MODES = ("fp32", "amp_dynamic", "fp16_dynamic", "bf16")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("factor", torch.ones(1))

    def features(self, images):
        return torch.tanh(self.body(images.flatten(1)))

    def forward(self, images):
        return self.head(self.features(images)) * self.factor


class Resizes(Net):
    """Keeps means of its features in a buffer that it resizes in its first pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.ones(1))

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            with torch.no_grad():
                first = len(self.sizes) == 1
                now = hidden.detach().abs().mean(0).to(self.sizes.dtype)
                self.sizes.resize_(16).copy_(now if first else self.sizes.lerp(now, 0.5))
        return self.head(hidden / (0.5 + self.sizes)) * self.factor


class Caches(Net):
    """Appends features of each batch to a buffer that checkpoints of the weights do not hold, and makes a counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", None, persistent=False)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            rows = hidden.detach()[:2]
            self.cache = rows if self.cache is None else torch.cat([self.cache, rows])
            if not hasattr(self, "passes"):
                self.register_buffer("passes", torch.zeros(1, dtype=torch.int64))
            self.passes += 1
        return self.head(hidden - self.cache.mean(0)) * self.factor


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16)))


class Traced(Net):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.trace(nn.Sequential(nn.Linear(64, 16), nn.ReLU()), torch.zeros(2, 64))


class Counts(nn.Module):
    """In TorchScript, puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.head(images.flatten(1)) / self.seen


def whole_script():
    torch.manual_seed(1)
    return torch.jit.script(Counts())


class Observed(Net):
    """Quantization aware training: observers get one range for each channel in the first pass."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao import quantization

            self.body.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            quantization.prepare_qat(self.train(), inplace=True)


class Queue(Net):
    """Reads features of past batches from a tensor that is no buffer, as a memory bank does."""

    def __init__(self):
        super().__init__()
        self._queue = torch.zeros(8, 16)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            self._queue = torch.cat([self._queue[4:], hidden.detach()[:4].to(self._queue)])
        return self.head(hidden - self._queue.mean(0).to(hidden.dtype))


class Meter:
    def __init__(self):
        self.count, self.log, self.sums, self.draws = 0, [], torch.zeros(2), random.Random(3)


class Helped(Net):
    """Counts in an object of its own, in a list, in a tensor in a dictionary, and draws from a private generator."""

    def __init__(self):
        super().__init__()
        self.meter, self.tables, self._draws = Meter(), {"a": [torch.zeros(1)]}, torch.Generator().manual_seed(3)

    def forward(self, images):
        hidden = self.features(images)
        if self.training:
            self.meter.count += 1
            self.meter.log.append(self.meter.draws.random())
            self.meter.sums += 1
            self.tables["a"][0] += torch.rand(1, generator=self._draws)
            self._late = getattr(self, "_late", torch.zeros(1)) + 1
            total = self.meter.count + self.meter.log[-1] + self.meter.sums.sum() + self.tables["a"][0] + self._late
            hidden = hidden / total.to(hidden.dtype)
        return self.head(hidden)


class Asks:
    def __get__(self, instance, owner):
        return instance.body  # fails where a class is asked


class Hooks(Net):
    """Hooks itself in its first pass, has a descriptor that needs an instance, and a metaclass that sets nothing."""

    asks = Asks()

    def __init__(self):
        super().__init__()
        self.ready = False

    def forward(self, images):
        if not self.ready:
            self.body.register_forward_hook(lambda module, given, result: 2 * result)
            self.ready = True
        data = images.data  # no global name
        return super().forward(data)


class Frozen(type):
    def __setattr__(cls, name, value):
        raise TypeError(f"{cls.__name__} is frozen")

    @property
    def sizes(cls):
        return []


class WithFrozen(Hooks, metaclass=Frozen):
    sizes = [1]


class Around(Net):
    """Counts in the closure of a hook, in a global name, in a global list, in its class, and behind a decorator."""

    seen = 0

    def __init__(self):
        super().__init__()
        count = 0

        def hook(module, given, result):
            nonlocal count
            count += module.training
            return result / (1 + count)

        self.body.register_forward_hook(hook)

    @torch.enable_grad()
    def forward(self, images):
        if self.training:
            global CALLS
            CALLS += 1
            HISTORY.append(CALLS)
            Around.seen += 1
        return super().forward(images) / (1 + helped_by_a_function() + Around.seen)


CALLS, HISTORY = 0, []


def helped_by_a_function():
    DEEPER["times"] = DEEPER.get("times", 0) + 1
    return len(HISTORY) + DEEPER["times"]


DEEPER = {}


def new_loop(make, monkeypatch, *words):
    monkeypatch.setattr(mptrain.run.build.parts, "build_model", lambda *_: make())
    return Loop(*mptrain.run.build.parts.build(compose((*WORDS, *PLAIN, *words))), NoStorage(RunPaths(Path("unused"))))


def first_batches(loop):
    parts = loop.parts
    return [parts.prepare(one) for one in itertools.islice(parts.loaders["train"].batches(0), STEPS)]


def trained(make, monkeypatch, *words, resumed=False):
    """Train some steps as a run does, with a rehearsal before the first and after a resume; return the loop and losses."""
    loop, losses, batches = new_loop(make, monkeypatch, *words), [], None
    for number in range(STEPS):
        if number == RESUMED and resumed:
            state = copy.deepcopy(take_snapshot(loop.parts, loop.telemetry.step_log, loop.progress))
            loop = new_loop(make, monkeypatch, *words)
            assert loop.checkpointing.restore(state, forgive=False) == []
        batches = batches or first_batches(loop)
        parts = loop.parts
        parts.model.train()
        if number == 0 or (number == RESUMED and resumed):
            loop.found = rehearse(parts, batches[number])
        for learner in parts.learners:
            losses.append(train_step(learner, parts.model, batches[number], parts.plan).loss.item())
    parts.plan.guard.settle()
    return loop, losses


def state_of(loop):
    return {**dict(loop.parts.model.named_buffers()), **loop.parts.model.state_dict(), **loop.parts.full_precision()}


def in_plain_torch(make, monkeypatch, *, fused=True):
    """Train in FP32; without ``fused``, torch may round the last elements of a tensor once more on some CPUs."""
    net = make()
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, fused=fused)
    net.train()
    losses = []
    for batch in first_batches(new_loop(make, monkeypatch, "precision=fp32")):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Resizes, Caches, Scripted, Traced, whole_script, Observed, Queue, Helped])
def test_it_trains_as_in_a_plain_loop(make, monkeypatch):
    net, expected = in_plain_torch(make, monkeypatch)
    for mode in MODES:
        if make is Observed and mode != "fp32":  # torch has no kernel for it
            with pytest.raises(ConfigError, match="fail on the first batch"):
                trained(make, monkeypatch, f"precision={mode}")
            continue
        loop, losses = trained(make, monkeypatch, f"precision={mode}")
        if mode == "fp32":
            assert losses == expected
            found = state_of(loop)
            assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
            assert [*loop.parts.model.state_dict()] == [*net.state_dict()]
        else:
            assert losses == pytest.approx(expected, rel=0.05), mode


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Resizes, Caches, Scripted, Traced, whole_script, Observed])
def test_a_resumed_run_is_the_undisturbed_run(make, monkeypatch):
    for mode in ("fp32", "fp16_dynamic")[: 1 if make is Observed else 2]:
        (whole, losses), (again, same) = (
            trained(make, monkeypatch, f"precision={mode}", resumed=resumed) for resumed in (False, True)
        )
        assert losses == same, mode
        first, second = state_of(whole), state_of(again)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], value) for name, value in second.items()), mode
    assert not whole.found.doubts


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Queue, {"_queue"}),
        (Helped, {"meter.count", "meter.log", "meter.sums", "meter.draws", "tables.a[0]", "_draws", "_late"}),
        (Around, {"count in Around.__init__", "CALLS", "HISTORY", "Around.seen", "DEEPER"}),
    ],
)
def test_state_outside_of_buffers_is_named(make, names, monkeypatch):
    loop = new_loop(make, monkeypatch, "precision=fp32")
    loop.parts.model.train()
    [doubt] = rehearse(loop.parts, first_batches(loop)[0]).doubts
    assert "outside of buffers: no checkpoint holds this, and a skipped step does not restore it" in doubt
    assert sum(name in doubt for name in names) == min(len(names), 3)
    assert (CALLS, HISTORY, Around.seen, DEEPER) == (0, [], 0, {})


class Cached(Net):
    """Has a layer of torch that keeps things for itself."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16)

    def forward(self, images):
        hidden, _ = self.lstm(self.features(images))
        self.lstm._flat_weight_refs = [*self.lstm._flat_weight_refs, None]
        return self.head(hidden)


@pytest.mark.parametrize("make", [Hooks, WithFrozen])
def test_hooks_of_a_first_pass_and_classes_that_are_unlike_others_are_as_before(make, monkeypatch):
    loop = new_loop(make, monkeypatch, "precision=fp32")
    model = loop.parts.model
    model.train()
    [doubt] = rehearse(loop.parts, first_batches(loop)[0]).doubts
    assert "ready" in doubt
    assert "sizes" not in doubt
    assert (model.ready, len(model.body._forward_hooks)) == (False, 0)


def test_containers_of_others_are_put_back_past_their_own_methods():
    class Closed(dict):
        def update(self, *_):
            raise TypeError("closed")

    closed, gone = Closed(a=1), weakref.proxy(Meter())
    net = Net()
    net.closed, net.words = closed, np.array(["x", None], dtype=object)
    net.unit, net.holder = torch.zeros(2, device="meta"), [gone]
    kept = PrivateState({"": net}, [])
    dict.update(closed, a=2, b=3)
    net.words = None
    assert {"closed.a"} <= set(kept.put_back())
    assert closed == {"a": 1}
    assert net.words is not None


class Registry(Net):
    """Holds more objects than are looked at, and counts its passes in an attribute."""

    def __init__(self):
        super().__init__()
        self.samples = [[] for _ in range(5000)]
        self.tables = [{"rows": [[]]} for _ in range(5000)]
        self.passes = 0

    def forward(self, images):
        self.passes += 1
        return super().forward(images)


def test_more_objects_than_are_looked_at_are_said_and_the_nearest_are_seen(monkeypatch):
    loop = new_loop(Registry, monkeypatch, "precision=fp32")
    loop.parts.model.train()
    changed, beyond = rehearse(loop.parts, first_batches(loop)[0]).doubts
    assert "passes" in changed
    assert "beyond tables[" in beyond
    assert loop.parts.model.passes == 0


def test_what_layers_of_torch_keep_is_no_state_of_the_network(monkeypatch):
    loop = new_loop(Cached, monkeypatch, "precision=fp32")
    loop.parts.model.train()
    before = [*loop.parts.model.lstm._flat_weight_refs]
    assert not rehearse(loop.parts, first_batches(loop)[0]).doubts
    assert loop.parts.model.lstm._flat_weight_refs == before


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))


class InList(Net):
    def __init__(self):
        super().__init__()
        self.extra = [Scale(), torch.zeros(10, requires_grad=True)]

    def forward(self, images):
        return super().forward(images) * self.extra[0].log_scale.exp() + self.extra[1]


class InObject(Net):
    def __init__(self):
        super().__init__()
        self.meter = Meter()
        self.meter.weight = nn.Parameter(torch.ones(10))

    def forward(self, images):
        return super().forward(images) * self.meter.weight


class Late(Net):
    """Makes a parameter in its first pass."""

    def forward(self, images):
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(10))
        return super().forward(images) * self.gain


@pytest.mark.parametrize("mode", ["fp32", "fp16_dynamic"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (InList, r"extra\[1\].* get a gradient and would never be trained"),
        (InObject, "meter.weight gets a gradient"),
        (Late, r"a tensor of shape \(10,\) gets a gradient"),
    ],
)
def test_parameters_that_the_model_does_not_register_are_refused(make, named, mode, monkeypatch):
    with pytest.raises(ConfigError, match=named):
        trained(make, monkeypatch, f"precision={mode}")


def test_parameters_of_the_task_are_refused_before_training(monkeypatch):
    loop = new_loop(Net, monkeypatch, "precision=amp_dynamic")
    parts = loop.parts
    [learner] = parts.learners
    vars(parts.task)["balance"] = balance = Scale()
    loss = learner.objective.loss

    def weighted(model, batch):
        return loss(model, batch) * torch.exp(-balance.log_scale).sum() + balance.log_scale.sum()

    object.__setattr__(learner.objective, "loss", weighted)
    with pytest.raises(ConfigError, match=r"task.balance.log_scale gets a gradient"):
        rehearse(parts, first_batches(loop)[0])
    balance.requires_grad_(False)
    rehearse(parts, first_batches(loop)[0])


class Legitimate(Net):
    """Leaves that are no parameters to train: inputs, what a pass makes, frozen parts, and what the model trains."""

    def __init__(self):
        super().__init__()
        self.teacher, self.noise = [Net().requires_grad_(False)], torch.zeros(64, requires_grad=True)

    def forward(self, images):
        if self.training:
            if self.noise.grad is not None:
                self.noise.data += 0.1 * self.noise.grad.sign()
                self.noise.grad = None
            else:
                self.noise.data += 1e-4
            images = images.flatten(1).requires_grad_() + self.noise.to(images.dtype)
            fresh = torch.zeros(10, requires_grad=True)
            outputs = super().forward(images)
            (slope,) = torch.autograd.grad(outputs.sum(), self.noise, create_graph=True)
            return outputs + fresh + slope.sum() * 0 + self.teacher[0].to(images.dtype)(images) * 0
        return super().forward(images)


def test_leaves_that_are_no_parameters_are_left_alone(monkeypatch):
    for mode in ("fp32", "fp16_dynamic"):
        trained(Legitimate, monkeypatch, f"precision={mode}")


class Thaws(Net):
    def __init__(self, after=3):
        super().__init__()
        self.body.requires_grad_(False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.after = after

    def forward(self, images):
        if self.training:
            self.passes += 1
            self.body.requires_grad_(bool(self.passes > self.after))
        return super().forward(images)


class Waits(Net):
    """As `Thaws`, as its error advises."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        if self.training:
            self.passes += 1
        with torch.set_grad_enabled(bool(self.passes > 3)):
            hidden = self.features(images)
        return self.head(hidden)


@pytest.mark.parametrize("mode", ["fp32", "fp16_dynamic"])
def test_a_parameter_that_thaws_is_refused_in_that_step(mode, monkeypatch):
    for after, steps in ((3, 3), (0, 0)):
        loop = new_loop(lambda after=after: Thaws(after), monkeypatch, f"precision={mode}", "train.max_steps=5")
        del loop.parts.loaders["val"], loop.parts.loaders["test"]
        with pytest.raises(Thawed, match=r"body.weight.* require a gradient in training") as caught:
            loop.run()
        assert loop.progress.step == steps
        assert "torch.no_grad()" in caught.value.hint


def test_what_is_computed_without_gradients_at_first_trains_as_in_a_plain_loop(monkeypatch):
    net, expected = in_plain_torch(Waits, monkeypatch, fused=False)  # fused, torch needs every gradient
    loop, losses = trained(Waits, monkeypatch, "precision=fp32")
    assert losses == expected
    assert torch.equal(loop.parts.model.body.weight, net.body.weight)


class Shares(Net):
    def __init__(self, how):
        super().__init__()
        self.twin = nn.Linear(64, 16)
        if how == "data":
            self.twin.weight.data = self.body.weight.data
        elif how == "rows":
            self.twin.weight = nn.Parameter(self.body.weight.data[8:])
        else:
            flat = torch.randn(32, 64)
            self.body.weight.data, self.twin.weight.data = flat[::2], flat[1::2]

    def forward(self, images):
        return self.head(self.features(images) + F.pad(self.twin(images.flatten(1))[:, :8], (0, 8)))


def test_parameters_with_one_memory_stay_equal_or_are_refused(monkeypatch):
    for how in ("data", "rows"):
        for mode in ("fp16_dynamic", "bf16", "fp16_pure"):
            with pytest.raises(ConfigError, match=r"body.weight and twin.weight share memory"):
                new_loop(lambda how=how: Shares(how), monkeypatch, f"precision={mode}", "precision.force=true")
        with pytest.raises(ConfigError, match="share memory"):
            require_still_shared(sharing_memory(Shares(how)), sharded=True)
    loop, _ = trained(lambda: Shares("data"), monkeypatch, "precision=amp_dynamic")
    assert torch.equal(loop.parts.model.body.weight, loop.parts.model.twin.weight)
    assert not sharing_memory(Shares("interleaved"))


class Clamped(Net):
    limit = 1.0

    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-self.limit, self.limit))


def test_hooks_that_clamp_scaled_gradients_are_named(monkeypatch):
    for mode, limit, said in (("amp_dynamic", 1.0, True), ("amp_dynamic", 1e9, False), ("fp32", 1.0, False)):
        monkeypatch.setattr(Clamped, "limit", limit)
        loop = new_loop(Clamped, monkeypatch, f"precision={mode}")
        loop.parts.model.train()
        doubts = rehearse(loop.parts, first_batches(loop)[0]).doubts
        assert [doubt.startswith("gradients of head.weight do not grow with the loss scale") for doubt in doubts] == (
            [True] * said
        ), mode


class ClampedWithin(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        if how == "module":
            self.head.register_full_backward_hook(lambda module, inward, outward: tuple(one * 0 + 1 for one in inward))

    def forward(self, images):
        hidden = self.features(images)
        if self.how == "activation" and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-1e-6, 1e-6))
        if self.how == "noted" and hidden.requires_grad:
            hidden.register_hook(lambda grad: None)
        return self.head(hidden)


def test_hooks_of_modules_and_activations_that_clamp_are_named(monkeypatch):
    for how, said in (("module", True), ("activation", True), ("noted", False)):
        loop = new_loop(lambda how=how: ClampedWithin(how), monkeypatch, "precision=fp16_dynamic")
        loop.parts.model.train()
        doubts = rehearse(loop.parts, first_batches(loop)[0]).doubts
        assert [doubt.startswith("gradients of body.weight") for doubt in doubts] == [True] * said, how
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"


class Extra(Net):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_states_are_saved_or_refused_before_a_step(monkeypatch):
    loop, _ = trained(lambda: Extra({"a": [b"\xff\x00", 3]}), monkeypatch, "precision=amp_dynamic", resumed=True)
    assert loop.parts.model.state == {"a": [b"\xff\x00", 3]}
    with pytest.raises(ConfigError, match=r"the model.get_extra_state\(\)\['a'\] is a bytearray; only plain"):
        trained(lambda: Extra({"a": bytearray(3)}), monkeypatch, "precision=fp32")


def test_whole_numbers_that_a_cast_changes_are_named():
    raw = Batch(torch.tensor([[0.123, 7.0, 3001.0], [5.7, 9.0, 12.0]]), torch.zeros(2))
    [sentence] = rounded_numbers(raw, raw.cast(torch.float16))
    assert "to torch.float16 changes whole numbers in column 2:" in sentence
    assert rounded_numbers(raw, raw) == []
    small = Batch(raw.inputs[:, :2], raw.targets)
    assert rounded_numbers(small, small.cast(torch.bfloat16)) == []
