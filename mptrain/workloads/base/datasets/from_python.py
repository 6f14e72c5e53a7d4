"""Data set ``from_python``: map-style datasets of torch that a Python program gives to `mptrain.train`."""

from __future__ import annotations

from mptrain.system.errors import DataError
from mptrain.system.fields import NonNegativeInt
from mptrain.workloads.base.dataset import Dataset

#: Dotted name of `given_from_python`, on record in runs.
PATH = "mptrain.workloads.base.datasets.from_python.given_from_python"


def given_from_python(workers: NonNegativeInt = 0) -> Dataset:
    """Raise DataError: only the program that trained has the data; ``workers`` processes fetch from it."""
    raise DataError(
        "dataset=from_python: the data are in a Python program",
        "give them there: mptrain.train(..., data=(train, val, test)), or mptrain.open_run(RUN, data=...) and then its "
        "resume() or evaluate(); its predict(), export() and model() need no data",
    )
