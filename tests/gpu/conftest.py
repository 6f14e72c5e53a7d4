"""Shared by the tests on a CUDA device: settings of the whole process that end with the test that made them."""

from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch

from mptrain.system.errors import EnvironmentRefused

#: cuBLAS gives the same bits in every run only with a workspace of its own, and reads that when it begins.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(mode: str) -> None:
    """`torch.cuda.set_sync_debug_mode` without its warning that it is a prototype, which sets the mode and then raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._C._cuda_set_sync_debug_mode(MODES[mode])  # the same without a device, so that a CPU can test it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test of a mode that GPUs before Ampere (V100, T4) do not have; there the refusal is the reason."""
    try:
        return (yield)
    except EnvironmentRefused as refused:
        if "(requires 8.0 or later)" not in str(refused) or torch.cuda.get_device_capability() >= (8, 0):
            raise
        pytest.skip(str(refused))


@pytest.fixture(autouse=True)
def _settings_of_one_test_do_not_reach_the_next():
    yield
    torch.use_deterministic_algorithms(False)
    if hasattr(torch._C, "_cuda_set_sync_debug_mode"):  # not in builds for a CPU alone
        set_sync_debug_mode("default")


@pytest.fixture
def no_waiting():
    """A function that opens a region in which waiting for the device is an error."""

    @contextlib.contextmanager
    def region():
        set_sync_debug_mode("error")
        try:
            yield
        finally:
            set_sync_debug_mode("default")

    return region


@pytest.fixture
def deterministic(monkeypatch):
    """Operators that give the same bits again, where torch and cuDNN have them; those without one are in the list."""
    for name, value in {"deterministic": True, "benchmark": False}.items():
        monkeypatch.setattr(torch.backends.cudnn, name, value)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield said
