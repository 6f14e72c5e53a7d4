"""Tests on a GPU of a mode that it does not have are skipped, with the refusal as the reason; no device is needed to see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
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


@pytest.mark.process
def test_a_mode_that_a_gpu_does_not_have_is_skipped_and_no_other_refusal(tmp_path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "none.ini").write_text("[pytest]\n")
    words = ("-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), "-c", "none.ini", "-q", "-rs")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "2 failed, 1 passed, 3 skipped" in run.stdout, run.stdout + run.stderr
    assert "has no BF16 arithmetic (requires 8.0 or later)" in run.stdout
    assert "has no TF32 (requires 8.0 or later)" in run.stdout
