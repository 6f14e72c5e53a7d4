"""Traces of a capture: none where it fails, with stand-ins that behave as torch's own do on a CUDA device."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from mptrain.engine import step_runner
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.engine.step_runner import WARM_UP, CudaGraphs, GraphsInvalidated, StepRunner
from tests.small_runs import TINY, parts_of

DEVICE = torch.device("cuda", 0)


class Device:
    """Stands for a CUDA device and torch's state about it.

    Attributes:
        version: Of torch: before 2.12 a failed capture goes on asking for memory, before 2.14 it keeps pool and generator.
        at_end: What ending a capture raises.
    """

    def __init__(self, version):
        self.version = version
        self.stream, self.pools, self.asking, self.capturing, self.drawn = "main", {}, [], False, 7
        self.at_end = None

    def install(self, monkeypatch):
        cuda = torch.cuda
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(self.version))
        monkeypatch.setattr(step_runner.torch, "rand", self.rand)
        monkeypatch.setattr(cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(cuda, "graph", self.graph)
        monkeypatch.setattr(cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 1 + len(self.pools)))
        monkeypatch.setattr(cuda, "default_generators", (self,))
        monkeypatch.setattr(cuda, "get_rng_state", lambda device: self.drawn)
        monkeypatch.setattr(cuda, "set_rng_state", lambda state, device: setattr(self, "drawn", state))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        return self

    def rand(self, size, device):
        if self.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.drawn += 4

    def clone_state(self):
        return Device(self.version)

    def graphsafe_set_state(self, other):
        self.capturing = other.capturing

    def end(self, index, pool):
        if pool not in self.asking:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.asking.remove(pool)

    def release(self, index, pool):
        assert self.pools[pool] > 0, "released twice: torch's count of users is wrong from here on"
        self.pools[pool] -= 1

    @contextlib.contextmanager
    def graph(self, graph, *, pool, capture_error_mode):
        self.stream, graph.its_pool = "capture", pool
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.asking.append(pool)
        self.capturing = True
        failed = None
        try:
            yield
        except BaseException as error:
            failed = error
            if self.at_end is None:
                self._ended(graph)
                raise
        if self.at_end is not None:
            if self.version >= "2.12":
                self.asking.remove(pool)
            raise self.at_end from failed
        self._ended(graph)

    def _ended(self, graph):
        self.asking.remove(graph.its_pool)
        self.capturing, self.stream, graph.ended = False, "main", True


class Graph:
    def __init__(self, device):
        self.device, self.ended = device, False

    def pool(self):
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.its_pool

    def reset(self):
        if self.ended or self.device.version >= "2.14":
            self.device.release(0, self.its_pool)
            self.device.capturing = self.ended = False

    def replay(self):
        pass


@pytest.fixture(params=["2.11", "2.12", "2.14"])
def device(request, monkeypatch):
    return Device(request.param).install(monkeypatch)


def fails():
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("body", "at_end", "raised"),
    [
        (fails, RuntimeError("operation failed due to a previous error during capture"), "not permitted when stream"),
        (fails, None, "not permitted when stream"),
        (lambda: None, RuntimeError("invalid capture"), "invalid capture"),
    ],
)
def test_a_failed_capture_leaves_nothing(device, body, at_end, raised):
    device.at_end = at_end
    with pytest.raises(RuntimeError, match=raised):
        CudaGraphs(DEVICE)(body)
    assert (device.stream, device.asking, device.capturing, device.drawn) == ("main", [], False, 7)
    assert list(device.pools.values()) == [0]


def test_all_graphs_have_one_pool_which_outlives_a_failed_capture(device):
    capture = CudaGraphs(DEVICE)
    capture(lambda: None)
    capture(lambda: None)
    assert list(device.pools.values()) == [2]
    device.at_end = RuntimeError("invalid capture")
    with pytest.raises(RuntimeError) as raised:
        capture(lambda: None)
    assert list(device.pools.values()) == [2]
    assert isinstance(raised.value, GraphsInvalidated) == (device.version < "2.14")


def trained(capture):
    parts, _ = parts_of(*TINY, "precision=fp16_dynamic", "model.dropout=0.2")
    made = StepRunner(parts, [Ring(64, len(one.weights.names), parts.device) for one in parts.learners], capture)
    return made, parts, parts.prepare(next(parts.loaders["train"].batches(0)))


def test_learners_and_random_numbers_are_as_they_were(device):
    device.at_end = RuntimeError("invalid capture")
    made, parts, batch = trained(CudaGraphs(DEVICE))
    for _ in range(WARM_UP):
        made.run(batch, [None])
    (learner,) = parts.learners
    before = {name: (value, value.clone()) for name, value in learner.moving().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        made._graphs._captured(batch, lambda batch: [train_step(learner, parts.model, batch, parts.plan)])
    assert all(value is learner.moving()[name] for name, (value, _) in before.items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert device.stream == "main"
    assert not learner.weights.gradients.in_place()


def test_where_a_failed_capture_spoils_the_graphs_before_it_all_is_launched(device):
    made, _, batch = trained(CudaGraphs(DEVICE))
    made._graphs._graphs["other"] = object()
    made._graphs._capture._captured = True
    device.at_end = RuntimeError("out of memory")
    for _ in range(WARM_UP + 1):
        made.run(batch, [None])
    (note,) = made.notes
    assert "out of memory" in note
    assert ("another shape" in note) == bool(made._graphs._graphs) == (device.version >= "2.14")


def test_a_step_that_waits_for_the_device_is_not_captured(monkeypatch):
    @contextlib.contextmanager
    def looking(device):
        looks.append(device)
        yield ["net.py:5"]

    looks, captured = [], []
    monkeypatch.setattr(step_runner, "host_waits", looking)
    made, parts, batch = trained(captured.append)
    for _ in range(WARM_UP + 2):
        made.run(batch, [None])
    (note,) = made.notes
    assert "the host waits for the device, in net.py:5" in note
    assert not captured
    assert looks == [parts.device]


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_set_sync_debug_mode"), reason="needs a build for CUDA")
def test_waits_are_found_by_their_places_and_other_warnings_go_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with step_runner.host_waits(DEVICE) as found:
            assert torch.cuda.get_sync_debug_mode() == 1
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "/some/net.py", 12)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [str(one.message) for one in others] == ["old"]
    assert found == ["net.py:12"]
    assert torch.cuda.get_sync_debug_mode() == 0
    with step_runner.host_waits(torch.device("cpu")) as found:
        assert torch.cuda.get_sync_debug_mode() == 0
    assert not found
