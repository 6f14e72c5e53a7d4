"""Ctrl-C in the first seconds of a command, while libraries are imported, ends it with one word."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from small_runs import TINY, command, environment


@pytest.mark.process
def test_ctrl_c_at_any_moment_of_a_start_shows_no_traceback_and_blames_no_module(tmp_path):
    for moment in range(12):
        run = subprocess.Popen(
            command(*TINY, "train.epochs=50"), cwd=tmp_path, env=environment(), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(0.2 + 0.12 * moment)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=120)
        assert run.returncode in (130, -signal.SIGINT), said
        assert "Traceback" not in said
        assert "error" not in said.replace("error: interrupted by SIGINT", "")
