"""A run that only overflows ends by itself, explains why, and leaves nothing broken behind."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from mptrain.cli.main import main
from mptrain.engine.checkpointing import take_snapshot
from mptrain.runlog.checkpoints import CheckpointStore
from mptrain.system.errors import NumericsError
from mptrain.system.records import StepRecord
from tests.small_runs import TINY, Kept, loop_of

#: Gradients overflow at this scale, and nothing lowers it.
HOPELESS = ("precision=fp16_static", "scaler.scale=1073741824", "train.max_consecutive_overflows=3")


def poison_inputs(loop, after):
    prepare = loop.parts.dataset.prepare

    def poisoned(batch, device, memory_format):
        prepared = prepare(batch, device, memory_format)
        if loop.progress.step >= after:
            prepared.inputs[0, 0, 0, 0] = math.nan
        return prepared

    object.__setattr__(loop.parts.dataset, "prepare", poisoned)


@pytest.mark.parametrize(
    ("precision", "ring"),
    [("fp32", 1), ("amp_dynamic", 64), ("fp16_static", 64), ("fp16_dynamic", 1), ("fp16_dynamic", 64)],
)
def test_trap_01_persistent_nan_ends_within_patience_with_finite_weights_saved(tmp_path, precision, ring):
    kept = Kept()
    patience = 7
    loop = loop_of(
        tmp_path, *TINY, "model=cnn", f"precision={precision}", f"train.max_consecutive_overflows={patience}", "train.epochs=20",
        f"log.ring={ring}", "log.seconds=1000", kept=kept,
    )  # fmt: skip
    poison_inputs(loop, after=5)
    with pytest.raises(NumericsError) as stop:
        loop.run()
    assert stop.value.exit_code == 4
    assert "7 steps in a row overflowed, the last at step 12" in str(stop.value)
    assert "the batch itself is not finite: inputs (nan)" in str(stop.value)
    steps = kept.of(StepRecord)
    assert [step.skipped for step in steps] == [False] * 5 + [True] * patience
    assert min(step.loss_scale for step in steps) >= 1
    state = loop.storage.store.load_latest().state
    assert state["progress"]["step"] == 12
    tensors = {name: value for name, value in state["model"].items() if value.is_floating_point()}
    assert any("running_var" in name for name in tensors)
    assert all(value.isfinite().all() for value in tensors.values())
    failure = loop.storage.paths.failure
    diagnosis = json.loads((failure / "diagnosis.json").read_text())
    assert (diagnosis["cause"], diagnosis["refused"], diagnosis["step"]) == ("input", 7, 12)
    assert torch.load(failure / "step.pt", weights_only=True)["batch"]["inputs"].isnan().any()


@pytest.mark.parametrize("nan", [False, True])
def test_infinities_of_the_cast_are_told_from_those_of_the_data(tmp_path, nan):
    loop = loop_of(tmp_path, *TINY, "precision=fp16_dynamic", "train.max_consecutive_overflows=3")
    prepare = loop.parts.dataset.prepare

    def raw(batch, device, memory_format):
        prepared = prepare(batch, device, memory_format)
        prepared.inputs.mul_(1e6)
        if nan:
            prepared.inputs[0, 0, 0, 0] = math.nan
        return prepared

    object.__setattr__(loop.parts.dataset, "prepare", raw)
    with pytest.raises(NumericsError) as stop:
        loop.run()
    failure = loop.storage.paths.failure
    cause = json.loads((failure / "diagnosis.json").read_text())["cause"]
    assert cause == ("input" if nan else "cast")
    assert ("the data holds inf or NaN" in stop.value.hint) is nan
    assert ("standardise the inputs in the data set" in stop.value.hint) is not nan
    kept = torch.load(failure / "step.pt", weights_only=True)
    assert kept["wide"] is not nan
    assert nan or (kept["batch"]["inputs"].isfinite().all() and kept["batch"]["inputs"].max() > 65504)


def test_gradients_that_overflow_at_the_lowest_scale_ask_for_a_lower_one(tmp_path):
    words = (
        *(*TINY, "precision=fp16_dynamic", "train.max_steps=6"),
        *("scaler.init_scale=1073741824", "scaler.max_scale=null", "scaler.min_scale=536870912"),
    )
    loop = loop_of(tmp_path, *words)
    loop.run()
    with pytest.raises(
        NumericsError, match="none of 6 updates was applied: every step overflowed, at the lowest"
    ) as stop:
        loop.require_success()
    assert stop.value.hint.startswith("set scaler.init_scale and scaler.min_scale below 2^29; mptrain diagnose ")
    again = loop_of(tmp_path / "again", *words, "train.max_consecutive_overflows=4")
    with pytest.raises(NumericsError) as stop:
        again.run()
    assert "set scaler.init_scale and scaler.min_scale below 2^29" in stop.value.hint


def test_a_loss_that_is_never_finite_asks_for_no_lower_scale(tmp_path):
    loop = loop_of(tmp_path, *TINY, "precision=fp16_dynamic", "train.max_steps=6")
    loop.parts.model.register_forward_hook(lambda m, args, out: out * math.nan)
    loop.run()
    with pytest.raises(
        NumericsError, match="none of 6 updates was applied: every step overflowed, and no loss"
    ) as stop:
        loop.require_success()
    assert "scale" not in stop.value.hint
    assert "mptrain diagnose" in stop.value.hint


def test_the_random_state_before_the_last_step_is_kept(tmp_path):
    seen = []
    loop = loop_of(tmp_path, *TINY, *HOPELESS, "model.dropout=0.3")
    # What a hook notes of the rehearsal is undone, so there are three steps.
    loop.parts.model.register_forward_pre_hook(lambda m, args: seen.append(torch.get_rng_state()))
    with pytest.raises(NumericsError):
        loop.run()
    assert torch.equal(torch.load(loop.storage.paths.failure / "step.pt")["random"]["torch"], seen[2])
    assert not torch.equal(seen[1], seen[2])


def test_a_loss_that_overflows_is_told_from_gradients_that_do(tmp_path):
    loop = loop_of(tmp_path, *TINY, "precision=fp32", "train.max_consecutive_overflows=3")
    loop.parts.model.register_forward_hook(lambda m, args, out: out * math.inf)
    with pytest.raises(NumericsError, match="the loss is not finite, although"):
        loop.run()


def test_applied_overflows_end_the_run_without_saving_broken_weights(tmp_path):
    words = ("precision=fp16_static", "scaler.scale=16777216", "scaler.on_overflow=apply")
    loop = loop_of(tmp_path, *TINY, *words, "train.max_consecutive_overflows=4")
    with pytest.raises(NumericsError, match="weights or buffers are not finite: parameter"):
        loop.run()
    assert loop.storage.store.load_latest() is None
    assert take_snapshot(loop.parts, loop.telemetry.step_log, loop.progress)["progress"]["step"] == 4


def test_a_mask_of_infinities_is_not_what_a_run_fails_from(tmp_path, monkeypatch):
    build = nn.Flatten.__init__

    def masked(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    monkeypatch.setattr(nn.Flatten, "__init__", masked)
    words = (*TINY, *HOPELESS)
    loop = loop_of(tmp_path, *words)
    with pytest.raises(NumericsError, match=r"inputs, weights and loss are finite.*weights and batch are saved"):
        loop.run()
    assert loop.storage.store.load_latest() is not None
    broken = loop_of(tmp_path / "broken", *words)
    broken.parts.model.register_buffer("mean", torch.zeros(3))
    broken.parts.model.mean[1] = math.nan
    with pytest.raises(
        NumericsError, match=r"weights or buffers are not finite: buffer mean \(nan\); the batch is saved"
    ):
        broken.run()


def test_the_command_exits_with_4_and_can_be_tried_again_with_another_scale(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *HOPELESS, "run.name=run"]) == 4
    captured = capsys.readouterr()
    error, hint = captured.err.splitlines()[-2:]
    assert error.startswith("error: 3 steps in a row overflowed, the last at step 3 with loss scale 2^30")
    assert "scaler.scale" in hint
    assert "Traceback" not in captured.err + captured.out
    run = tmp_path / "outputs" / "run"
    state = json.loads((run / "run.json").read_text())
    assert (state["status"], state["exit_code"]) == ("failed", 4)
    assert CheckpointStore(run / "checkpoints", 2).load_latest() is not None
    assert main(["resume", "outputs/run", "scaler.scale=1024"]) == 0
    assert "changed: scaler.scale was 1073741824, now 1024" in capsys.readouterr().out
    scales = [json.loads(line)["loss_scale"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert scales == [1073741824.0] * 3 + [1024.0] * 15
