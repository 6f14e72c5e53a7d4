"""Captured steps, with a capture that does the step again instead of a CUDA graph: what is held fixed, and when it is used."""

from __future__ import annotations

import dataclasses
import random

import numpy
import pytest
import torch

import mptrain.engine.loop
from mptrain.engine import step_runner
from mptrain.engine.ring import Ring
from mptrain.engine.step_runner import MOST, WARM_UP, StepRunner
from mptrain.system.records import EventRecord, HistogramRecord
from tests.small_runs import TINY, Kept, loop_of, parts_of, steps_of, whole_and_resumed

GAN = (
    "model=dcgan",
    "model.width=4",
    "dataset.image_size=16",
    "dataset.train_samples=96",
    "train.batch_size=16",
    "train.epochs=2",
)


class Again:
    """Stands for CUDA graphs: counts what is captured and how often it runs."""

    def __init__(self, refuse=None):
        self.captured, self.runs, self.refuse = 0, 0, refuse

    def __call__(self, body):
        self.captured += 1
        if self.refuse:
            body()
            raise self.refuse

        def run():
            self.runs += 1
            body()

        return run


def run_with(tmp_path, monkeypatch, capture, *words):
    monkeypatch.setattr(mptrain.engine.loop, "capture_on", lambda device: capture)
    kept = Kept()
    loop = loop_of(tmp_path, *words, *(("train.engine=graph",) if capture else ()), kept=kept)
    loop.run()
    return loop, kept


@pytest.mark.parametrize(
    "words",
    [
        (*TINY, "precision=fp16_dynamic", "optimizer=adamw", "train.clip_norm=0.5"),
        (*TINY, "precision=fp16_dynamic", "train.accumulate=2", "scaler.init_scale=1e8", "scaler.max_scale=null"),
        (*TINY, "precision=fp16_static", "train.ema_decay=0.9"),
        (*TINY, "dataset.train_samples=100", "precision=fp32"),
        (*TINY, "model=cnn", "precision=amp_dynamic", "train.epochs=2"),
        (*TINY, "precision=amp_dynamic", "inject.step=7", "inject.count=2", "inject.tensor=gradient:1.weight"),
        (*TINY, "precision=amp_dynamic", "diagnostics=histograms", "diagnostics.every=4"),
        GAN,
    ],
    ids=["adamw", "accumulated", "average", "short last batch", "buffers", "fault", "looked at", "gan"],
)
def test_captured_steps_train_bit_for_bit_like_launched_ones(tmp_path, monkeypatch, words):
    plain, _ = run_with(tmp_path / "plain", monkeypatch, None, *words)
    capture = Again()
    captured, _ = run_with(tmp_path / "graph", monkeypatch, capture, *words)
    assert capture.captured
    assert capture.runs > 1
    assert steps_of(plain) == steps_of(captured)
    ours = captured.parts.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in plain.parts.model.state_dict().items())


def test_a_step_that_cannot_be_captured_is_launched_with_a_warning(tmp_path, monkeypatch):
    words = (*TINY, "precision=fp16_dynamic", "scaler.init_scale=1e8", "scaler.max_scale=null")
    plain, _ = run_with(tmp_path / "plain", monkeypatch, None, *words)
    refused = []

    def refusing(body):  # a CUDA graph launches nothing while it is captured
        refused.append(body)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    loop, kept = run_with(tmp_path / "graph", monkeypatch, refusing, *words)
    assert len(refused) == 1
    assert steps_of(plain) == steps_of(loop)
    warnings = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    assert [text for text in warnings if "operation not permitted when stream is capturing" in text]


def made_with(capture, *words, base=(*TINY, "precision=fp32")):
    """StepRunner, and a prepared batch."""
    parts, _ = parts_of(*base, *words)
    made = StepRunner(parts, [Ring(64, len(one.weights.names), parts.device) for one in parts.learners], capture)
    return made, parts, parts.prepare(next(parts.loaders["train"].batches(0)))


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), random.random, numpy.random.rand], ids=["torch", "python", "numpy"]
)
def test_random_numbers_of_the_host_are_refused_and_stay_as_they_were(draw):
    def capture(body):
        draw()
        return body

    made, _, batch = made_with(capture)
    for _ in range(WARM_UP):
        made.run(batch, [None])
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    made.run(batch, [None])
    (note,) = made.notes
    assert "random numbers on the host" in note
    assert draw() == expected


def test_dropout_between_recurrent_layers_is_refused_at_once():
    capture = Again()
    words = ("model=char_lstm", "model.layers=2", "model.dropout=0.2", "train.batch_size=4")
    made, _, batch = made_with(capture, *words, base=())
    (note,) = made.notes
    assert "dropout of lstm" in note
    for _ in range(WARM_UP + 2):
        made.run(batch, [None])
    assert not capture.captured


def smaller(batch, size):
    return dataclasses.replace(batch, inputs=batch.inputs[:size], targets=batch.targets[:size])


def test_a_shape_that_cannot_be_captured_costs_the_others_nothing():
    capture = Again()
    made, _, batch = made_with(capture)
    for _ in range(WARM_UP + 1):
        made.run(batch, [None])
    capture.refuse = RuntimeError("out of memory")
    for _ in range(WARM_UP + 3):
        made.run(smaller(batch, 5), [None])
    (note,) = made.notes
    assert "batches of another shape" in note
    assert "out of memory" in note
    assert (capture.captured, capture.runs) == (2, 1)
    made.run(batch, [None])
    assert capture.runs == 2


def test_batches_that_all_have_another_shape_are_given_up_with_a_reason(monkeypatch):
    monkeypatch.setattr(step_runner, "LOOKED_AT", 5)
    capture = Again()
    made, _, batch = made_with(capture)
    for size in range(1, 8):
        made.run(smaller(batch, size), [None])
    (note,) = made.notes
    assert "more than 5 shapes" in note
    assert len(made._graphs._seen) == 5


def test_histograms_say_the_scale_of_the_step_that_they_looked_at(tmp_path, monkeypatch):
    words = (*TINY, "precision=fp16_dynamic", "scaler.init_scale=1e8", "scaler.max_scale=null", "scaler.growth_interval=2",
             "diagnostics=histograms", "diagnostics.every=1")  # fmt: skip
    plain, seen = run_with(tmp_path / "plain", monkeypatch, None, *words)
    _, captured = run_with(tmp_path / "graph", monkeypatch, Again(), *words)
    assert len({step["loss_scale"] for step in steps_of(plain)}) > 3
    assert [r.loss_scale for r in seen.of(HistogramRecord)] == [step["loss_scale"] for step in steps_of(plain)]
    assert str(captured.of(HistogramRecord)) == str(seen.of(HistogramRecord))


def test_an_interrupted_run_goes_on_like_an_undisturbed_one(tmp_path, monkeypatch):
    words = (*TINY, "dataset.train_samples=100", "precision=amp_dynamic", "train.engine=graph", "train.epochs=3")
    monkeypatch.setattr(mptrain.engine.loop, "capture_on", lambda device: Again())
    whole, resumed = whole_and_resumed(tmp_path, *words, after=11)
    assert steps_of(resumed) == steps_of(whole)
    ours = resumed.parts.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in whole.parts.model.state_dict().items())


def test_only_so_many_shapes_are_captured_each_after_some_steps():
    capture = Again()
    made, _, batch = made_with(capture, "train.epochs=10")
    for size in range(2, 4 + MOST):
        part = smaller(batch, size)
        for _ in range(WARM_UP):
            made.run(part, [None])
        assert capture.captured == min(size - 2, MOST)
        made.run(part, [None])
        made.run(part, [None])
    assert capture.captured == MOST
    assert capture.runs == 2 * MOST


def test_gradients_can_be_looked_at_after_a_captured_step():
    made, parts, batch = made_with(Again(), "precision=fp16_dynamic", "train.accumulate=2")
    weights = parts.learners[0].weights
    for _ in range(WARM_UP + 2):
        made.run(batch, [None])
    captured = weights.gradients.state()
    assert weights.gradients.by_name().keys() == set(weights.names)
    assert len(captured.sums) == len(weights.names)
    made.run(smaller(batch, 1), [None])  # eager, without sums: there is one micro-batch
    made.run(batch, [None])
    again = weights.gradients.state()
    assert again.sums.keys() == captured.sums.keys()
    assert all(one is other for one, other in zip(again.grads, captured.grads, strict=True))


def test_a_cpu_has_no_graphs_and_a_run_says_so(tmp_path):
    assert step_runner.capture_on(torch.device("cpu")) is None
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "precision=fp32", "train.engine=graph", "train.epochs=1", kept=kept)
    loop.run()
    (warning,) = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    assert "only CUDA devices have graphs" in warning
