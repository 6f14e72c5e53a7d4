"""What a job's process does to itself."""

from __future__ import annotations

import pytest

from mptrain.errors import DataError
from mptrain.sweep.worker import one_line


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
