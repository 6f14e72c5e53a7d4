"""Metrics of a split and their intervals: what an evaluation makes of sums and answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mptrain.engine.sample_metrics import FEWEST, SampleMetrics
from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.task import Task


class Says(Task):
    metric, higher_is_better, shares = "right", True, ("right",)

    def summarise(self, sums, terms):
        return {name: total / terms for name, total in sums.items()}

    def score(self, answers):
        return {"middle": float(np.median(answers))}


def batch_of(samples, counts=None):
    return Batch(torch.zeros(samples, 1), torch.zeros(samples), counts)


def gathered_of(values, answers=(), counts=None, batch_size=7):
    gathered = SampleMetrics()
    for begin in range(0, len(values), batch_size):
        part = slice(begin, begin + batch_size)
        chunk = torch.tensor(values[part], dtype=torch.float64)
        gathered.add(batch_of(len(chunk), counts and tuple(counts[part])), {"right": chunk}, answers[part])
    return gathered


def test_metrics_are_of_all_samples_whatever_the_batches():
    values, answers = [0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.0], list(range(9))
    expected = {"right": sum(values) / 9, "middle": 4.0}
    for size in (1, 2, 7, 9):
        assert gathered_of(values, answers, batch_size=size).metrics(Says()) == pytest.approx(expected)


def test_terms_are_counted_where_samples_have_several():
    gathered = gathered_of([3.0, 1.0], counts=(3, 5))
    assert gathered.metrics(Says())["right"] == 0.5
    assert gathered.samples == 2


def test_infinite_and_missing_sums_become_metrics_that_say_so():
    assert math.isnan(gathered_of([math.inf, -math.inf]).metrics(Says())["right"])
    assert math.isinf(gathered_of([math.inf, 1.0]).metrics(Says())["right"])


def test_a_share_has_wilsons_interval_that_holds_at_the_ends_too():
    gathered = gathered_of([1.0] * 40)
    low, high = gathered.intervals(Says(), gathered.metrics(Says()))["right"]
    z2 = 1.959964**2
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(40 / (40 + z2), rel=1e-4)  # Wilson's formula with all 40 right


def test_a_mean_has_the_interval_of_its_standard_error():
    class Mean(Says):
        shares = ()

    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).double().tolist()
    gathered = gathered_of(values)
    low, high = gathered.intervals(Mean(), gathered.metrics(Mean()))["right"]
    error = np.std(values, ddof=1) / math.sqrt(400)
    assert (low + high) / 2 == pytest.approx(np.mean(values))
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.08)  # 1,000 resamples


def test_answers_are_resampled_too():
    answers = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    gathered = gathered_of([1.0] * 400, answers)
    low, high = gathered.intervals(Says(), gathered.metrics(Says()))["middle"]
    assert (high - low) / 2 == pytest.approx(1.96 * 1.2533 * np.std(answers) / 20, rel=0.3)  # of a normal's median
    assert gathered.intervals(Says(), gathered.metrics(Says()))["middle"] == (low, high)


def test_few_samples_and_what_never_varies_have_no_interval():
    few = gathered_of([0.0, 1.0] * (FEWEST // 2 - 1))
    assert few.intervals(Says(), few.metrics(Says())) == {}
    constant = gathered_of([0.5] * 60, [3.0] * 60)
    assert set(constant.intervals(Says(), constant.metrics(Says()))) == {"right"}


def test_a_sum_of_a_whole_batch_counts_and_has_no_interval():
    class Whole(Says):
        shares = ()

    gathered = SampleMetrics()
    for _ in range(5):
        gathered.add(batch_of(10), {"right": torch.tensor(5.0)}, ())
    assert gathered.metrics(Whole()) == {"right": 0.5}
    assert gathered.intervals(Whole(), {"right": 0.5}) == {}


def test_an_infinite_loss_has_no_interval_and_no_warning():
    class Loses(Says):
        shares = ()

    assert gathered_of([0.5, math.inf, *[1.0] * 40]).intervals(Loses(), {"right": math.inf}) == {}
    assert gathered_of([math.nan] * 40).intervals(Says(), {"right": math.nan}) == {}


@pytest.mark.parametrize(("samples", "calls"), [(100, 200), (1000, 100), (40_000, 25)])
def test_the_more_answers_there_are_the_fewer_resamples_are_scored(samples, calls):
    asked = []

    class Counts(Says):
        def score(self, answers):
            asked.append(len(answers))
            return {"middle": float(answers[0])}

    gathered = SampleMetrics()
    gathered.add(batch_of(samples), {}, list(range(samples)))
    assert gathered.intervals(Counts(), {"middle": samples / 2}).keys() == {"middle"}
    assert asked == [samples] * calls


def test_a_score_that_repeated_samples_bias_has_the_error_of_a_jackknife():
    """A number of different answers falls by a third in every bootstrap resample, and by a group's in the jackknife."""

    class Different(Says):
        def score(self, answers):
            return {"different": float(len({round(answer, 2) for answer in answers}))}

    answers = torch.rand(400, generator=torch.Generator().manual_seed(1)).tolist()
    gathered = gathered_of([1.0] * 400, answers)
    metrics = gathered.metrics(Different())
    low, high = gathered.intervals(Different(), metrics)["different"]
    assert (low + high) / 2 == pytest.approx(metrics["different"])
    fresh = [
        Different().score(torch.rand(400, generator=torch.Generator().manual_seed(seed)).tolist())["different"]
        for seed in range(2, 60)
    ]
    assert 0.3 < (high - low) / 2 / (1.96 * np.std(fresh)) < 3


def test_no_interval_leaves_the_range_of_its_metric():
    class Bounded(Says):
        shares = ()

        def summarise(self, sums, terms):
            return {"percent": 100 * sums["right"] / terms}

    gathered = gathered_of([1.0] * 199 + [0.0])
    low, high = gathered.intervals(Bounded(), gathered.metrics(Bounded()))["percent"]
    assert low < 99.5 < high <= 100


@pytest.mark.parametrize(
    ("sums", "answers", "said"),
    [
        ({"loss": torch.ones(3)}, (), "returns 3 values of loss for 4 samples"),
        ({"loss": 0.5}, (), "returns a float of loss for 4 samples"),
        ({"loss": torch.ones(4)}, [1], "returns 1 for 4 samples"),
    ],
)
def test_measurements_that_do_not_fit_the_samples_are_refused_by_name(sums, answers, said):
    with pytest.raises(ConfigError, match=said):
        SampleMetrics().add(batch_of(4), sums, answers)


class Odd(Says):
    def __init__(self, value):
        self.value = value

    def summarise(self, sums, terms):
        return {"right": self.value}


def test_metrics_are_numbers():
    for value, expected in ((torch.tensor(0.5), 0.5), (np.float64(0.25), 0.25), (np.float32(0.5), 0.5), (3, 3)):
        found = gathered_of([1.0] * 3).metrics(Odd(value))
        assert found == {"right": expected}
        assert type(found["right"]) is not torch.Tensor
    for value in (None, "good", [1.0], torch.ones(2), np.ones(2)):
        with pytest.raises(ConfigError, match="the task's metric right is"):
            gathered_of([1.0] * 3).metrics(Odd(value))
