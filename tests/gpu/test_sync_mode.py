"""The mode in which waiting for the device is an error ends with the test that asked for it; no device is needed to see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = """
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


@pytest.mark.process
@pytest.mark.skipif(not hasattr(torch._C, "_cuda_set_sync_debug_mode"), reason="needs a build for CUDA")
def test_no_test_leaves_its_settings_to_the_next(tmp_path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    words = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "error",
        "--rootdir",
        str(tmp_path),
        "-c",
        "none.ini",
        "-q",
    )
    (tmp_path / "none.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "2 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert "prototype" not in run.stdout
