"""What a job's process does to itself."""

from __future__ import annotations

import pytest
import torch

from mptrain.study.sweep import worker
from mptrain.study.sweep.executor import Program
from mptrain.study.sweep.worker import one_line
from mptrain.system.errors import DataError


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
