"""What all tests share: one CPU thread, so that several workers do not fight over two cores, and small runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads weights, and none waits for a network

import signal

import pytest
import torch

from mptrain.system import device as devices
from mptrain.system.machine import dropping_nothing

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell begins what goes to the background so; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_configure(config):
    if "gpu" not in config.option.markexpr:  # tests of a CPU would train on a GPU that is there
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    with dropping_nothing():  # imports all tests, and what they need
        return (yield)


@pytest.fixture(autouse=True)
def _random_state_of_one_test_does_not_reach_the_next():
    devices.seed(0)
