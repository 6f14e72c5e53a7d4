"""Captured steps, with a capture that does the step again instead of a CUDA graph: what is held fixed, and when it is used."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_runs import TINY, Kept, loop_of, parts_of, steps_of

import mptrain.engine.loop
from mptrain.diagnostics.probe import UNWATCHED
from mptrain.engine import steps
from mptrain.engine.ring import Ring
from mptrain.engine.steps import MOST, WARM_UP, Steps
from mptrain.records import EventRecord

GAN = ("model=dcgan", "dataset.image_size=16", "dataset.train_samples=96", "train.batch_size=16", "train.epochs=3")


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
        (*TINY, "precision=fp32"),
        (*TINY, "precision=amp_dynamic"),
        (*TINY, "precision=fp16_dynamic", "optimizer=adamw", "train.clip_norm=0.5"),
        (*TINY, "precision=fp16_dynamic", "train.accumulate=2", "scaler.init_scale=1e8", "scaler.max_scale=null"),
        (*TINY, "precision=fp16_static", "train.ema_decay=0.9"),
        (*TINY, "dataset.train_samples=100", "precision=fp32"),
        (*TINY, "model=resnet18", "precision=amp_dynamic", "train.epochs=1"),
        (*TINY, "precision=amp_dynamic", "inject.step=7", "inject.count=2", "inject.tensor=gradient:1.weight"),
        (*TINY, "precision=amp_dynamic", "diagnostics=histograms", "diagnostics.every=4"),
        GAN,
    ],
    ids=["fp32", "amp", "adamw", "accumulated", "average", "short last batch", "buffers", "fault", "looked at", "gan"],
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


def test_a_step_that_cannot_be_captured_is_launched_with_a_warning_and_loses_nothing(tmp_path, monkeypatch):
    words = (*TINY, "precision=fp16_dynamic", "scaler.init_scale=1e8", "scaler.max_scale=null")
    plain, _ = run_with(tmp_path / "plain", monkeypatch, None, *words)
    capture = Again(refuse=RuntimeError("operation not permitted when stream is capturing\nmore"))
    # A CUDA graph launches nothing while it is captured; this one trains in vain, on copies.
    values = {}

    def refusing(body):
        loop = values["loop"]
        state = {name: tensor.clone() for name, tensor in loop.parts.full_precision().items()}
        moments = [one.weights.state_dict() for one in loop.parts.learners]
        kept = [{n: {k: t.clone() for k, t in s.items()} for n, s in m["state"].items()} for m in moments]
        counts = [m["step"].clone() for m in moments]
        fixed = [{name: value.clone() for name, value in one.moving().items()} for one in loop.parts.learners]
        tensors = [one.moving() for one in loop.parts.learners]
        try:
            capture(body)
        finally:
            for learner, saved, count, old, places in zip(
                loop.parts.learners, kept, counts, fixed, tensors, strict=True
            ):
                learner.weights.load_full_precision(state)
                learner.weights.load_state_dict({"step": count, "state": saved})
                for name, value in old.items():
                    places[name].copy_(value)

    monkeypatch.setattr(mptrain.engine.loop, "capture_on", lambda device: refusing)
    kept = Kept()
    values["loop"] = loop = loop_of(tmp_path / "graph", *words, "train.engine=graph", kept=kept)
    loop.run()
    assert capture.captured == 1
    assert steps_of(plain) == steps_of(loop)
    warnings = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    assert [text for text in warnings if "operation not permitted when stream is capturing" in text]


def test_random_numbers_of_the_host_are_refused(tmp_path):
    parts, _ = parts_of(*TINY, "precision=fp32")
    made = Steps(
        parts, [Ring(64, len(parts.learners[0].weights.names), parts.device)], lambda body: lambda: torch.rand(1)
    )
    made._captured = lambda batch: torch.rand(1)
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    for _ in range(WARM_UP + 1):
        made.take(batch, [UNWATCHED])
    (note,) = made.notes
    assert "random numbers on the host" in note


def test_only_so_many_shapes_are_captured_each_after_some_steps():
    parts, _ = parts_of(*TINY, "precision=fp32", "train.epochs=10")
    capture = Again()
    made = Steps(parts, [Ring(64, len(parts.learners[0].weights.names), parts.device)], capture)
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    for size in range(2, 4 + MOST):
        smaller = dataclasses.replace(batch, inputs=batch.inputs[:size], targets=batch.targets[:size])
        for _ in range(WARM_UP):
            made.take(smaller, [UNWATCHED])
        assert capture.captured == min(size - 2, MOST)
        made.take(smaller, [UNWATCHED])
        made.take(smaller, [UNWATCHED])
    assert capture.captured == MOST
    assert capture.runs == 2 * MOST


def test_gradients_can_be_looked_at_after_a_captured_step():
    parts, _ = parts_of(*TINY, "precision=fp32")
    made = Steps(parts, [Ring(64, len(parts.learners[0].weights.names), parts.device)], Again())
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    for _ in range(WARM_UP + 2):
        made.take(batch, [UNWATCHED])
    assert parts.learners[0].weights.gradients().keys() == set(parts.learners[0].weights.names)


def test_a_cpu_has_no_graphs_and_a_run_says_so(tmp_path):
    assert steps.capture_on(torch.device("cpu")) is None
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, "precision=fp32", "train.engine=graph", "train.epochs=1", kept=kept)
    loop.run()
    (warning,) = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    assert "only CUDA devices have graphs" in warning
