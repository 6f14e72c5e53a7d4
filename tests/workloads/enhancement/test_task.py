from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mptrain.system.errors import ConfigError
from mptrain.workloads.base.batch import Batch
from mptrain.workloads.enhancement.task import Enhance, in_8_bits, luminance, psnr, ssim
from tests.loops import each
from tests.told_models import Says


def drawn(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(samples=3, side=20, upscale=2, channels=3):
    return Batch(
        drawn(samples, channels, side // upscale, side // upscale), drawn(samples, channels, side, side, seed=2)
    )


@each("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each("kind", ["l1", "mse"])
def test_trap_04_the_loss_is_a_float32_scalar_mean(dtype, kind):
    batch = batch_of()
    output = drawn(3, 3, 20, 20, seed=3).to(dtype)
    loss = Enhance(upscale=2, loss_of=kind).loss(Says(output), batch)
    difference = output.double() - batch.targets.double()
    expected = difference.abs().mean() if kind == "l1" else difference.square().mean()
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_trap_04_an_error_too_small_to_square_has_a_gradient():
    output = torch.full((2, 1, 16, 16), 2.0**-13, dtype=torch.float16, requires_grad=True)
    assert (output.detach() ** 2).max() <= 2.0**-24  # nothing but the smallest half number is left of the square
    targets = torch.zeros(2, 1, 16, 16)
    loss = Enhance(upscale=1, loss_of="mse").loss(Says(output), Batch(output.detach(), targets))
    assert loss.item() == pytest.approx(2.0**-26)
    (loss * 2.0**20).backward()
    assert output.grad.all()


def test_what_is_measured_is_the_formula_for_each_picture():
    batch, output = batch_of(), drawn(3, 3, 20, 20, seed=3) * 1.4 - 0.2
    measured = Enhance(upscale=2).measure(Says(output), batch)
    inner = (..., slice(2, 18), slice(2, 18))
    seen, truth = luminance(in_8_bits(output[inner])), luminance(in_8_bits(batch.targets[inner]))
    before = F.interpolate(batch.inputs, scale_factor=2, mode="bicubic", antialias=True)
    gain = psnr(seen, truth) - psnr(luminance(in_8_bits(before[inner])), truth)
    assert all(value.dtype == torch.float64 and value.shape == (3,) for value in measured.values())
    assert measured["psnr"].tolist() == pytest.approx(psnr(seen, truth).tolist())
    assert measured["psnr_gain"].tolist() == pytest.approx(gain.tolist())
    assert measured["ssim"].tolist() == pytest.approx(ssim(seen, truth).tolist())
    assert measured["loss"].tolist() == pytest.approx((output - batch.targets).abs().mean((1, 2, 3)).tolist())
    assert Enhance(upscale=2).summarise({"psnr": 60.0}, 3) == {"psnr": 20.0}


@pytest.mark.parametrize(
    ("choices", "channels", "seen"),
    [
        ({"upscale": 1}, 3, (3, 20)),
        ({"upscale": 2}, 3, (1, 16)),
        ({"upscale": 2, "luminance": False, "border": 0}, 3, (3, 20)),
        ({"upscale": 1, "luminance": True, "border": 4}, 3, (1, 12)),
        ({"upscale": 1, "luminance": True}, 1, (1, 20)),
    ],
)
def test_which_channels_and_which_pixels_are_measured(choices, channels, seen):
    measured = Enhance(**choices)._measured(drawn(3, channels, 20, 20))
    assert measured.shape[1:] == (seen[0], seen[1], seen[1])


def test_no_change_gains_nothing_and_the_truth_100_decibels():
    noisy = Batch(drawn(3, 3, 20, 20), drawn(3, 3, 20, 20, seed=2))
    idle = Enhance(upscale=1).measure(nn.Identity(), noisy)
    assert idle["psnr_gain"].tolist() == [0.0, 0.0, 0.0]
    right = Enhance(upscale=1).measure(Says(noisy.targets), noisy)
    assert right["psnr"].tolist() == [100.0] * 3
    assert right["psnr_gain"].tolist() == pytest.approx((100 - idle["psnr"]).tolist())
    assert right["ssim"].tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_no_number_is_not_hidden(value):
    batch = batch_of(upscale=1)
    output = batch.targets.clone()
    output[0, 0, 5, 5] = value
    assert not math.isfinite(Enhance(upscale=1).measure(Says(output), batch)["loss"][0].item())


@pytest.mark.parametrize("side", [1, 10, 14])
def test_pictures_too_small_for_the_window_of_ssim_are_refused(side):
    task = Enhance(upscale=2)
    with pytest.raises(ConfigError, match="too small for SSIM"):
        task.measure(Says(drawn(1, 3, side, side)), Batch(drawn(1, 3, 1, 1), drawn(1, 3, side, side)))
    assert task.loss(Says(drawn(1, 3, side, side)), Batch(drawn(1, 3, 1, 1), drawn(1, 3, side, side))).isfinite()


def test_a_model_of_another_size_is_refused_with_what_it_makes():
    with pytest.raises(ConfigError, match="returns 3x10x10, but the targets are 3x20x20") as caught:
        Enhance(upscale=2).loss(nn.Identity(), batch_of())
    assert "edsr_small" in caught.value.problems[0].hint


@pytest.mark.parametrize("samples", [1, 9])
def test_exhibits_are_before_after_and_truth_of_the_worst(samples):
    batch = batch_of(samples)
    output = drawn(samples, 3, 20, 20, seed=3) * 1.4 - 0.2
    shown = Enhance(upscale=2).exhibits(Says(output), batch)["enhanced"]
    assert (shown.columns, shown.pixels.shape) == (3, (3 * min(6, samples), 3, 20, 20))
    assert "bicubic" in shown.caption
    before = F.interpolate(batch.inputs, scale_factor=2, mode="bicubic", antialias=True)
    worst = (before - batch.targets).square().mean((1, 2, 3)).argmax()
    for number, pictures in enumerate((before, output, batch.targets)):
        assert torch.equal(shown.pixels[number], pictures[worst].clamp(0, 1))


def test_the_loss_reads_no_value_of_the_device():
    batch = batch_of(upscale=1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Batch(torch.empty_like(batch.inputs, requires_grad=True), torch.empty_like(batch.targets))
        loss = Enhance(upscale=1).loss(nn.Identity(), fake)
        loss.backward()
    assert isinstance(loss, FakeTensor)
