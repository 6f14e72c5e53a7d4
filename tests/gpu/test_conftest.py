"""What the tests on a CUDA device share, seen without a device: skipped modes, and settings that end with their test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

OLDER_DEVICES = """
import pytest, torch
from mptrain.config.compose import compose
from mptrain.system.device import capabilities
from mptrain.system.errors import EnvironmentRefused
from mptrain.precision.support import require_support

@pytest.fixture
def level(monkeypatch):
    def pretend(*level):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: level)
    return pretend

@pytest.mark.parametrize("name", ["bf16", "amp_bf16", "tf32", "fp16_dynamic"])
def test_on_a_t4(level, name):
    level(7, 5)
    require_support(compose([f"precision={name}"]).precision, torch.device("cuda", 0))

def test_a_wrong_refusal_on_an_a100(level):
    level(8, 0)
    raise EnvironmentRefused("compute capability 8.0 has no BF16 arithmetic (requires 8.0 or later)")

def test_another_refusal_on_a_t4(level):
    level(7, 5)
    raise EnvironmentRefused("device=cuda:1: there is one CUDA device")
"""

SYNC_MODE = """
import pytest, torch

def test_the_first_call_of_a_process_raises_nothing(no_waiting):
    with no_waiting():
        assert torch._C._cuda_get_sync_debug_mode() == 2
    assert torch._C._cuda_get_sync_debug_mode() == 0

def test_that_fails_within(no_waiting):
    with no_waiting():
        raise RuntimeError("it waits")

def test_that_fails_without_a_region():
    torch._C._cuda_set_sync_debug_mode(2)
    torch.use_deterministic_algorithms(True)
    raise RuntimeError("it waits")

def test_after_them_the_settings_are_those_of_a_new_process():
    assert torch._C._cuda_get_sync_debug_mode() == 0
    assert not torch.are_deterministic_algorithms_enabled()
"""


def output_of(folder, tests):
    """The output of tests in a folder with the same conftest.py."""
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "test_some.py").write_text(tests)
    (folder / "none.ini").write_text("[pytest]\n")
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error", "-c", "none.ini", "-q", "-rs"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", folder],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout


@pytest.mark.slow
def test_a_mode_that_a_gpu_does_not_have_is_skipped_and_no_other_refusal(tmp_path):
    output = output_of(tmp_path, OLDER_DEVICES)
    assert "2 failed, 1 passed, 3 skipped" in output, output
    assert "has no BF16 arithmetic (requires 8.0 or later)" in output
    assert "has no TF32 (requires 8.0 or later)" in output


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_set_sync_debug_mode"), reason="needs a build for CUDA")
def test_no_test_leaves_its_settings_to_the_next(tmp_path):
    output = output_of(tmp_path, SYNC_MODE)
    assert "2 failed, 2 passed" in output, output
    assert "prototype" not in output
