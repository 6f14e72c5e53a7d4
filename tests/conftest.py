"""What all tests share: one CPU thread, so that several workers do not fight over two cores, and small runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _random_state_of_one_test_does_not_reach_the_next():
    torch.manual_seed(0)
