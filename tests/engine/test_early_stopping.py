"""What validations decide: the end of a run (``train.early_stopping``) and its rates (``schedule=plateau``), also across a resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import mptrain.engine.loop
from mptrain.engine import validation
from mptrain.system.errors import ConfigError
from mptrain.system.records import EvalRecord, EventRecord
from tests.loops import each
from tests.small_runs import TINY, Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of, whole_and_resumed

#: 6 steps an epoch, 12 epochs.
WORDS = (*TINY, "precision=fp32", "train.epochs=12", "checkpoint.every_epochs=1")
#: After the first validation none is better by so much, whatever the network learns.
NEVER = ("schedule=plateau", "schedule.threshold_mode=abs", "schedule.threshold=10")


@pytest.fixture
def metrics(monkeypatch):
    """Sets what each validation finds for top1, one value for each epoch."""
    values = []

    def evaluate(parts, loader, split, step, epoch, **options):
        found = real(parts, loader, split, step, epoch, **options)
        if found is None or split != "val":
            return found
        return replace(found, record=replace(found.record, metrics={**found.record.metrics, "top1": values[epoch - 1]}))

    real = validation.evaluate
    monkeypatch.setattr(validation, "evaluate", evaluate)
    return values


@each(
    ("words", "values", "epochs", "why"),
    [
        (["patience=1"], [0.1, 0.2, 0.2], 3, "for 1 validation; best 0.2 at epoch 2"),
        (["patience=2"], [0.1, 0.3, 0.2, 0.4, 0.4, 0.3], 6, "for 2 validations; best 0.4 at epoch 4"),
        (
            ["patience=2", "min_delta=0.05"],
            [0.1, 0.14, 0.15],
            3,
            "by more than 0.05 for 2 validations; best 0.1 at epoch 1",
        ),
        (["patience=2", "mode=min"], [0.5, 0.4, 0.4, 0.6], 4, "for 2 validations; best 0.4 at epoch 2"),
        (["patience=2"], [math.nan, math.nan], 2, "for 2 validations; it was never finite"),
        (["patience=3"], [0.1] * 12, 4, "for 3 validations; best 0.1 at epoch 1"),
    ],
)
def test_a_run_ends_after_validations_without_improvement_and_is_tested(
    tmp_path_factory, metrics, words, values, epochs, why
):
    kept = Kept()
    metrics[:] = values
    given = [f"train.early_stopping.{word}" for word in words]
    loop = loop_of(tmp_path_factory.mktemp("run"), *WORDS, *given, kept=kept)
    summary = loop.run()
    assert (loop.progress.epoch, summary["steps"], summary["planned_steps"]) == (epochs, 6 * epochs, 72)
    assert summary["stopped_early"] == f"top1 did not improve {why}"
    assert kept.of(EvalRecord)[-1].split == "test"
    (event,) = [event for event in kept.of(EventRecord) if event.kind == "stopped_early"]
    assert (event.step, event.fields) == (6 * epochs, {"why": summary["stopped_early"]})
    assert loop.storage.store.load_latest().manifest.step == 6 * epochs


def test_an_end_that_was_planned_anyway_is_not_early(tmp_path, metrics):
    metrics[:] = [0.5] * 3
    summary = loop_of(tmp_path, *WORDS, "train.epochs=3", "train.early_stopping.patience=2").run()
    assert summary["steps"] == 18
    assert summary["stopped_early"] is None


@pytest.mark.parametrize("after", [6, 13])
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(tmp_path, metrics, after):
    metrics[:] = [0.1, 0.3, 0.2, 0.3, 0.3, 0.9]
    whole, resumed = whole_and_resumed(tmp_path, *WORDS, "train.early_stopping.patience=3", after=after)
    assert whole.progress.early_stopping == resumed.progress.early_stopping
    assert steps_of(whole) == steps_of(resumed)
    assert resumed.progress.epoch == 5


def test_a_run_that_stopped_goes_on_with_more_patience_or_none(tmp_path, metrics):
    metrics[:] = [0.3, 0.2, 0.2, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    loop = loop_of(tmp_path, *WORDS, "train.early_stopping.patience=2")
    loop.run()
    assert loop.progress.epoch == 3
    loop = continue_loop(loop, *WORDS, "train.early_stopping.patience=3")
    assert loop.run()["stopped_early"] == "top1 did not improve for 3 validations; best 0.4 at epoch 4"
    assert loop.progress.epoch == 7
    assert continue_loop(loop, *WORDS).run()["steps"] == 72


def test_another_metric_begins_anew(tmp_path, metrics):
    metrics[:] = [0.3] * 12
    loop = loop_of(tmp_path, *WORDS, "train.early_stopping.patience=2")
    loop.run()
    loop = continue_loop(
        loop, *WORDS, "train.early_stopping.patience=2", "train.early_stopping.metric=loss", "train.epochs=4"
    )
    loop.run()
    assert loop.progress.epoch == 4
    assert loop.progress.early_stopping.metric == "loss"
    assert loop.progress.early_stopping.epoch > 3


def test_the_plateau_reduces_the_rates_of_a_run_and_says_so(tmp_path):
    kept = Kept()
    words = (*NEVER, "schedule.patience=1", "schedule.factor=0.5", "schedule.warmup=3", "optimizer.lr=0.04")
    loop = loop_of(tmp_path, *WORDS, "train.epochs=6", *words, "inject.step=14", "inject.tensor=input", kept=kept)
    loop.run()
    lr = [step["lr"] for step in steps_of(loop)]
    assert lr[:3] == pytest.approx([0.04 / 3, 0.08 / 3, 0.04])
    assert lr[3:] == pytest.approx([0.04] * 15 + [0.02] * 12 + [0.01] * 6)
    events = [(event.step, event.fields) for event in kept.of(EventRecord) if event.kind == "rate_reduced"]
    why = "top1 did not improve for 2 validations"
    assert events == [
        (18, {"learner": "main", "lr": 0.02, "why": why}),
        (30, {"learner": "main", "lr": 0.01, "why": why}),
    ]
    loop.storage.writer.flush()
    assert '"event": "rate_reduced"' in loop.storage.paths.events.read_text()


@pytest.mark.parametrize("after", [4, 12])
def test_a_plateau_resumes_bit_for_bit(tmp_path, after):
    words = (*WORDS, *NEVER, "schedule.patience=0", "schedule.cooldown=1", "train.epochs=6", "schedule.factor=0.7")
    whole, resumed = whole_and_resumed(tmp_path, *words, after=after)
    assert steps_of(whole) == steps_of(resumed)
    assert len({step["lr"] for step in steps_of(whole)}) == 3
    (one,), (other,) = whole.parts.learners, resumed.parts.learners
    assert one.reduction.state == other.reduction.state
    assert torch.equal(one.rates, other.rates)
    assert torch.equal(*(loop.parts.full_precision()["1.weight"] for loop in (whole, resumed)))


def test_captured_steps_read_the_reduced_rates(tmp_path, monkeypatch):
    words = (*WORDS, *NEVER, "schedule.patience=0", "train.epochs=4")
    plain = loop_of(tmp_path / "plain", *words)
    address = plain.parts.learners[0].rates.data_ptr()
    plain.run()
    assert plain.parts.learners[0].rates.data_ptr() == address  # a CUDA graph reads it there
    tables = []

    def capture(body):
        tables.append(loop.parts.learners[0].rates)
        return body

    monkeypatch.setattr(mptrain.engine.loop, "capture_on", lambda device: capture)
    loop = loop_of(tmp_path / "graph", *words, "train.engine=graph")
    loop.run()
    assert tables
    assert tables[0].data_ptr() == loop.parts.learners[0].rates.data_ptr()
    assert steps_of(plain) == steps_of(loop)


def test_each_learner_of_a_gan_has_its_own_plateau(tmp_path):
    words = (
        "model=dcgan",
        "dataset.image_size=16",
        "dataset.train_samples=64",
        "train.batch_size=32",
        "train.epochs=4",
    )
    own = (
        "schedule=plateau",
        "schedule.patience=0",
        "schedule.metric=METRIC",
        "schedule.mode=max",
        "schedule.threshold=0",
    )
    with pytest.raises(ConfigError) as refused:
        parts_of(*words, *own)
    name = refused.value.problems[0].hint.partition("has ")[2].split(", ")[0]
    assert [problem.what for problem in refused.value.problems] == [
        f"learners.{learner}.schedule.metric=METRIC: the validation has no such metric"
        for learner in ("discriminator", "generator")
    ]
    own = [word.replace("METRIC", name).replace("threshold=0", "threshold=1e9") for word in own]
    loop = loop_of(tmp_path, *words, *own, "learners.generator.schedule.patience=1", "schedule.threshold_mode=abs")
    loop.run()
    factors = {learner.name: learner.reduction.state.factor for learner in loop.parts.learners}
    assert factors == pytest.approx({"discriminator": 1e-3, "generator": 0.1})


@each(
    ("words", "message", "hint"),
    [
        (["train.early_stopping.metric=top5"], "metric=top5: it is not known", "mode=max if a higher top5"),
        (
            ["train.early_stopping.metric=topp1"],
            "metric=topp1: the validation has no",
            "train.early_stopping.metric=top1?",
        ),
        (["schedule=plateau", "schedule.metric=psnr"], "schedule.metric=psnr: the validation", "the validation has"),
    ],
)
def test_metrics_that_are_not_there_are_refused_before_training(words, message, hint):
    with pytest.raises(ConfigError, match=message) as refused:
        parts_of(*WORDS, *words)
    assert hint in refused.value.hint


def test_both_need_validation_data(monkeypatch):
    from mptrain.workloads.images.datasets import digits

    built = digits.Digits.__init__

    def without(self, *args, **options):
        built(self, *args, **options)
        self.val = None

    monkeypatch.setattr(digits.Digits, "__init__", without)
    with pytest.raises(ConfigError) as refused:
        parts_of(*WORDS, "schedule=plateau", "train.early_stopping.patience=3")
    assert [problem.what.split()[0] for problem in refused.value.problems] == ["train.early_stopping", "schedule"]
    assert "dataset.val_share=0.1" in refused.value.hint


def test_a_checkpoint_of_an_older_mptrain_has_no_state_of_either(tmp_path):
    loop = loop_of(tmp_path, *WORDS, *NEVER)
    interrupt_after(loop, 8)
    (path,) = [path for path in loop.storage.paths.checkpoints.glob("*.json") if "8" in path.name]
    assert json.loads(path.read_text())["step"] == 8
    state = loop.storage.store.load_latest().state
    del state["progress"]["early_stopping"]
    del state["learners"]["main"]["reduction"]
    fresh = loop_of(tmp_path / "fresh", *WORDS, *NEVER)
    assert fresh.checkpointing.restore(state, forgive=False) == []
    assert fresh.progress.early_stopping.bad == 0
