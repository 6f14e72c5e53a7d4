"""What the commands and functions that read run directories say of a watched loop, and of a step of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mptrain
from mptrain.cli.main import main
from mptrain.runlog import read_run
from mptrain.system.errors import StorageError


def loss_of(model, batch):
    return model(batch).float().square().mean()


def watched(folder, *, steps=4, every=2, between=lambda model, batch: None):
    """Train a network for some steps in FP16, watched, and return it and a batch."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(16, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(model, optimizer, scaler, every=every, dir=folder):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            between(model, batch)
            scaler.step(optimizer)
            scaler.update()
    return model, batch


@pytest.mark.parametrize("command", ["diagnose", "resume", "eval", "export"])
def test_a_command_that_needs_checkpoints_says_that_a_watched_loop_has_none(command, tmp_path, capsys):
    watched(tmp_path / "run")
    assert main([command, str(tmp_path / "run")]) == 6
    said = " ".join(capsys.readouterr().err.split())
    assert "error: the run was trained by a loop that mptrain.watch recorded: it has no configuration and no" in said
    assert "mptrain.diagnose(model, loss_fn, batch) examines a step" in said
    assert "Traceback" not in said


def test_a_loss_scale_is_recommended_in_terms_of_torch(tmp_path):
    watched(tmp_path / "run", steps=320, every=10)
    first, *reasons = str(mptrain.recommend(str(tmp_path / "run"))).splitlines()
    assert first.startswith("Recommended static loss scale: 2^")
    assert ": GradScaler with growth_interval=10**9 and init_scale=" in first
    assert any(line.startswith("  ") for line in reasons)


def test_histograms_are_asked_for_by_the_argument_of_the_watch(tmp_path):
    watched(tmp_path / "none", every=0)
    with pytest.raises(StorageError, match="has no histograms") as refused:
        mptrain.recommend(tmp_path / "none")
    assert refused.value.hint == "train it with every=100 in mptrain.watch"
    watched(tmp_path / "few")
    said = str(mptrain.recommend(tmp_path / "few"))
    assert "Train for 299 steps or more with every=9 in mptrain.watch." in said
    assert "diagnostics" not in said


def test_an_examination_inside_a_watched_loop_leaves_no_trace_in_its_record(tmp_path):
    def examine(model, batch):
        assert mptrain.doctor(model, loss_of, batch).ok
        assert mptrain.diagnose(model, loss_of, batch, loss_scale=8.0).ok

    records = []
    for name, between in (("plain", lambda *_: None), ("examined", examine)):
        watched(tmp_path / name, steps=2, every=1, between=between)
        run = read_run(tmp_path / name)
        records.append(([*run.steps()], [*run.histograms()], [*run.events()]))
    (steps, *plain), (examined_steps, *examined) = records
    assert plain == examined
    assert [(one.loss, one.grad_norm) for one in steps] == [(one.loss, one.grad_norm) for one in examined_steps]
