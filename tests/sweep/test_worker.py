"""What a job's process does to itself."""

from __future__ import annotations

import os

import pytest

from mptrain.errors import DataError
from mptrain.sweep import worker
from mptrain.sweep.worker import OF_THE_SERVER, one_line


def test_only_the_named_variables_are_dropped(monkeypatch):
    monkeypatch.setenv(OF_THE_SERVER, "ONE_OF_OURS GONE_ALREADY")
    monkeypatch.setenv("ONE_OF_OURS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    worker._drop_variables_of_the_server()
    assert os.environ.keys().isdisjoint({OF_THE_SERVER, "ONE_OF_OURS"})
    assert os.environ["OPENBLAS_NUM_THREADS"] == "3"


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
