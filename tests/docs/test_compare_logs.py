"""The page on comparisons of logs shows what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from small_runs import run_in_process

PAGE = Path(__file__).parents[2] / "docs" / "compare-logs.md"


def test_the_page_shows_what_is_printed(tmp_path):
    draws = np.random.default_rng(1)
    (tmp_path / "logs").mkdir()
    for arm, level in (("bf16", 3.30), ("fp8", 3.302), ("fp16", 3.34)):
        for seed in range(5):
            end = level + draws.normal(0, 0.003)
            rows = [(at, end + 2 * np.exp(-at / 150) + draws.normal(0, 0.001)) for at in range(0, 1001, 50)]
            text = "".join(f"{at},{loss:.5f}\n" for at, loss in rows)
            (tmp_path / "logs" / f"{arm}-{seed}.csv").write_text(f"step,loss\n{text}")
    arms = [f"{name}=logs/{name}-*.csv" for name in ("bf16", "fp8", "fp16")]
    words = ("compare", "--logs", *arms, "--metric", "loss", "--at", "step=1000", "--margin", "0.01")
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"-->\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)[1].strip()
    assert done.stdout.strip().startswith(shown)
