"""An evaluation leaves nothing behind, draws the same each time, and lets the task show its pictures."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from PIL import Image

from mptrain.engine.evaluate import evaluate
from mptrain.engine.exhibit import keep_exhibits
from mptrain.runlog.atomic_files import StorageError
from mptrain.system.errors import NumericsError
from mptrain.system.process_state import other_random_numbers
from mptrain.system.records import EvalRecord, EventRecord
from mptrain.workloads.base.task import Pictures
from tests.small_runs import TINY, Kept, loop_of


def test_what_an_evaluation_draws_is_the_same_each_time_and_moves_no_generator(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    drawn = []
    measure = type(loop.parts.task).measure

    def drawing(model, batch):
        drawn.append((torch.rand(3).tolist(), random.random()))
        return measure(loop.parts.task, model, batch)

    object.__setattr__(loop.parts.task, "measure", drawing)
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(2).tolist(), random.random()
    for _ in range(2):
        torch.manual_seed(5)
        random.seed(5)
        evaluate(loop.parts, loop.parts.loaders["val"], "val", 0, 0, lambda: False)
        assert (torch.rand(2).tolist(), random.random()) == expected
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]


def test_other_random_numbers_leave_no_trace_even_after_a_failure():
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)

    def fail():
        with other_random_numbers(torch.device("cpu"), seed=3):
            torch.rand(100)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.rand(4), expected)


def test_pictures_are_written_after_each_validation_and_named_in_the_events(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, kept=kept)
    seen = []

    def exhibits(model, batch):
        seen.append((model.training, torch.is_grad_enabled(), len(batch.inputs)))
        return {"inputs": Pictures(batch.inputs.float()[:9] / 4 + 0.5)}

    object.__setattr__(loop.parts.task, "exhibits", exhibits)
    loop.run()
    assert seen == [(False, False, 16)] * 3
    events = [event.fields["files"] for event in kept.of(EventRecord) if event.kind == "samples"]
    assert events == [["inputs-000006.png"], ["inputs-000012.png"], ["inputs-000018.png"]]
    with Image.open(loop.storage.paths.samples / "inputs-000018.png") as picture:
        assert picture.size == (3 * 9 + 1, 3 * 9 + 1)
        assert picture.mode == "RGB"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_mean_that_is_taken_for_a_sum_is_warned_of_once_and_changes_nothing(tmp_path, reduction):
    kept, plain = Kept(), Kept()
    loop = loop_of(tmp_path / "a", *TINY, kept=kept)
    measure = type(loop.parts.task).measure

    def measured(model, batch):
        values = measure(loop.parts.task, model, batch)
        reduced = {"none": lambda value: value, "sum": torch.sum, "mean": torch.mean}[reduction]
        return {**values, "loss": reduced(values["loss"])}

    object.__setattr__(loop.parts.task, "measure", measured)
    loop.run()
    warnings = [event.fields["message"] for event in kept.of(EventRecord) if event.kind == "warning"]
    warned = [message for message in warnings if message.startswith("measure() of the task returns loss as a mean")]
    assert len(warned) == (reduction == "mean")
    loop_of(tmp_path / "b", *TINY, kept=plain).run()
    top1 = [[record.metrics["top1"] for record in each.of(EvalRecord)] for each in (kept, plain)]
    assert top1[0] == top1[1]
    if reduction != "mean":
        loss = [[record.metrics["loss"] for record in each.of(EvalRecord)] for each in (kept, plain)]
        assert loss[0] == pytest.approx(loss[1], rel=1e-12)


def test_a_measure_that_takes_no_half_of_a_batch_is_not_judged(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    whole = loop.parts.loaders["val"].batch_size

    def measured(model, batch):
        if batch.samples != whole:
            raise ValueError("half a batch")
        return {"loss": model(batch.inputs).square().mean().double(), "top1": torch.zeros(whole)}

    object.__setattr__(loop.parts.task, "measure", measured)
    done = evaluate(loop.parts, loop.parts.loaders["val"].first_batch(), "val", 0, 0, lambda: False)
    assert done.doubts == ()


def test_a_task_without_a_metric_has_no_best_checkpoint_and_ends_in_order(tmp_path):
    loop = loop_of(tmp_path, *TINY)
    object.__setattr__(loop.parts.task, "metric", None)
    summary = loop.run()
    loop.require_success()
    assert summary["metric"] is None
    assert summary["best_val"] is None
    assert summary["val"]["loss"] > 0


def test_pictures_outside_of_the_range_are_clipped_and_nan_is_black(tmp_path):
    pictures = torch.tensor([-3.0, torch.nan, 0.5, 7.0]).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    assert keep_exhibits(tmp_path / "samples", 12, {"x": Pictures(pictures)}) == ["x-000012.png"]
    with Image.open(tmp_path / "samples" / "x-000012.png") as picture:
        assert [picture.getpixel(place)[0] for place in ((1, 1), (4, 1), (1, 4), (4, 4))] == [0, 0, 128, 255]
    assert keep_exhibits(tmp_path / "none", 1, {}) == []
    assert not (tmp_path / "none").exists()


def test_a_disk_that_refuses_pictures_is_named(tmp_path):
    (tmp_path / "samples").write_text("a file")
    with pytest.raises(StorageError, match="samples"):
        keep_exhibits(tmp_path / "samples", 1, {"x": Pictures(torch.zeros(1, 1, 2, 2))})


def test_samples_and_loss_terms_are_counted_apart(tmp_path):
    kept = Kept()
    loop = loop_of(tmp_path, *TINY, kept=kept)
    split = loop.parts.loaders["val"].split
    fetch = split.fetch

    def of_three_terms(indices, epoch, seed):
        batch = fetch(indices, epoch, seed)
        return type(batch)(batch.inputs, batch.targets, (3,) * batch.samples)

    split.fetch = of_three_terms
    once = evaluate(loop.parts, loop.parts.loaders["val"], "val", 0, 0, lambda: False).record
    del split.fetch
    plain = evaluate(loop.parts, loop.parts.loaders["val"], "val", 0, 0, lambda: False).record
    assert once.samples == plain.samples == 200
    assert once.metrics["loss"] == pytest.approx(plain.metrics["loss"] / 3)
    assert isinstance(once, EvalRecord)


@pytest.mark.parametrize(
    ("precision", "loss", "said"),
    [
        ("fp16_dynamic", 1.0, "the last loss on val is inf, although no training step overflowed unexpectedly"),
        ("fp16_dynamic", math.nan, "the last loss on val is inf, and 1 training step overflowed unexpectedly"),
        ("fp32", 1.0, "the last loss on val is inf, although no training step overflowed unexpectedly"),
        ("fp16_dynamic", 1e6, "the run diverged: the last loss on val is inf"),
        ("fp32", 1e6, "the run diverged: the last loss on val is inf"),
    ],
)
def test_an_evaluation_that_alone_is_not_finite_is_no_divergence(tmp_path, precision, loss, said):
    loop = loop_of(tmp_path, *TINY, f"precision={precision}", "train.max_steps=1")
    loop.run()
    [log] = loop.telemetry.step_log.learner_logs
    log.updates, log.last, log.finite_losses = 1, dataclasses.replace(log.last, loss=loss), (2.3, loss)
    log.history.counts = {} if math.isfinite(loss) else {"unexpected": 1}
    loop.progress.last["val"] = {"loss": math.inf}
    with pytest.raises(NumericsError) as stopped:
        loop.require_success()
    assert str(stopped.value) == said
    wide = precision != "fp32" and "although" in said
    assert ("precision.eval=fp32" in stopped.value.hint) == wide
    assert ("compare with precision=fp32" in stopped.value.hint) == (precision != "fp32" and "diverged" in said)
