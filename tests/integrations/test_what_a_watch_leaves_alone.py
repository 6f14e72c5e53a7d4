"""What a watch leaves as it is: the training where records fail, copies, wrappers of others, what torch traces."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mptrain
from mptrain.runlog import read_run
from mptrain.system.errors import StorageError
from tests.integrations.watched_training import FAULTS, STEPS, Network, overflows, train


def test_a_full_disk_ends_the_records_and_not_the_training(tmp_path, monkeypatch):
    losses, weights, _, _ = train(False)

    def full(self, record):
        raise StorageError("no space left on device", "free some")

    monkeypatch.setattr("mptrain.runlog.record_writer.RecordWriter.take", full)
    with pytest.warns(UserWarning, match="mptrain.watch writes no more records: no space left on device") as said:
        same, same_weights, events, watch = train(True, folder=tmp_path / "run")
    assert len(said) == 1
    assert losses == same
    assert all(map(torch.equal, weights, same_weights))
    assert [*overflows(events)] == [*FAULTS]
    assert watch.last["step"] == STEPS


def test_of_a_model_that_is_compiled_elsewhere_activations_are_left_out(tmp_path):
    model, compiles = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own, every=2, dir=tmp_path / "run"):
        for _ in range(5):
            own.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            own.step()
    assert all(not one.tensors.get("activations") for one in read_run(tmp_path / "run").histograms())
    assert len(compiles) <= 2  # with and without hooks


def test_a_wrapper_that_another_library_has_put_around_a_scaler_s_method_stays():
    original, called = torch.amp.GradScaler.update, []
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    try:
        with mptrain.watch(model, own, scaler):
            inner = torch.amp.GradScaler.update
            torch.amp.GradScaler.update = lambda self, *rest: (called.append(1), inner(self, *rest))[1]
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        scaler.step(own)
        scaler.update()
        assert called == [1]
    finally:
        torch.amp.GradScaler.update = original


def test_nothing_is_left_after_close():
    hooks = torch.amp.GradScaler.update, torch.autograd.backward
    model = Network()
    own = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = {**vars(scaler)}, {**vars(own)}
    with mptrain.watch(model, own, scaler):
        pickle.loads(pickle.dumps(scaler))
        copy.deepcopy(scaler), copy.deepcopy(model)
    assert (torch.amp.GradScaler.update, torch.autograd.backward) == hooks
    assert ({**vars(scaler)}, {**vars(own)}) == before
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_copy_of_a_watched_scaler_is_not_watched():
    model = Network(faults=())
    own, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(model, own, scaler) as watch:
        another, other = Network(faults=()), copy.deepcopy(scaler)
        steps = torch.optim.SGD(another.parameters(), 0.1)
        other.scale(another(torch.randn(2, 8)).sum()).backward()
        other.step(steps)
        other.update()
        watch.flush()
        assert watch.last == {}


def test_an_exception_in_the_loop_is_recorded_and_raised(tmp_path):
    model = Network()
    own = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError), mptrain.watch(model, own, dir=tmp_path / "run"):
        raise ZeroDivisionError("of the user")
    state = read_run(tmp_path / "run").state
    assert (state.status, state.reason) == ("failed", "ZeroDivisionError: of the user")


def _faked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.ones(4, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.jacrev(lambda one: model(one).sum())(x),
        lambda model, x: torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(x),
        lambda model, x: len(make_fx(model)(x).graph.nodes),
        _faked,
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_torch_traces_or_transforms_is_left_alone(call):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    expected = call(model, x)
    own = torch.optim.SGD(model.parameters(), 0.1)
    with mptrain.watch(model, own) as watch:
        found = call(model, x)
        model(x).sum().backward()
        own.step()
    assert watch.last["step"] == 1
    assert (found == expected) if isinstance(found, int) else (call is _faked or torch.equal(found, expected))


def test_a_function_that_fails_is_called_no_more_and_training_goes_on():
    model, calls = Network(), []
    own = torch.optim.SGD(model.parameters(), 0.1)

    def fail(event):
        calls.append(event)
        raise KeyError("step")

    watch = mptrain.watch(model, own)
    watch.on_event(fail)
    for _ in range(STEPS):
        own.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        own.step()
    with pytest.warns(UserWarning, match="is not called again"):
        watch.close()
    assert (len(calls), watch.last["step"]) == (1, STEPS)


def test_a_model_is_saved_and_copied_while_it_is_sampled(tmp_path):
    model = Network(faults=())
    with mptrain.watch(model, torch.optim.SGD(model.parameters(), 0.1)):
        torch.save(model, tmp_path / "model.pt")
        copy.deepcopy(model)(torch.randn(2, 8))
