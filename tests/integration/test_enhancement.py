"""Networks that restore pictures, from words to metrics and pictures, in full, mixed and half precision."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from small_runs import Kept, continue_loop, interrupt_after, loop_of, parts_of, steps_of

from mptrain.config.compose import compose
from mptrain.inspection.doctor import check_scaling
from mptrain.system.errors import ConfigError
from mptrain.system.records import EvalRecord

pytestmark = pytest.mark.workload

WORDS = ("dataset.patch_size=16", "dataset.patches=240", "dataset.tile_size=32", "dataset.tiles_per_photo=6",
         "train.batch_size=8", "train.epochs=4", "checkpoint.every_epochs=null")  # fmt: skip
ENLARGES = ("model=edsr_small", "model.blocks=1", "model.width=16", *WORDS)
DENOISES = ("model=dncnn_small", "model.depth=3", "model.width=16", "optimizer.lr=0.01", *WORDS)


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_taking_out_noise_is_learnt_in_every_precision_and_shown(tmp_path, precision):
    kept = Kept()
    loop = loop_of(tmp_path, *DENOISES, f"precision={precision}", kept=kept)
    loop.run()
    records = [record for record in kept.of(EvalRecord) if record.split == "val"]
    assert set(records[-1].metrics) == {"loss", "psnr", "psnr_gain", "ssim"}
    assert records[-1].metrics["psnr_gain"] > 2.0
    assert records[-1].metrics["psnr"] > records[0].metrics["psnr"]
    assert all(math.isfinite(step["loss"]) for step in steps_of(loop))
    grids = sorted((loop.storage.paths.root / "samples").glob("enhanced-*.png"))
    assert len(grids) == 4
    with Image.open(grids[-1]) as grid:
        assert grid.size == (3 * (32 + 1) + 1, 6 * (32 + 1) + 1)  # before, after and truth of six pictures


@pytest.mark.parametrize("precision", ["fp32", "amp_dynamic", "fp16_dynamic"])
def test_enlarging_begins_at_bicubic_interpolation_and_gets_better_in_every_precision(tmp_path, precision):
    loop = loop_of(tmp_path, *ENLARGES, f"precision={precision}", "optimizer.lr=0.003")
    loop.run()
    assert loop.progress.last["val"]["psnr_gain"] > 0.05
    assert loop.parts.task.upscale == 2


def test_targets_stay_in_full_precision_while_inputs_are_halved():
    parts, _ = parts_of(*ENLARGES, "precision=fp16_dynamic")
    batch = parts.prepare(next(parts.loaders["train"].batches(0)))
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.float16, torch.float32)
    assert batch.targets.unique().numel() > 100


@pytest.mark.parametrize("words", [ENLARGES, DENOISES], ids=["enlarging", "denoising"])
def test_trap_37_eight_steps_equal_four_and_four_more_bit_for_bit(tmp_path, words):
    words = (*words, "precision=fp16_dynamic", "train.max_steps=8")
    whole = loop_of(tmp_path, *words)
    whole.run()
    half = loop_of(tmp_path, *words)
    interrupt_after(half, 4)
    rest = continue_loop(half, *words)
    rest.run()
    for loop in (whole, rest):
        loop.storage.writer.flush()
    assert whole.storage.paths.steps.read_bytes() == rest.storage.paths.steps.read_bytes()
    one, other = whole.parts.model.state_dict(), rest.parts.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_evaluation_sees_the_same_noise_whatever_the_seed():
    one, other = (parts_of(*DENOISES, f"seed={seed}")[0] for seed in (0, 1))
    batches = [parts.prepare(next(parts.loaders["val"].batches(0))) for parts in (one, other)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    trained = [parts.prepare(next(parts.loaders["train"].batches(0))) for parts in (one, other)]
    assert not torch.equal(trained[0].inputs, trained[1].inputs)


@pytest.mark.parametrize("words", [ENLARGES, DENOISES], ids=["enlarging", "denoising"])
def test_the_doctor_finds_nothing_wrong_with_half_precision(words):
    """The bicubic enlargement is a module: beside its roundings, those of the sum would look like a fault."""
    report = check_scaling(compose([*words, "precision=fp16_dynamic"]), lambda _: None)
    assert not report.findings


@pytest.mark.parametrize("name", ["edsr", "edsr_baseline", "edsr_small", "dncnn", "dncnn_small"])
def test_a_model_chooses_its_task_data_loss_and_degradation(name):
    config = compose([f"model={name}"])
    noise = name.startswith("dncnn")
    assert (config.chosen["task"], config.chosen["dataset"], config.chosen["optimizer"]) == (
        "enhance",
        "photos",
        "adam",
    )
    assert config.task.arguments["loss_of"] == ("mse" if noise else "l1")
    assert config.dataset.arguments["degradation"] == ("noise" if noise else "downsample")
    assert compose([f"model={name}", "dataset=photo_folder"]).chosen["dataset"] == "photo_folder"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model=dncnn_small", "dataset.degradation=downsample"), "2 times as large"),
        (("model=edsr_small", "dataset=digits"), "task=enhance needs upscale"),
        (("model=cnn", "dataset=photos"), "num_classes"),
        (("model=edsr_small", "dataset.factor=5"), "not a multiple"),
        (("model=edsr_small", "dataset.factor=6"), "cannot be built|upscale|6"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_together_is_refused(words, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        loop_of(tmp_path, *words).run()
