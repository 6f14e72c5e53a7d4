"""Saving what is on a CUDA device, which goes on computing."""

from __future__ import annotations

import pytest
import torch

from mptrain.runlog import RecordWriter, RunPaths
from mptrain.runlog.checkpoints import CheckpointStore, HostCopy, Saver
from mptrain.runlog.manifest import read_manifest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]


def test_a_copy_holds_what_was_there_when_it_was_asked_for():
    weights = torch.arange(1 << 22, device="cuda", dtype=torch.float32)
    expected = weights.cpu()
    state = {"weights": weights, "views": [weights[5:9], weights.view(2048, 2048).t()], "host": torch.ones(3)}
    copy = HostCopy(everything=True)
    for _ in range(2):
        weights.copy_(expected)
        taken = copy.take(state)
        for _ in range(20):
            weights.mul_(0.5)
        copy.wait()
        assert taken["weights"].is_pinned()
        assert torch.equal(taken["weights"], expected)
        assert torch.equal(taken["views"][0], expected[5:9])
        assert torch.equal(taken["views"][1], expected.view(2048, 2048).t())
        address = taken["weights"].data_ptr()
    assert copy.take(state)["weights"].data_ptr() == address


def test_files_are_the_same_in_the_background_and_not_and_those_of_the_cpu(tmp_path):
    state = {"weights": torch.arange(1000.0), "more": [torch.zeros(3, dtype=torch.float16), 5, "text"]}
    on_device = {"weights": state["weights"].cuda(), "more": [state["more"][0].cuda(), 5, "text"]}
    writer, digests = RecordWriter(RunPaths(tmp_path)), set()
    for name, (value, async_save) in enumerate([(state, True), (on_device, True), (on_device, False)]):
        store = CheckpointStore(tmp_path / str(name), keep=1)
        with Saver(store, writer, async_save=async_save) as saver:
            saver.save(value, step=1, metric=None, config_digest="")
        digests.add(read_manifest(store.folder / "step-00000001.json").sha256)
    writer.close()
    assert len(digests) == 1
