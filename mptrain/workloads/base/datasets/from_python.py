"""Data set ``from_python``: map-style datasets of torch that a Python program gives to `mptrain.train`."""

from __future__ import annotations

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt
from mptrain.workloads.base.dataset import Dataset


def given_from_python(workers: NonNegativeInt = 0) -> Dataset:
    """Raise DataError: only the program that trained has the data; ``workers`` processes fetch from it."""
    raise DataError(
        "dataset=from_python: the data are in a Python program",
        "call mptrain.train(..., data=(train, val, test)); run.name=NAME and run.resume=auto continue a run; a run is "
        "exported without data as .pt or .safetensors, and mptrain.open_run(RUN).model() is its network",
    )
