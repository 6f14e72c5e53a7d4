"""What all tests share: one CPU thread, so that several workers do not fight over two cores, and small runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import signal

import pytest
import torch

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell begins what goes to the background so; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _random_state_of_one_test_does_not_reach_the_next():
    torch.manual_seed(0)
