from __future__ import annotations

import math

import pytest
import torch

from mptrain.workloads.enhancement.task import in_8_bits, luminance, psnr, ssim


def pictures(channels=3, height=24, width=30, samples=4):
    return torch.rand(samples, channels, height, width, generator=torch.Generator().manual_seed(2))


def test_psnr_is_the_formula_for_each_picture():
    one = torch.zeros(2, 1, 2, 2)
    other = one.clone()
    other[0, 0, 0, 0], other[1] = 0.1, 0.5
    assert psnr(one, other).tolist() == pytest.approx([-10 * math.log10(0.01 / 4), -20 * math.log10(0.5)])
    assert psnr(one, other).dtype == torch.float64


def test_equal_and_constant_pictures_have_100_decibels():
    constant = torch.full((2, 3, 12, 12), 0.5)
    assert psnr(constant, constant).tolist() == [100.0, 100.0]
    assert ssim(constant, constant).tolist() == pytest.approx([1.0, 1.0])
    assert psnr(constant, constant + 1e-6).max() <= 100.0


def test_eight_bits_are_what_a_file_would_hold():
    values = torch.tensor([-0.3, 0.0, 0.4999 / 255, 0.5001 / 255, 0.9999, 1.7]).view(1, 1, 1, 6)
    assert (in_8_bits(values) * 255).flatten().tolist() == pytest.approx([0, 0, 0, 1, 255, 255])
    assert in_8_bits(values.half()).dtype == torch.float32


def test_luminance_has_the_range_of_matlabs_rgb2ycbcr():
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]).view(5, 3, 1, 1)
    expected = [16, 235, 16 + 65.481, 16 + 128.553, 16 + 24.966]
    assert (luminance(colours) * 255).flatten().tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_is_of_each_picture_and_of_all_its_channels(channels):
    one = pictures(channels)
    other = (one + 0.1 * torch.randn(one.shape, generator=torch.Generator().manual_seed(3))).clamp(0, 1)
    found = ssim(one, other)
    assert found.dtype == torch.float64
    assert 0.1 < found.min() < found.max() < 0.95
    for index in range(len(one)):
        channel = [ssim(one[index : index + 1, [c]], other[index : index + 1, [c]]).item() for c in range(channels)]
        assert found[index].item() == pytest.approx(sum(channel) / channels, abs=1e-6)


def test_ssim_of_a_single_window_by_hand():
    one, other = pictures(1, 11, 11, 1), pictures(1, 11, 11, 2)[1:]
    places = torch.arange(11).double() - 5
    line = (-places.square() / (2 * 1.5**2)).exp()
    weights = line[:, None] * line[None, :] / line.sum() ** 2
    x, y = one[0, 0].double(), other[0, 0].double()
    mx, my = (weights * x).sum(), (weights * y).sum()
    vx, vy, cov = (weights * x * x).sum() - mx**2, (weights * y * y).sum() - my**2, (weights * x * y).sum() - mx * my
    expected = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    assert ssim(one, other).item() == pytest.approx(expected.item(), abs=1e-5)
