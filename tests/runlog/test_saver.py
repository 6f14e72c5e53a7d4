"""Saving while the state goes on changing: what is written, when, and what becomes of errors."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch

from mptrain.runlog import RecordWriter
from mptrain.runlog.checkpoints import CheckpointStore, HostCopy, Saver
from mptrain.runlog.manifest import read_manifest
from mptrain.system.device import Capabilities
from mptrain.system.errors import StorageError
from mptrain.system.records import EventRecord


class Gate(CheckpointStore):
    """A store that writes nothing until it is opened, or refuses."""

    def __init__(self, folder):
        super().__init__(folder, keep=9)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.refuses = False

    def save(self, state, **known):
        self.entered.set()
        assert self.opened.wait(20)
        if self.refuses:
            raise StorageError("cannot write it", "another disk")
        return super().save(state, **known)


@pytest.fixture
def writer(paths):
    writer = RecordWriter(paths)
    yield writer
    writer.close()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "checkpoints")


@pytest.fixture
def saver(gate, writer):
    saver = Saver(gate, writer, async_save=True)
    yield saver
    gate.opened.set()
    saver._thread.shutdown()


def every_kind_of_value():
    """Tensors that share memory, objects that are there twice, and all that a state may hold."""
    torch.manual_seed(1)
    flat = torch.randn(1000)
    shared = {"numbers": (1, 2.5, True, None, "text")}
    model = torch.nn.BatchNorm2d(3)
    return {
        "model": model.state_dict(),
        "ordered": OrderedDict(b=1, a=2),
        "parameter": model.weight,
        "views": [flat[10:20], flat[100:].view(30, 30).t(), flat],
        "last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "half": torch.ones(7, dtype=torch.float16),
        "odd": torch.arange(13, dtype=torch.uint8),
        "scalar": torch.tensor(3.0, requires_grad=True),
        "empty": [torch.zeros(0), torch.zeros(0, 3)],
        "again": [shared, shared, flat],
        "keys": {1: "a", 2: []},
    }


def save(saver, state, step=1):
    saver.save(state, step=step, metric=None, config_digest="")


def test_files_are_the_same_whoever_writes_them(tmp_path, writer):
    state, digests = every_kind_of_value(), []
    for async_save in (True, False):
        store = CheckpointStore(tmp_path / str(async_save), keep=1)
        with Saver(store, writer, async_save=async_save) as saver:
            save(saver, state)
            save(saver, state, step=2)
        digests.append(read_manifest(store.folder / "step-00000002.json").sha256)
    path = store.save(state, step=3, records={}, metric=None, config_digest="")
    digests.append(read_manifest(path).sha256)
    assert len(set(digests)) == 1


def test_what_is_saved_is_the_state_of_that_moment(saver, gate):
    inner = torch.arange(6.0)
    state = {"weights": inner, "view": inner[2:], "list": [1, [2]], "dict": {"a": 1}}
    save(saver, state)
    assert gate.entered.wait(20)
    inner.zero_()
    state["list"][1].append(3)
    state["dict"]["a"] = 2
    del state["view"]
    gate.opened.set()
    saver.wait()
    saved = gate.load_latest().state
    assert torch.equal(saved["weights"], torch.arange(6.0))
    assert torch.equal(saved["view"], torch.arange(6.0)[2:])
    assert (saved["list"], saved["dict"]) == ([1, [2]], {"a": 1})


def test_the_records_count_up_to_the_moment_of_saving(saver, gate, writer, paths):
    writer.take(EventRecord("checkpoint", 1, {"metric": None}))
    save(saver, {})
    assert gate.entered.wait(20)
    length = paths.events.stat().st_size
    writer.take(EventRecord("warning", 2, {"message": "later"}))
    assert writer.flush()["events.jsonl"] > length > 0
    gate.opened.set()
    saver.wait()
    assert gate.load_latest().manifest.records["events.jsonl"] == length


def test_records_are_forced_to_the_disk_before_their_checkpoint(saver, gate, writer, monkeypatch):
    force, order = writer.force, []
    monkeypatch.setattr(writer, "force", lambda names: (force(names), order.append(sorted(names))))
    monkeypatch.setattr(CheckpointStore, "save", lambda *_, **__: order.append("checkpoint"))
    gate.opened.set()
    save(saver, {})
    saver.wait()
    assert order == [["epochs.csv", "events.jsonl", "steps.jsonl"], "checkpoint"]


def test_the_next_save_waits_for_the_one_before(saver, gate):
    state = {"weights": torch.zeros(5)}
    save(saver, state)
    second = threading.Thread(target=save, args=(saver, {"weights": torch.ones(5)}, 2))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    gate.opened.set()
    second.join(20)
    saver.wait()
    assert [gate.load(gate.folder / f"step-0000000{step}.json").state["weights"][0] for step in (1, 2)] == [0, 1]


def test_memory_is_used_again_for_the_next_copy():
    def addresses(state):
        return [tensor.data_ptr() for tensor in (*state["model"].values(), state["step"])]

    model = {str(size): torch.randn(size) for size in (1, 1000, 77)}
    state = {"model": model, "step": torch.zeros(1, dtype=torch.int64)}
    copy = HostCopy(everything=True)
    first = addresses(copy.take(state))
    model["77"].fill_(3.0)
    second = copy.take(state)
    assert addresses(second) == first
    assert not set(first) & set(addresses(state))
    assert torch.equal(second["model"]["77"], torch.full((77,), 3.0))
    model["1000"] = torch.randn(999)
    third = copy.take(state)
    assert [a == b for a, b in zip(addresses(third), first, strict=True)] == [True, False, True, True]
    assert torch.equal(third["model"]["1000"], model["1000"])


def test_a_device_copies_without_the_host_waiting(monkeypatch):
    class Event:
        waited = 0

        def synchronize(self):
            self.waited += 1

    calls, event, empty = [], Event(), torch.empty
    able = {"meta": Capabilities(pinned=True, streams=True), "cpu": Capabilities(host=True)}
    monkeypatch.setattr("mptrain.runlog.checkpoints.capabilities", lambda device: able[device.type])
    monkeypatch.setattr("mptrain.runlog.checkpoints.event_now", lambda device, sleeping: event)
    monkeypatch.setattr("mptrain.runlog.checkpoints.check_plain", lambda state: list(state.values()))
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **known: empty(*size, **known))  # noqa: PLW0108
    monkeypatch.setattr(
        "mptrain.runlog.checkpoints.foreach_copy_",
        lambda to, of, non_blocking: calls.append(([one.device.type for one in of], non_blocking)),
    )
    copy = HostCopy(everything=True)
    state = {"a": torch.ones(3, device="meta"), "generator": torch.zeros(8, dtype=torch.uint8)}
    copy.take(state | {"b": torch.ones(5, device="meta")})
    assert calls == [(["meta", "meta"], True), (["cpu"], False)]
    copy.wait()
    assert event.waited == 1
    calls.clear()
    copy.take({"host": torch.ones(2)})
    copy.wait()
    assert (calls, event.waited) == ([(["cpu"], False)], 1)


def test_without_memory_for_a_copy_the_state_is_written_at_once(saver, gate, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")

    weights = torch.arange(3.0)
    gate.opened.set()
    with monkeypatch.context() as scarce:
        scarce.setattr(torch, "empty", refuse)
        save(saver, {"weights": weights})
    assert saver._saving is None
    assert torch.equal(gate.load_latest().state["weights"], weights)


def test_an_error_of_the_thread_is_raised_once_by_the_next_call(saver, gate):
    gate.refuses = True
    save(saver, {})
    saver.check()
    gate.opened.set()
    with pytest.raises(StorageError, match="cannot write it"):
        saver.wait()
    saver.wait()
    save(saver, {})
    saver._saving.exception()
    with pytest.raises(StorageError, match="cannot write it") as caught:
        saver.check()
    assert caught.value.hint == "another disk"
    saver.check()
    save(saver, {})
    with pytest.raises(StorageError):
        save(saver, {})


def test_leaving_waits_for_the_disk_and_hides_no_error(gate, writer):
    threading.Timer(0.05, gate.opened.set).start()
    with Saver(gate, writer, async_save=True) as saver:
        save(saver, {"x": 1})
    assert gate.load_latest().state == {"x": 1}
    gate.refuses = True

    def fail_in_training():
        with Saver(gate, writer, async_save=True) as saver:
            save(saver, {"x": 2}, step=2)
            raise KeyError

    with pytest.raises(StorageError) as caught:
        fail_in_training()
    assert isinstance(caught.value.__context__, KeyError)


def test_a_thread_lives_from_the_first_save_to_the_end(gate, writer):
    before = threading.active_count()
    gate.opened.set()
    with Saver(gate, writer, async_save=True) as saver:
        assert threading.active_count() == before
        save(saver, {})
        saver.wait()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with Saver(gate, writer, async_save=False) as saver:
        save(saver, {"x": 1}, step=2)
        assert threading.active_count() == before
        assert gate.load_latest().state == {"x": 1}


def test_what_cannot_be_saved_is_refused_by_save_itself(saver, gate):
    with pytest.raises(TypeError, match=r"state\['a'\] is a set"):
        save(saver, {"a": {1}})
    assert not gate.entered.is_set()
