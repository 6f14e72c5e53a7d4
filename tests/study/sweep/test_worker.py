"""What a job's process does to itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mptrain.study.sweep import worker
from mptrain.study.sweep.executor import Program
from mptrain.study.sweep.worker import one_line
from mptrain.system.errors import DataError
from tests.small_runs import environment


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("no data\nin no place", "get some"), "no data"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(""), "RuntimeError: no message"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 588),
    ],
)
def test_a_reason_is_one_line_that_fits_into_a_pipe(error, reason):
    assert one_line(error) == reason


def test_threads_that_cannot_be_set_are_reported_as_the_program_reports(tmp_path, monkeypatch):
    def refuse(count):
        raise DataError("no threads", "")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    program = Program(train=lambda config, sink: None, report=lambda error: 21)
    ended = worker._train(lambda: (program, None), tmp_path / "log", lambda error: 1, None, threads=1)
    assert (ended.status, ended.code, ended.reason) == ("failed", 21, "no threads")


IMPORTS = """
import os, pathlib, signal, sys
from mptrain.study.sweep.executor import JobSpec
from mptrain.study.sweep.worker import SubmittedJob, run_submitted_job
from tests import jobs_that_end as jobs
class Swallows:
    def find_spec(self, name, path=None, target=None):
        if name == "mptrain.config.compose":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException:
                pass
sys.modules.pop("mptrain.config.compose", None)
sys.meta_path.insert(0, Swallows())
folder = pathlib.Path(sys.argv[1])
job = JobSpec(0, ("seed=0", f"run.root={folder}", "run.name=r"), folder / "r", folder / "log")
run_submitted_job(SubmittedJob(job, (), "config", None, folder / "result", jobs.program(jobs.finish_at_once)))
"""


@pytest.mark.process
def test_a_stop_while_a_submitted_job_imports_is_not_swallowed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", IMPORTS, tmp_path], check=False, env=environment())
    assert ended.returncode == 75
    found = worker.read_result(tmp_path / "result")
    assert (found.status, found.reason) == ("preempted", "SIGTERM: stopped before training started")
    assert not (tmp_path / "r").exists()
