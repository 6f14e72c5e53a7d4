"""A watched loop on a CUDA device: the bits of the loop alone, the names a CPU finds, and no wait for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from mptrain.engine.options import LogOptions
from mptrain.integrations.watch import Watch
from mptrain.runlog import read_run
from tests.integrations import test_frameworks
from tests.integrations.watched_training import BEHIND, FAULTS, STEPS, Network, names, overflows, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="pytest -m gpu, on a GPU")]


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"clip": False, "micro": 2},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True)},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True), "clip": False},
        {"optimizer": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False)},
        {"wrap": torch.compile},
        {"network": lambda: Network(reentrant=True)},
        {"network": lambda: Network(reentrant=False)},
    ],
    ids=["clipped", "micro-batches", "fused-clipped", "fused", "loop", "inductor", "reentrant", "checkpointed"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of torch 2.11
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_loop_is_unchanged_and_its_skipped_steps_are_named_as_on_a_cpu(how, tmp_path):
    losses, weights, _, _ = train(False, **how)
    same_losses, same_weights, events, watch = train(True, folder=tmp_path / "run", **how)
    assert losses == same_losses
    assert all(map(torch.equal, weights, same_weights))
    micro = how.get("micro", 1)
    expected = sorted({-(-fault // micro) for fault in FAULTS})
    found = overflows(events)
    assert [*found] == expected
    for record in found.values():
        assert (names(record), record.skipped, record.loss, record.boundary) == (BEHIND, True, "finite", ("2", "4"))
    assert watch.last["step"] == STEPS
    run = read_run(tmp_path / "run")
    assert torch.cuda.get_device_name() in run.state.device
    per_step = [sum(losses[at : at + micro]) for at in range(0, len(losses), micro)]
    assert [one.loss for one in run.steps()] == pytest.approx(per_step)
    assert [one.step for one in run.histograms()] == [1, 5, 10]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
@pytest.mark.parametrize("every", [0, 2])
def test_no_update_waits_for_the_device(dtype, every, no_waiting):
    model = Network(faults=(3,))
    own = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    x = torch.randn(4, 8)
    watch = Watch(model, own, scaler, every=every, log=LogOptions(ring=100, seconds=1e9))
    for step in range(6):
        with no_waiting() if step else contextlib.nullcontext():  # the first step may set libraries up
            own.zero_grad()
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(own)
            scaler.update()
    watch.close()
    assert (watch.last["step"], watch.last["skipped"]) == (6, False)


@pytest.mark.parametrize("clip", [False, True])
def test_a_loop_in_bf16_without_a_scaler_is_unchanged(clip):
    def network():
        return Network(faults=(4,)).bfloat16()

    class Floating(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.bfloat16()).float()

    how = {"network": network, "wrap": Floating, "scaled": False, "clip": clip}
    losses, weights, _, _ = train(False, **how)
    same_losses, same_weights, events, _ = train(True, **how)
    assert torch.tensor(losses).nan_to_num(7).equal(torch.tensor(same_losses).nan_to_num(7))
    assert all(one.nan_to_num(7).equal(other.nan_to_num(7)) for one, other in zip(weights, same_weights, strict=True))
    first = next(iter(overflows(events).values()))
    assert (first.step, first.skipped, names(first)) == (4, False, [f"inner.{name}" for name in BEHIND])


@pytest.mark.parametrize(("framework", "prefix", "moved"), test_frameworks.FRAMEWORKS)
def test_a_framework_s_skipped_steps_are_named_on_the_device(framework, prefix, moved, tmp_path):
    test_frameworks.assert_skipped_steps_are_named(framework, prefix, moved, tmp_path, "cuda")
