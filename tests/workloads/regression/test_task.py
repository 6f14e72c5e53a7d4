"""Regression: losses of standardised targets in FP32, metrics of scikit-learn in the user's units, answers with names."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn
from torch.overrides import TorchFunctionMode

import mptrain
from mptrain.engine.sample_metrics import SampleMetrics
from mptrain.run.prediction import predictor
from mptrain.system.errors import ConfigError
from mptrain.system.records import as_json
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.regression.task import Regression
from tests.loops import each

WORDS = ("model=mlp", "model.hidden=[16]", "train.batch_size=16", "train.epochs=2", "device=cpu", "threads=1")
MEAN, STD = (2e5, -3.0, 0.5), (1e5, 0.25, 2.0)


def task(outputs=3, **options):
    scale = {"target_mean": MEAN[:outputs], "target_std": STD[:outputs]}
    return Regression(num_outputs=outputs, **{**scale, **options})


def drawn(count, outputs, seed=0):
    """Outputs of a network as float32, and targets near them in the user's units."""
    draws = torch.Generator().manual_seed(seed)
    answers = torch.randn(count, outputs, generator=draws)
    noise = torch.randn(count, outputs, generator=draws)
    return answers, (answers + noise) * torch.tensor(STD[:outputs]) + torch.tensor(MEAN[:outputs])


def judged(judge, answers, targets, size=7):
    """Metrics of a split that is evaluated in batches, as the engine gathers them, and the gathered measurements."""
    gathered = SampleMetrics()
    for some, wanted in zip(answers.split(size), targets.split(size), strict=True):
        batch = Batch(some, wanted)
        gathered.add(batch, judge.measure(nn.Identity(), batch), judge.answers(nn.Identity(), batch))
    return gathered.metrics(judge), gathered


@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("outputs", [1, 3])
def test_metrics_are_those_of_scikit_learn(outputs, standardise):
    answers, targets = drawn(53, outputs)
    judge = task(outputs, standardise=standardise)
    found, _ = judged(judge, answers, targets)
    said = answers.double().numpy() * STD[:outputs] + MEAN[:outputs] if standardise else answers.double().numpy()
    true = targets.double().numpy()
    assert found["mse"] == pytest.approx(metrics.mean_squared_error(true, said), rel=1e-9)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(true, said), rel=1e-9)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(true, said), rel=1e-9)
    assert found["r2"] == pytest.approx(metrics.r2_score(true, said), rel=1e-9)
    if outputs == 1:  # a network may return [N], and targets may be [N]
        assert judged(judge, answers[:, 0], targets[:, 0])[0] == found


@pytest.mark.filterwarnings("ignore:R.2 score is not well-defined")
@pytest.mark.parametrize("exact", [True, False])
def test_where_targets_are_constant_r2_is_that_of_scikit_learn(exact):
    answers, targets = drawn(20, 3)
    targets[:, 1] = 0.5
    answers[:, 1] = targets[:, 1] + (not exact)
    judge = task(3, standardise=False)
    found, _ = judged(judge, answers, targets)
    assert found["r2"] == pytest.approx(metrics.r2_score(targets.numpy(), answers.numpy()), rel=1e-6)
    targets[:, 1] = 0.1  # whose mean over 20 is not 0.1, so that scikit-learn divides by 1e-32
    answers[:, 1] = targets[:, 1] + (not exact)
    assert judged(judge, answers, targets)[0]["r2"] == pytest.approx(found["r2"], rel=1e-6)
    one, _ = judged(judge, answers[:1], targets[:1])
    assert math.isnan(one["r2"])
    assert math.isnan(metrics.r2_score(targets[:1].numpy(), answers[:1].numpy()))
    assert math.isfinite(one["rmse"])


def test_metrics_have_intervals_and_those_of_outputs_that_are_not_finite_are_not():
    answers, targets = drawn(60, 2)
    judge = task(2)
    found, gathered = judged(judge, answers, targets)
    intervals = gathered.intervals(judge, found)
    assert intervals.keys() == found.keys() == {"loss", "mse", "rmse", "mae", "r2"}
    assert all(low < found[name] < high for name, (low, high) in intervals.items())
    answers[5, 1] = torch.nan
    found, _ = judged(judge, answers, targets)
    assert all(map(math.isnan, found.values()))


LOSSES = {"mse": nn.MSELoss(), "mae": nn.L1Loss(), "huber": nn.HuberLoss(delta=0.3)}


@each("name", LOSSES)
def test_a_loss_is_of_standardised_targets_in_float32(name):
    answers, targets = drawn(8, 3)
    judge = task(loss_of=name, delta=0.3)
    standard = (targets - torch.tensor(MEAN)) / torch.tensor(STD)
    loss = judge.loss(nn.Identity(), Batch(answers, targets))
    assert loss.dtype == torch.float32
    assert loss == pytest.approx(LOSSES[name](answers, standard).item(), rel=1e-6)
    half = judge.loss(nn.Identity(), Batch(answers.half(), targets))
    assert (half.dtype, torch.isfinite(half).item()) == (torch.float32, True)
    assert judged(judge, answers, targets)[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    plain = task(loss_of=name, delta=0.3, standardise=False).loss(nn.Identity(), Batch(answers, targets))
    assert plain == pytest.approx(LOSSES[name](answers, targets).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("outputs", "returned"), [(1, (4, 2)), (1, (1, 4)), (1, ()), (3, (4,)), (3, (4, 1)), (3, (4, 3, 1)), (4, (4,))]
)
def test_an_output_of_another_shape_is_refused_and_never_broadcast(outputs, returned):
    judge = Regression(num_outputs=outputs, target_mean=(0.0,) * outputs, target_std=(1.0,) * outputs)
    batch = Batch(torch.zeros(4, 2), torch.zeros(4, outputs))
    network = nn.Identity()
    network.forward = lambda inputs: torch.zeros(returned)
    with pytest.raises(ConfigError, match=rf"Identity returns \[.*\], and \[4, {outputs}\] are wanted"):
        judge.loss(network, batch)
    network.forward = lambda inputs: (inputs, inputs)
    with pytest.raises(ConfigError, match="Identity returns a tuple"):
        judge.answers(network, batch)


def test_answers_have_the_names_and_units_of_the_targets():
    named = task(2, output_names=("price", "rooms"))
    (first, second) = named.predict(nn.Identity(), Batch(torch.tensor([[1.0, 0.0], [torch.nan, torch.inf]]), None))
    assert first == {"price": 3e5, "rooms": -3.0}
    assert json.loads(as_json(second))["nonfinite"] == {"price": "nan", "rooms": "inf"}
    assert task(1).predict(nn.Identity(), Batch(torch.tensor([-1.0]), None)) == [{"value": 1e5}]
    assert task(1, standardise=False).predict(nn.Identity(), Batch(torch.tensor([[-1.0]]), None)) == [{"value": -1.0}]


def house(count=192, seed=0):
    """Inputs and targets of two units, which follow from them."""
    draws = np.random.default_rng(seed)
    inputs = draws.normal(size=(count, 5))
    return inputs, inputs @ draws.normal(size=(5, 2)) * [1e5, 0.1] + [4e5, 3]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_a_network_learns_targets_of_any_unit_in_every_mode(mode):
    inputs, targets = house()
    data = {part: (inputs[rows], targets[rows]) for part, rows in (("train", slice(128)), ("val", slice(128, None)))}
    words = ("task=regression", f"precision={mode}", "train.epochs=6", "optimizer.lr=0.01", "run.name=run")
    run = mptrain.train(*WORDS, *words, data=data, show=False)
    assert run.summary["metric_name"] == "rmse"
    assert run.summary["val"]["r2"] > 0.5
    with predictor("outputs/run") as loaded:
        answers = [one.answer for one in loaded.predict(loaded.source.inputs_in(inputs[128:]))]
    said = np.array([[answer["0"], answer["1"]] for answer in answers])
    assert metrics.r2_score(targets[128:], said) == pytest.approx(run.summary["val"]["r2"], rel=1e-6)
    assert run.model()(torch.zeros(3, 5)).shape == (3, 2)


def test_a_network_of_another_shape_and_targets_of_another_kind_are_refused_before_a_step():
    inputs, targets = house(32)
    with pytest.raises(ConfigError, match=r"Sequential returns \[16, 3\], and \[16, 2\] are wanted"):
        mptrain.train(*WORDS, "task=regression", "+model.num_outputs=3", data=(inputs, targets), show=False)
    with pytest.raises(
        ConfigError, match=r"task=regression needs target_mean, .*: the targets are int64 \[N\]"
    ) as refused:
        mptrain.train(*WORDS, "task=regression", data=(inputs, [1] * 32), show=False)
    assert "for these targets: task=classify" in refused.value.problems[0].hint
    with pytest.raises(
        ConfigError, match=r"task=classify needs num_classes, .*: the targets are float64 \[N, 2\]"
    ) as refused:
        mptrain.train(*WORDS, data=(inputs, targets), show=False)
    assert "for these targets: task=regression" in refused.value.problems[0].hint


def test_a_model_of_classes_returns_numbers_if_it_is_told_how_many():
    images = np.random.default_rng(0).random((32, 3, 8, 8))
    words = ("model=cnn", "model.widths=[4,4]", "task=regression", "train.max_steps=2", "device=cpu", "threads=1")
    data = (images, images.mean((1, 2, 3)))
    told = ("model.facts={num_classes: num_outputs}", "train.batch_size=8")
    assert mptrain.train(*words, *told, data=data, show=False).summary["steps"] == 2


class Copies(TorchFunctionMode):
    """Counts tensors that are made of numbers in Python, for which a step would wait on a GPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.tensor, torch.as_tensor)
        return func(*args, **(kwargs or {}))


def test_only_the_first_loss_copies_numbers_to_the_device():
    judge = Regression(num_outputs=2, target_mean=(0.125, 7.0), target_std=(3.0, 2.0))
    counts = []
    for _ in range(3):
        with Copies() as copies:
            judge.loss(nn.Identity(), Batch(torch.ones(4, 2), torch.ones(4, 2)))
        counts.append(copies.count)
    assert counts == [2, 0, 0]
