"""States of the random number generators used in training: saved in checkpoints, restored on resuming."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mptrain.system import device as devices


def seed_everything(seed: int) -> None:
    """Seed Python's random generator, and torch's on every device, so that a training run can be reproduced."""
    random.seed(seed)
    devices.seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, torch's and an accelerator's random generators by name, for a checkpoint.

    The names are ``python``, ``torch``, and the device type such as ``cuda``. The values are of types that
    ``torch.load(..., weights_only=True)`` accepts.
    """
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = devices.random_state(device)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of the random generators that `random_state` returned, such as those of a checkpoint.

    An accelerator's generator is left unchanged if no state of its device type was saved.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
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
