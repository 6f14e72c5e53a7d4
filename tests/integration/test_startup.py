"""What a run does not import: each of these takes longer than the rest of its start."""

from __future__ import annotations

import subprocess
import sys

import pytest
from small_runs import TINY, environment

pytestmark = pytest.mark.process

CODE = """
import sys
from mptrain.cli.main import main
code = main({words!r})
print(code, *sorted({heavy!r} & sys.modules.keys()))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "sympy", "scipy.stats", "matplotlib", "sklearn", "pandas", "triton"}


def test_a_run_needs_neither_the_compiler_nor_statistics_nor_figures(tmp_path):
    for precision in ("fp32", "amp_dynamic", "fp16_dynamic"):
        words = [*TINY, "device=cpu", f"precision={precision}", "train.max_steps=2"]
        found = subprocess.run(
            [sys.executable, "-c", CODE.format(words=words, heavy=HEAVY)],
            capture_output=True, text=True, check=True, cwd=tmp_path, env=environment(),
        )  # fmt: skip
        assert found.stdout.splitlines()[-1] == "0"
