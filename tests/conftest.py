"""What all tests share: one CPU thread, so that several workers do not fight over two cores, and small runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads weights, and none waits for a network

import functools
import signal

import pytest
import torch

from mptrain.config import compose as composing
from mptrain.config import location

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell begins what goes to the background so; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_configure(config):
    if "gpu" not in config.option.markexpr:  # tests of a CPU would train on a GPU that is there
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def _random_state_of_one_test_does_not_reach_the_next():
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for GPUs that may come


@pytest.fixture(scope="session", autouse=True)
def _own_configs_are_read_once():
    """Share one composer among tests: reading the files of the project's own groups is most of the time of composing."""
    fresh = composing.Composer

    @functools.cache
    def shared(configs, config_name, typed):
        return fresh((), config_name, typed)

    def composer(config_dirs=(), config_name="train", typed=None):
        if config_dirs:
            return fresh(config_dirs, config_name, typed)
        return shared(location.configs(), config_name, None if typed is None else tuple(typed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composing, "Composer", composer)
        yield
