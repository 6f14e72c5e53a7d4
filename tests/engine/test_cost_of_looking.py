"""What looking costs, as ratios of steps that take turns: robust to a busy machine, unlike seconds."""

from __future__ import annotations

import statistics
import time

import pytest
from small_runs import parts_of

from mptrain.diagnostics.histograms import HistogramWatch
from mptrain.diagnostics.probe import UNWATCHED
from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step

pytestmark = pytest.mark.slow

RESNET = (
    "model=resnet18",
    "dataset=synthetic",
    "dataset.image_size=32",
    "dataset.train_samples=64",
    "train.batch_size=32",
    "threads=1",
)


class Nameless(Ring):
    """A ring that keeps the scalars of a row alone, so that no tensor could be named."""

    def record(self, loss, scale, verdict, lr, next_scale):
        verdict = type(verdict)(**{**{k: getattr(verdict, k) for k in verdict.__slots__}, "norms": verdict.norms[:0]})
        super().record(loss, scale, verdict, lr, next_scale)


def medians(*actions, rounds=12):
    """The median time of each action; they take turns."""
    times = [[] for _ in actions]
    for at in range(rounds + 1):
        for own, action in zip(times, actions, strict=True):
            started = time.perf_counter()
            action()
            if at:  # the first round allocates
                own.append(time.perf_counter() - started)
    return [statistics.median(own) for own in times]


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_naming_the_tensors_of_every_overflow_costs_less_than_3_per_cent_of_a_resnet18_step(precision, capsys):
    parts, _ = parts_of(*RESNET, f"precision={precision}")
    (learner,) = parts.learners
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    named = Ring(64, len(learner.weights.names), parts.device)
    nameless = Nameless(64, 0, parts.device)
    with_names, without = medians(
        lambda: train_step(learner, parts.model, batch, parts.plan, named),
        lambda: train_step(learner, parts.model, batch, parts.plan, nameless),
    )
    judging, _ = medians(learner.judge, lambda: None)
    with capsys.disabled():
        print(
            f"\n{precision}: {with_names / without - 1:+.2%} with names; judging is {judging / with_names:.1%} of a step of {with_names:.3f} s"
        )
    assert with_names < 1.03 * without


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_histograms_of_every_hundredth_step_cost_less_than_5_per_cent(precision, capsys):
    parts, _ = parts_of(*RESNET, f"precision={precision}")
    (learner,) = parts.learners
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    ring = Ring(64, len(learner.weights.names), parts.device)

    def looked_at():
        watch = HistogramWatch("main", 100)
        train_step(learner, parts.model, batch, parts.plan, ring, watch)
        assert watch.records()

    plain, looked = medians(
        lambda: train_step(learner, parts.model, batch, parts.plan, ring, UNWATCHED), looked_at, rounds=6
    )
    share = (looked - plain) / (100 * plain)
    with capsys.disabled():
        print(
            f"\n{precision}: a step with histograms takes {looked / plain:.2f} times as long; every 100 steps {share:.2%}"
        )
    assert share < 0.05
