"""A function of the program looks at every attempted step: it changes nothing, and may end the run on record."""

from __future__ import annotations

import os
import random
import signal
import traceback

import numpy as np
import pytest
import torch
from torch import nn

import mptrain
import mptrain.engine.loop
from mptrain.system.errors import ConfigError, Preempted, UsageError
from tests.api.test_train import NAMED, Callback
from tests.engine.test_step_runner import Again

WORDS = (*(word for word in NAMED if not word.startswith("model=")), "train.epochs=1")


class Net(nn.Module):
    """A network with a mode, running statistics, and random numbers on the host."""

    def __init__(self, num_classes):
        super().__init__()
        self.flat, self.hidden, self.norm = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.hidden(self.flat(x))).relu()))


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def of(run):
    """What a run has computed and where it ended: every bit, and no time."""
    return [(step.step, step.loss, step.grad_norm, step.lr) for step in run.steps()], run.summary["test"]


def nosy(view):
    """Do what disturbs a run if nobody undoes it: other modes, running statistics, gradients, random numbers."""
    torch.rand(3), random.random(), np.random.rand()
    view.model(view.batch.inputs)  # in training mode, so that BatchNorm counts it
    view.model.eval()
    with torch.enable_grad():
        view.model(view.batch.inputs).sum().backward()
    assert view.optimizers["main"].state_dict()["state"]
    torch.set_grad_enabled(False)


@pytest.mark.parametrize(
    "words",
    [("precision=fp32",), ("precision=fp16_dynamic", "optimizer=adamw"), ("precision=fp32", "train.engine=graph")],
    ids=["fp32", "master weights", "graph"],
)
def test_a_function_that_only_looks_changes_no_bit(words, monkeypatch):
    capture = Again()
    if "train.engine=graph" in words:
        monkeypatch.setattr(mptrain.engine.loop, "capture_on", lambda device: capture)
    plain = mptrain.train(*WORDS, *words, model=Net, show=False)
    run = mptrain.train(*WORDS, *words, "run.name=watched", model=Net, on_step=nosy, show=False)
    assert of(run) == of(plain)
    assert capture.captured == (2 if "train.engine=graph" in words else 0)


def test_what_a_view_has():
    seen, drawn, references = [], [], []

    def look(view):
        assert view.model.training
        assert not torch.is_grad_enabled()
        assert view.batch.inputs.shape == (16, 1, 8, 8)
        assert [*view.optimizers] == ["main"]
        seen.append((view.step, view.epoch, float(view.optimizers["main"].step)))
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
        references.append(next(view.model.parameters()))

    words = ("precision=fp16_dynamic", "inject.step=2", "inject.tensor=input", "train.epochs=2")
    run = mptrain.train(*NAMED, *words, on_step=look, show=False)
    # Skipped steps are attempted ones.
    assert seen == [(step, (step - 1) // 6, step - (step > 1)) for step in range(1, 13)]
    assert [(step.step, step.epoch) for step in run.steps()] == [row[:2] for row in seen]
    assert len(set(drawn)) == 12
    assert all(parameter is references[0] for parameter in references)


def test_the_batch_is_that_of_the_step_with_its_injected_fault():
    finite = {}

    def look(view):
        finite[view.step] = bool(view.batch.inputs.isfinite().all())

    mptrain.train(*NAMED, "train.epochs=1", "inject.step=3", "inject.tensor=input", on_step=look, show=False)
    assert finite == {step: step != 3 for step in range(1, 7)}


class TestStop:
    def test_by_the_weights_in_the_middle_of_an_epoch(self):
        norms = []

        def enough(view):
            norms.append(float(sum(parameter.square().sum() for parameter in view.model.parameters())))
            if view.step == 8:
                view.stop(f"norm {norms[-1]:.3f}")
                view.stop("a second reason")

        run = mptrain.train(*NAMED, on_step=enough, stop=lambda metrics: metrics["step"] == 8, show=False)
        why = f"norm {norms[-1]:.3f}"
        assert len(norms) == 8
        assert run.summary["stopped_early"] == why
        assert run.state.reason == f"stopped early: {why}"
        assert [e["why"] for e in run.events() if e["event"] == "stopped_early"] == [why]
        assert [e["step"] for e in run.events() if e["event"] == "evaluation"] == [6, 8, 8]
        saved = sum(float(value.square().sum()) for value in run.model().state_dict().values())
        assert saved == pytest.approx(norms[-1])  # of the step at which it asked
        again = mptrain.train(*NAMED, "run.resume=auto", on_step=enough, show=False)
        assert (len(norms), again.state.attempts) == (8, run.state.attempts)
        with pytest.raises(ConfigError, match=r"stopped early: norm .*; there is nothing left to do"):
            run.resume("train.clip_norm=1", show=False)
        assert run.resume(epochs=4, show=False).state.attempts[-1].to_step == 24

    def test_a_run_that_was_cut_stops_at_the_same_step(self):
        def enough(view):
            if next(view.model.parameters()).abs().sum() != first[0] and view.step == 11:
                view.stop("")

        first = [0.0]
        whole = mptrain.train(*NAMED, "train.epochs=2", on_step=enough, show=False)
        cut = Callback(4, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Preempted):
            mptrain.train(*NAMED, "train.epochs=2", "run.name=cut", on_step=enough, callbacks=[cut], show=False)
        run = mptrain.open_run("cut").resume(on_step=enough, show=False)
        assert run.state.attempts[-1].from_step < 11
        assert of(run) == of(whole)
        assert run.state.attempts[-1].to_step == whole.state.attempts[-1].to_step == 11
        assert run.summary["stopped_early"] == whole.summary["stopped_early"] == "on_step= ended training"


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "what"),
        [(3, "on_step is an int"), (lambda: None, "on_step takes no single argument")],
        ids=["no function", "no argument"],
    )
    def test_what_cannot_be_called_is_refused_before_anything_is_written(self, tmp_path, given, what):
        with pytest.raises(UsageError, match=what) as refused:
            mptrain.train(*NAMED, on_step=given, show=False)
        assert "on_step=lambda view: print(view.step)" in refused.value.hint
        assert not (tmp_path / "outputs").exists()
        run = mptrain.train(*NAMED, "train.epochs=1", show=False)
        with pytest.raises(UsageError, match=what):
            run.resume(epochs=2, on_step=given, show=False)

    def test_an_exception_is_told_with_its_line_and_the_last_checkpoint_is_kept(self):
        def fails(view):
            if view.step == 8:
                view.model.no_such_module()

        with pytest.raises(ConfigError, match=r"on_step= failed at step 8: AttributeError: .*no_such_module") as failed:
            mptrain.train(*NAMED, "checkpoint.every_epochs=1", on_step=fails, show=False)
        assert isinstance(failed.value.__cause__, AttributeError)
        assert "view.model.no_such_module()" in "".join(traceback.format_exception(failed.value))
        run = mptrain.open_run("run")
        assert run.state.status == "failed"
        assert run.state.attempts[-1].to_step == 8
        assert run.resume(show=False).state.attempts[-1].from_step == 6

    @pytest.mark.parametrize("precision", ["fp32", "fp16_dynamic"])
    def test_a_changed_parameter(self, precision):
        def changes(view):
            if view.step == 2:
                [*view.model.parameters()][1].mul_(2)

        with pytest.raises(ConfigError, match=r"on_step= changed the parameter 1\.bias at step 2"):
            mptrain.train(*NAMED, f"precision={precision}", on_step=changes, show=False)

    @pytest.mark.parametrize(
        "change",
        [
            lambda parameter: parameter.requires_grad_(False),
            lambda parameter: setattr(parameter, "data", parameter.data.double()),
        ],
        ids=["frozen", "another dtype"],
    )
    def test_a_parameter_that_is_another_one_now(self, change):
        def changes(view):
            change(next(view.model.parameters()))

        with pytest.raises(ConfigError, match=r"on_step= changed the parameter 1\.weight at step 1"):
            mptrain.train(*NAMED, on_step=changes, show=False)

    def test_an_answer_as_of_stop(self):
        with pytest.raises(ConfigError, match=r"at step 1: TypeError: it returned True, which ends nothing"):
            mptrain.train(*NAMED, on_step=lambda view: True, show=False)
