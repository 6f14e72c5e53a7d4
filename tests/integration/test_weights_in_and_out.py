"""Weights leave runs as any program reads them, and runs begin with weights of any program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from mptrain.cli.main import main
from mptrain.config.compose import compose
from mptrain.run.evaluation import evaluate_run, export_run
from mptrain.run.resume import launch, resume
from mptrain.system.errors import CheckpointError
from tests.small_runs import TINY, environment, parts_of

RESNET = ("model=resnet18", "dataset.train_samples=64", "train.batch_size=16", "train.epochs=1")

PLAIN_TORCHVISION = """
import sys, torch
from torchvision.models import resnet18
file, inputs, output = sys.argv[1:]
model = resnet18(num_classes=10)
model.load_state_dict(torch.load(file, weights_only=True))  # strict
model.eval()
with torch.no_grad():
    torch.save(model(torch.load(inputs)), output)
assert "mptrain" not in sys.modules
"""


def train(*words):
    return launch(compose(words), lambda opening: []).root


@pytest.mark.workload
@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_exported_weights_give_the_same_predictions_in_plain_torchvision(tmp_path, monkeypatch, precision):
    monkeypatch.chdir(tmp_path)
    words = (*RESNET, f"precision={precision}")
    root = train(*words, "train.ema_decay=0.9")
    exported = export_run(str(root), "last", torch.float32, average=True, output=None)
    assert exported.averaged
    parts, _ = parts_of(*RESNET, "precision=fp32")
    batch = parts.prepare(next(parts.loaders["test"].batches(0)))
    torch.save(batch.inputs, "inputs.pt")
    subprocess.run(
        [sys.executable, "-c", PLAIN_TORCHVISION, exported.path, "inputs.pt", "outputs.pt"],
        check=True,
        env=environment(),
    )
    logits = torch.load("outputs.pt")
    records = evaluate_run(str(root), ["precision=fp32"], "last", average=True).records
    test = next(record for record in records if record.split == "test")
    # The same numbers as mptrain's own model with these weights, and on the whole split the metric that it reports.
    parts.model.load_state_dict(torch.load(exported.path, weights_only=True))
    parts.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(parts.model(batch.inputs), logits, rtol=1e-5, atol=1e-6)
        right = total = 0
        for one in parts.loaders["test"].batches(0):
            prepared = parts.prepare(one)
            right += (parts.model(prepared.inputs).argmax(1) == prepared.targets).sum().item()
            total += prepared.samples
    assert right / total == pytest.approx(test.metrics["top1"], abs=1e-9)


def test_raw_averaged_half_and_best_are_four_different_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = train(*TINY, "train.ema_decay=0.99", "precision=fp16_dynamic", "checkpoint.every_epochs=1")
    files = {
        name: export_run(str(root), which, dtype, average=average, output=None).path
        for name, which, dtype, average in (
            ("average", "last", torch.float32, True),
            ("raw", "last", torch.float32, False),
            ("half", "last", torch.float16, True),
            ("best", "best", torch.float32, True),
        )
    }
    assert len(set(files.values())) == 4
    weights = {name: torch.load(path, weights_only=True) for name, path in files.items()}
    assert {value.dtype for value in weights["half"].values()} == {torch.float16}
    for name, value in weights["average"].items():
        assert torch.equal(value.half(), weights["half"][name])
        assert not torch.equal(value, weights["raw"][name])
    masters = weights["raw"]
    assert any(not torch.equal(value, value.half().float()) for value in masters.values())  # not the rounded copies


@pytest.mark.long
def test_tied_weights_stay_one_averaged_or_raw_and_begin_another_run_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "model=word_lstm", "model.tied=true", "precision=fp16_dynamic", "train.max_steps=4", "optimizer.lr=0.02",
        "dataset.sequence_length=8", "dataset.train_samples=64", "train.batch_size=16", "dataset.val_share=0.02",
        "dataset.test_share=0.02",
    )  # fmt: skip
    root = train(*words, "train.ema_decay=0.9")
    for average in (True, False):
        path = export_run(str(root), "last", torch.float32, average=average, output=None).path
        weights = torch.load(path, weights_only=True)
        assert torch.equal(weights["embedding.weight"], weights["decoder.weight"])
        assert weights["embedding.weight"].data_ptr() == weights["decoder.weight"].data_ptr()
        assert not torch.equal(weights["embedding.weight"], weights["embedding.weight"].half().float())
    found = {record.split: record.metrics for record in evaluate_run(str(root), [], "last", average=False).records}
    tuned = evaluate_run(str(train(*words[:2], *words[2:], f"model.weights={path}", "optimizer.lr=1e-30")), [], "last",
                         average=False).records  # fmt: skip
    assert {record.split: record.metrics["loss"] for record in tuned} == {
        split: pytest.approx(metrics["loss"], rel=1e-5) for split, metrics in found.items()
    }


def test_an_average_that_a_run_has_not_is_not_made_up_for_its_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = str(train(*TINY))
    plain = evaluate_run(root, [], "last", average=True).records
    assert evaluate_run(root, ["train.ema_decay=0.9"], "last", average=True).records == plain


def test_fine_tuning_begins_with_the_weights_in_every_precision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = train(*TINY)
    source = torch.load(export_run(str(root), "last", torch.float32, average=False, output=None).path)
    for precision in ("fp32", "amp_dynamic", "fp16_dynamic", "bf16"):
        parts, _ = parts_of(*TINY, f"precision={precision}", f"model.weights={root}")
        assert all(torch.equal(value, source[name]) for name, value in parts.full_precision().items())
        assert parts.notes == (f"8 of 8 tensors loaded from {root} (step 18)",)


def test_a_resumed_run_does_not_need_the_weights_it_once_began_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(*TINY, "run.name=first")
    weights = export_run("outputs/first", "last", torch.float32, average=False, output=tmp_path / "w.pt").path
    train(*TINY, f"model.weights={weights}", "run.name=second", "train.max_steps=6")
    weights.unlink()
    resume("outputs/second", ["train.max_steps=9"], lambda opening: [])
    assert json.loads((tmp_path / "outputs/second/summary.json").read_text())["steps"] == 9
    assert evaluate_run("outputs/second", [], "last", average=True).step == 9
    with pytest.raises(CheckpointError, match=r"w.pt: there is no such file"):
        train(*TINY, f"model.weights={weights}")


def test_weights_that_fp16_cannot_hold_are_named_where_they_are_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parts, _ = parts_of(*TINY)
    weights = parts.model.state_dict()
    weights["1.weight"][0, :2] = 70000.0
    torch.save(weights, "large.pt")
    train(*TINY, "precision=fp32", "model.weights=large.pt", "train.max_steps=1", "optimizer.lr=1e-9", "run.name=large")
    said = "2 values in weights and buffers are beyond 65504, the largest of float16, and clamped to it: 1.weight (2)"
    for flags, expected in (("--fp16", [f"warning: {said}"]), ("--raw", [])):
        assert main(["export", "large", flags]) == 0
        assert capsys.readouterr().err.splitlines() == expected
