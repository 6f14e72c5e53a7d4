"""Several labels of each sample: binary cross-entropy in FP32, metrics of scikit-learn, answers with names."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics
from torch import nn

import mptrain
from mptrain.engine.sample_metrics import SampleMetrics
from mptrain.run.prediction import predictor
from mptrain.system.errors import ConfigError
from mptrain.system.records import as_json
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.classification.task import MultiLabel

WORDS = ("model=mlp", "model.hidden=[16]", "train.batch_size=16", "train.epochs=6", "device=cpu", "threads=1")


def judged(logits, targets):
    judge, gathered = MultiLabel(num_outputs=targets.shape[1], label_counts=()), SampleMetrics()
    for some, wanted in zip(logits.split(9), targets.split(9), strict=True):
        gathered.add(Batch(some, wanted), {}, judge.answers(nn.Identity(), Batch(some, wanted)))
    return gathered.metrics(judge), gathered, judge


@pytest.mark.filterwarnings("ignore:No positive class found")
@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_metrics_are_those_of_scikit_learn(seed, kind):
    draws = torch.Generator().manual_seed(seed)
    targets = (torch.rand(40, 7, generator=draws) < torch.linspace(0, 1, 7)).to(kind)  # none of label 0
    logits = torch.randn(40, 7, generator=draws) + targets
    logits = logits.round() if seed % 2 else logits  # equal scores, also of a half
    logits[3, 2], logits[4, 2] = torch.inf, -torch.inf
    found, gathered, judge = judged(logits, targets)
    true, scores = targets.numpy(), logits.double().numpy()
    assert found["macro_f1"] == pytest.approx(
        metrics.f1_score(true, scores >= 0, average="macro", zero_division=0), rel=1e-12
    )
    there = true.sum(0) > 0
    precision = metrics.average_precision_score(true[:, there], np.nan_to_num(scores[:, there]), average="macro")
    assert found["map"] == pytest.approx(precision, rel=1e-12)
    assert {"map", "macro_f1"} <= gathered.intervals(judge, found).keys()


def test_the_loss_is_binary_cross_entropy_in_float32():
    logits, targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.eye(8, 3).long()
    judge = MultiLabel(num_outputs=3, label_counts=(1, 1, 1))
    loss = judge.loss(nn.Identity(), Batch(logits, targets))
    assert loss == F.binary_cross_entropy_with_logits(logits, targets.float())
    assert judge.loss(nn.Identity(), Batch(1e4 * logits.half(), targets)).dtype == torch.float32
    assert judged(logits, targets)[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    with pytest.raises(ConfigError, match=r"Identity returns \[8, 3\], and \[8, 2\] are wanted"):
        MultiLabel(num_outputs=2, label_counts=(1, 1)).loss(nn.Identity(), Batch(logits, targets[:, :2]))


def test_metrics_that_mean_nothing_are_nan():
    found, *_ = judged(torch.zeros(4, 2), torch.zeros(4, 2))
    assert (math.isnan(found["map"]), found["macro_f1"]) == (True, 0.0)
    found, *_ = judged(torch.tensor([[0.0, torch.nan]]), torch.ones(1, 2))
    assert math.isnan(found["map"]) == math.isnan(found["macro_f1"]) == math.isnan(found["loss"]) is True


def test_answers_are_the_probable_labels_and_all_probabilities():
    judge = MultiLabel(num_outputs=3, label_counts=(1, 1, 1), output_names=("cat", "dog", "eel"))
    first, second = judge.predict(nn.Identity(), Batch(torch.tensor([[0.0, -1.0, 9.0], [torch.nan, 1.0, -9.0]]), None))
    assert first["labels"] == ["cat", "eel"]
    assert first["probabilities"] == pytest.approx({"cat": 0.5, "dog": 0.26894, "eel": 0.99988}, rel=1e-4)
    assert second["labels"] == ["dog"]
    assert json.loads(as_json(second))["probabilities"]["cat"] is None


@pytest.mark.parametrize("mode", ["fp32", "fp16_dynamic"])
def test_a_network_learns_labels(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(192, 6))
    labels = inputs[:, :3] > [0, 1, -1]
    data = ((inputs[:128], labels[:128]), (inputs[128:], labels[128:]))
    words = ("task=multilabel", f"precision={mode}", "optimizer=adam", "optimizer.lr=0.03", "run.name=run")
    run = mptrain.train(*WORDS, *words, data=data, show=False)
    assert run.summary["metric_name"] == "map"
    assert run.summary["val"]["map"] > 0.8
    with predictor("outputs/run") as loaded:
        (answer,) = (one.answer for one in loaded.predict(loaded.source.inputs_in(torch.tensor([3.0, 3, 3, 0, 0, 0]))))
    assert answer["labels"] == [name for name, share in answer["probabilities"].items() if share >= 0.5]
    assert answer["probabilities"].keys() == {"0", "1", "2"}
    for task in ("classify", "regression"):
        with pytest.raises(ConfigError, match=rf"task={task} needs .*: the targets are bool \[N, 3\]") as refused:
            mptrain.train(*WORDS, f"task={task}", data=data, show=False)
        assert "for these targets: task=multilabel" in refused.value.problems[0].hint
