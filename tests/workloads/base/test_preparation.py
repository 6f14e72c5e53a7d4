"""Preparation equals a calculation by hand, in float32, and reads nothing back from the device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mptrain.workloads.base.batch import Batch
from mptrain.workloads.base.preparation import Preparation

CPU = torch.device("cpu")


def batch_of(images):
    return Batch(images, torch.zeros(len(images), dtype=torch.int64))


def prepared(preparation, images, memory_format=torch.contiguous_format):
    return preparation.apply(batch_of(images), CPU, memory_format).inputs


def test_bytes_become_normalised_float32():
    images = torch.tensor([0, 51, 255, 102], dtype=torch.uint8).view(1, 1, 2, 2)
    got = prepared(Preparation((0.2,), (0.5,), 2, 1), images)
    assert got.dtype == torch.float32
    assert got.flatten().tolist() == pytest.approx([-0.4, 0.0, 1.6, 0.4], abs=1e-6)


def test_each_channel_has_its_own_mean_and_std():
    images = torch.full((2, 3, 1, 1), 255, dtype=torch.uint8)
    got = prepared(Preparation((0.1, 0.2, 0.5), (0.9, 0.4, 0.25), 1, 3), images)
    assert got[1].flatten().tolist() == pytest.approx([1.0, 2.0, 2.0], abs=1e-6)
    floats = torch.full((1, 3, 1, 1), 2.0)
    prepared(Preparation((0.1, 0.2, 0.5), (0.9, 0.4, 0.25), 1, 3, full_range=1.0), floats)
    assert images.eq(255).all()  # the host's copy is left alone
    assert floats.eq(2).all()


def test_resizing_is_bilinear_between_pixel_centres():
    images = torch.tensor([0, 100], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 1, 2, 2)
    got = prepared(Preparation((0.0,), (1.0,), 4, 1), images)
    # New centres lie at -1/4, 1/4, 3/4 and 5/4 of the old spacing; outside the centres the edge is repeated.
    assert (got[0, 0, 0] * 255).tolist() == pytest.approx([0, 25, 75, 100], abs=1e-4)


def test_grey_is_repeated_and_colour_becomes_luminance():
    grey = torch.tensor([51], dtype=torch.uint8).view(1, 1, 1, 1)
    assert prepared(Preparation((0.1,), (0.5,), 1, 3), grey).flatten().tolist() == pytest.approx([0.2] * 3)
    colour = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    got = prepared(Preparation((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 1, 1), colour)
    luminance = 0.299 * 1 + 0.114 * 0.2
    mean = 0.299 * 0.5 + 0.587 * 0.4 + 0.114 * 0.3
    assert got.shape == (1, 1, 1, 1)
    assert got.item() == pytest.approx((luminance - mean) / 0.2, abs=1e-6)


@pytest.mark.parametrize(("stored", "channels"), [(1, 1), (1, 3), (3, 3), (3, 1)])
def test_preparation_runs_without_data(stored, channels):
    # Fake tensors have no values: any read of one on the host would raise.
    constants = (0.1, 0.2, 0.3)[:stored], (0.4, 0.5, 0.6)[:stored]
    with FakeTensorMode():
        images = torch.empty(5, stored, 8, 8, dtype=torch.uint8)
        got = prepared(Preparation(*constants, 16, channels), images, torch.channels_last)
    assert (got.shape, got.dtype) == ((5, channels, 16, 16), torch.float32)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert channels == 1 or got.stride() == torch.empty(5, 3, 16, 16).to(memory_format=torch.channels_last).stride()
