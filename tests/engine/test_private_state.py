"""State of a network outside of its buffers: named, put back after a rehearsal, and saved where it is an extra state."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from mptrain.engine.private_state import PrivateState
from mptrain.engine.rehearsal import rehearse
from mptrain.system.errors import ConfigError
from tests.engine.plain_loops import Helped, Meter, Net, Queue, first_batches, new_loop, trained


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
