"""States of the random number generators used in training: saved in checkpoints, restored on resuming."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from mptrain.system import device as devices


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, of NumPy, and of torch on every device, so that a run can be reproduced."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    devices.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and an accelerator's generators by name, for a checkpoint.

    The names are ``python``, ``numpy``, ``torch``, and the device type such as ``cuda``. The values are of types that
    ``torch.load(..., weights_only=True)`` accepts.
    """
    version, internal, gauss = random.getstate()
    _, key, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    states: dict[str, Any] = {
        "numpy": {"key": key.tolist(), "position": position, "has_gauss": has_gauss, "gauss": cached},
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = devices.random_state(device)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of the random generators that `random_state` returned, such as those of a checkpoint.

    NumPy's generator and an accelerator's are left unchanged if no state of theirs was saved.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    if numpy := states.get("numpy"):
        np.random.set_state(("MT19937", numpy["key"], numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        devices.set_random_state(states[device.type], device)


@contextlib.contextmanager
def other_random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed all random generators for the duration of a context, and restore their states afterwards."""
    states = random_state(device)
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(states, device)
