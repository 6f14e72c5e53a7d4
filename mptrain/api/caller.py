"""Restoration of what belongs to the caller of a Python function: random numbers, warnings, variables, the folder."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from mptrain.system.device import begun
from mptrain.system.process_state import random_state, set_random_state

#: Variables of the environment that a run with ``train.deterministic`` or ``train.compile`` sets.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")


@contextlib.contextmanager
def caller_restored() -> Iterator[None]:
    """Restore generators of random numbers, filters of warnings, variables and the current folder afterwards."""
    device = begun() or torch.device("cpu")
    states, folder = random_state(device), Path.cwd()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(folder)
        set_random_state(states, device)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
