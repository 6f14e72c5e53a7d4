"""Detection through the engine: every mode learns and keeps its promises, resuming, skipped files, odd micro-batches."""

from __future__ import annotations

import pytest

from mptrain.engine.rehearsal import rehearse
from mptrain.system.records import EvalRecord
from tests.precision_promises import PROMISED
from tests.small_runs import Kept, loop_of, parts_of, steps_of

pytestmark = pytest.mark.workload

NARROW = (
    "model=ssd_small", "model.width=4", "dataset.image_size=32", "dataset.train_samples=96", "dataset.val_samples=20",
    "dataset.test_samples=20", "train.batch_size=16", "train.epochs=4", "checkpoint.every_epochs=null",
    "optimizer.lr=0.005",
)  # fmt: skip


def scaled(mode):
    return (f"precision={mode}", *(["scaler.init_scale=1024"] if "dynamic" in mode else []))


@pytest.mark.parametrize("mode", ["fp32", "amp_dynamic", "fp16_dynamic", "amp_bf16"])
def test_detection_learns_in_every_mode(tmp_path, mode):
    kept = Kept()
    loop = loop_of(tmp_path, *NARROW, *scaled(mode), kept=kept)
    promised, _operands, norms = PROMISED[mode]
    assert loop.parts.model.head.regression_head.module_list[0].weight.dtype == promised
    assert loop.parts.model.backbone.stem[1].weight.dtype == norms
    loop.run()
    losses = [row["loss"] for row in steps_of(loop)]
    assert sum(losses[-6:]) < 0.75 * sum(losses[:6])
    validations = [record for record in kept.of(EvalRecord) if record.split == "val"]
    assert {"loss", "class_loss", "box_loss", "map50", "map"} == set(validations[-1].metrics)
    assert validations[-1].metrics["loss"] < validations[0].metrics["loss"]
    tested = kept.of(EvalRecord)[-1]
    assert tested.split == "test"
    assert {"loss", "map50", "map"} <= set(tested.intervals)
    assert any(loop.storage.paths.root.glob("samples/boxes-*.png"))


@pytest.mark.parametrize("mode", ["fp16_dynamic", "amp_dynamic", "fp32"])
def test_boxes_and_losses_are_float32_in_every_mode(mode):
    """No operator of the loss computes in half: those of boxes and of losses appear with FP32 only."""
    parts, _ = parts_of(*NARROW, *scaled(mode))
    parts.model.train()
    found = rehearse(parts, parts.prepare(next(parts.loaders["train"].batches(0))))
    assert found.untrained["no_gradient"] == []
    boxed = {"_log_softmax", "smooth_l1_loss", "nll_loss_forward", "argsort", "sort", "log", "gather", "div"}
    rows = [row for row in found.operators["operators"] if row["operator"] in boxed and row["phase"] == "forward"]
    assert {"_log_softmax", "smooth_l1_loss", "log"} <= {row["operator"] for row in rows}
    assert {row["inputs"] for row in rows} == {"float32"}


def test_micro_batches_of_which_some_have_no_box_are_trained(monkeypatch):
    """Cut into single images, one of which has lost its boxes: the loss is finite and weighs by images."""
    parts, _ = parts_of(*NARROW, "train.batch_size=8", "train.accumulate=4", *scaled("fp16_dynamic"))
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    batch.extras["labels"][2:4] = -1
    parts.model.train()
    cut = [parts.task.loss(parts.model, part).item() for part in batch.split(4)]
    assert cut[1] == 0.0
    assert all(value > 0 for place, value in enumerate(cut) if place != 1)
    rehearse(parts, batch)
