"""The page on comparisons of logs shows what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import write_logs
from tests.small_runs import run_in_process

PAGE = Path(__file__).parents[2] / "docs" / "compare-logs.md"


def test_the_page_shows_what_is_printed(tmp_path):
    write_logs(tmp_path / "logs")
    arms = [f"{name}=logs/{name}-*.csv" for name in ("bf16", "fp8", "fp16")]
    words = ("compare", "--logs", *arms, "--metric", "loss", "--at", "step=1000", "--margin", "0.01")
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.search(r"-->\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)[1].strip()
    assert done.stdout.strip().startswith(shown)
