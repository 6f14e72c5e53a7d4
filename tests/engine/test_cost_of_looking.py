"""What looking costs, as ratios of steps that take turns: robust to a busy machine, unlike seconds."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from small_runs import parts_of

from mptrain.engine.ring import Ring
from mptrain.engine.step import train_step
from mptrain.engine.step_values import StepValues
from mptrain.probe.histograms import HistogramWatch
from mptrain.probe.overflow_attribution import nonfinite_parameters

pytestmark = pytest.mark.slow

RESNET = (
    "model=resnet18",
    "dataset=synthetic",
    "dataset.image_size=32",
    "dataset.train_samples=64",
    "train.batch_size=32",
    "train.epochs=50",
    "threads=1",
)


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
    """The norms of all parameters are the verdict itself; what names them is that they are kept, and read after an overflow."""
    parts, _ = parts_of(*RESNET, f"precision={precision}")
    (learner,) = parts.learners
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    ring = Ring(64, len(learner.weights.names), parts.device)

    def step():
        ring.record(train_step(learner, parts.model, batch, parts.plan))

    def name():
        values = (
            torch.zeros(()),
            learner.scale,
            learner.rate(),
            learner.scale,
            infinite["grad_norm"],
            torch.ones(1),
            infinite["norms"],
        )
        ring.record(StepValues(*values))
        (row,) = ring.take(wait=True)
        assert nonfinite_parameters(learner.weights.names, row.norms)[0]

    (a_step,) = medians(step, rounds=6)
    ring.take(wait=True)
    verdict = learner.judge()
    infinite = {
        "grad_norm": torch.full_like(verdict.grad_norm, torch.inf),
        "norms": torch.full_like(verdict.norms, torch.inf),
    }
    naming, judging = medians(name, learner.judge, rounds=50)
    with capsys.disabled():
        print(
            f"\n{precision}: naming {1e6 * naming:.0f} us, verdict {1e3 * judging:.1f} ms, step {1e3 * a_step:.0f} ms"
        )
    assert naming < 0.03 * a_step


@pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
def test_histograms_of_every_hundredth_step_cost_less_than_5_per_cent(precision, capsys):
    parts, _ = parts_of(*RESNET, f"precision={precision}")
    (learner,) = parts.learners
    parts.model.train()
    batch = parts.prepare(next(parts.loaders["train"].batches(0, start=0)))
    ring = Ring(64, len(learner.weights.names), parts.device)

    def looked_at():
        watch = HistogramWatch("main", 100)
        ring.record(train_step(learner, parts.model, batch, parts.plan, watch))
        assert watch.records()

    plain, looked = medians(
        lambda: ring.record(train_step(learner, parts.model, batch, parts.plan)), looked_at, rounds=6
    )
    share = (looked - plain) / (100 * plain)
    with capsys.disabled():
        print(
            f"\n{precision}: a step with histograms takes {looked / plain:.2f} times as long; every 100 steps {share:.2%}"
        )
    assert share < 0.05
