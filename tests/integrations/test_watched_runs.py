"""What watched loops have on record, as the commands read it: their rule, dtypes, results, and updates that round away."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mptrain
from mptrain.cli.main import main
from mptrain.config.config_diff import flat_settings
from mptrain.lab.replay import replay_run
from mptrain.runlog import read_run
from mptrain.study.comparison.run_measures import measure
from tests.integrations.watched_training import Network


def half_loop(folder, seed, dtype, *, rate=0.05):
    """Train 30 watched updates under autocast to FP16 or BF16, or in FP32 for None."""
    torch.manual_seed(seed)
    model = Network(faults=())
    own = torch.optim.SGD(model.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10, enabled=dtype == torch.float16)
    with mptrain.watch(model, own, scaler, every=10, dir=folder) as watch:
        for _ in range(30):
            x = torch.randn(16, 8)
            own.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                out = model(x)
            scaler.scale(nn.functional.cross_entropy(out.float(), x[:, :4].argmax(1))).backward()
            scaler.step(own)
            scaler.update()
    return watch


def test_a_watched_run_is_replayed_with_its_own_rule_and_with_another(tmp_path):
    half_loop(tmp_path / "run", 0, torch.float16)
    (own,) = replay_run(str(tmp_path / "run"), []).learners
    assert (own.same, own.recorded.skipped) == (30, own.replayed.skipped)
    assert own.recorded.skipped > 0
    (static,) = replay_run(str(tmp_path / "run"), ["scaler=static", "scaler.scale=8"]).learners
    assert (static.replayed.skipped, static.replayed.highest) == (0, 8)


@pytest.mark.parametrize(
    ("dtype", "outputs", "compute"),
    [(torch.float16, "float16", "float16"), (torch.bfloat16, "bfloat16", "bfloat16"), (None, "float32", "float32")],
)
def test_dtypes_are_recorded_as_they_were_seen(dtype, outputs, compute, tmp_path):
    half_loop(tmp_path / "run", 0, dtype)
    run = read_run(tmp_path / "run")
    precision = flat_settings(run.config)
    assert (precision[f"precision.outputs.{outputs}"], precision["precision.compute"]) == (5, compute)
    assert run.state.parts["precision"] == f"parameters float32; gradients float32; outputs {outputs}"


def test_watched_runs_are_compared_by_their_last_losses_or_their_evaluations(tmp_path):
    for seed in range(2):
        half_loop(tmp_path / f"half{seed}", seed, torch.bfloat16)
        half_loop(tmp_path / f"full{seed}", seed, None)
    runs = [measure(read_run(tmp_path / f"{kind}{seed}")) for kind in ("half", "full") for seed in range(2)]
    assert [run.seed for run in runs] == [0, 1, 0, 1]
    assert [run.split for run in runs] == ["train"] * 4
    losses = [one.loss for one in read_run(tmp_path / "full1").steps()]
    assert runs[3].metrics["loss"] == pytest.approx(sum(losses) / 30)

    model = Network(faults=())
    with mptrain.watch(model, torch.optim.SGD(model.parameters(), 0.1), dir=tmp_path / "told") as watch:
        watch.evaluated({"accuracy": torch.tensor(0.5)}, samples=10)
    told = measure(read_run(tmp_path / "told"))
    assert (told.split, told.metrics, told.samples) == ("val", {"accuracy": 0.5}, 10)


def test_updates_that_round_away_are_counted_but_not_those_of_rate_0(tmp_path):
    def lost(rate):
        torch.manual_seed(0)
        model = Network(faults=()).bfloat16()
        own = torch.optim.SGD(model.parameters(), rate)
        with mptrain.watch(model, own, every=1, dir=tmp_path / str(rate)):
            model(torch.randn(4, 8).bfloat16()).square().mean().backward()
            own.step()
        (record,) = read_run(tmp_path / str(rate)).histograms()
        return [sum(column) for column in zip(*record.unchanged.values(), strict=True)]

    moving, same = lost(1e-6)
    assert 0.9 * moving < same <= moving
    assert main(["report", str(tmp_path / "1e-06")]) == 0
    page = (tmp_path / "1e-06" / "report.md").read_text()
    assert "of the updates rounded away, because the weights are stored in bfloat16" in page
    assert lost(0.0) == [0, 0]
    moving, same = lost(1.0)
    assert moving > 0
    assert same < 0.5 * moving


def test_an_evaluation_after_the_end_is_what_is_compared(tmp_path):
    watch = half_loop(tmp_path / "run", 0, None)
    watch.evaluated({"accuracy": 0.25})
    assert measure(read_run(tmp_path / "run")).metrics == {"accuracy": 0.25}


def test_a_scaler_of_two_optimizers_is_not_replayed_as_two(tmp_path, capsys):
    models = [Network(faults=(3,)), Network(faults=())]
    own = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with mptrain.watch(models, own, scaler, dir=tmp_path / "run"):
        for _ in range(5):
            scaler.scale(sum(model(torch.randn(4, 8)).square().mean() for model in models)).backward()
            for optimizer in own:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    assert main(["replay", str(tmp_path / "run")]) == 6
    assert "the loop has one loss scaler for optimizer0 and optimizer1" in capsys.readouterr().err


def test_run_times_of_an_evaluation_of_transformers_are_no_metrics(tmp_path):
    pytest.importorskip("transformers")
    from mptrain.integrations.transformers import Numerics

    model, numerics = Network(faults=()), Numerics(dir=tmp_path / "run")
    own = torch.optim.SGD(model.parameters(), 0.1)
    numerics.on_train_begin(None, None, None, model=model, optimizer=own)
    told = {"eval_loss": 0.5, "eval_runtime": 2.0, "eval_samples_per_second": 9.0, "epoch": 1.0}
    numerics.on_evaluate(None, None, None, metrics=told)
    numerics.on_train_end(None, None, None)
    assert measure(read_run(tmp_path / "run")).metrics == {"loss": 0.5}
