"""Columns that a cast rounds away are found, whatever their neighbours are."""

from __future__ import annotations

import torch

from mptrain.lab.step.observation import lost_columns
from mptrain.workloads.base.batch import Batch


def batch(*columns):
    return Batch(torch.stack(columns, 1), torch.zeros(len(columns[0])))


def test_columns_that_lose_their_differences_are_named():
    one = torch.randn(32, generator=torch.Generator().manual_seed(0))
    rows = batch(1.7e9 + 1e6 * one, one, 60000 + one, torch.full_like(one, 0.1))
    assert lost_columns(rows, torch.float16) == "columns 0, 2"
    assert lost_columns(rows, torch.bfloat16) == "columns 0, 2"
    assert lost_columns(rows, torch.float32) == ""


def test_images_and_one_sample_have_no_columns():
    images = Batch(torch.rand(4, 3, 8, 8), torch.zeros(4))
    assert lost_columns(images, torch.bfloat16) == ""
    assert lost_columns(
        Batch(torch.full((4, 1, 2, 2), 1e6) + torch.rand(4, 1, 2, 2), torch.zeros(4)), torch.float16
    ) == ("the inputs")
    assert lost_columns(Batch(torch.full((1, 4), 1000.3), torch.zeros(1)), torch.float16) == ""
    assert lost_columns(Batch(torch.tensor([[1.0, 1e6]]), torch.zeros(1)), torch.float16) == "column 1"
