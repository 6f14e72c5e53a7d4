"""States of the random number generators used in training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mptrain import device as devices


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python and torch on every device."""
    random.seed(seed)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's and torch's generators, in types that a weights-only load accepts."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states[device.type] = devices.random_state(device)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore states returned by `random_state`; a device without a saved state keeps its own."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        devices.set_random_state(states[device.type], device)


@contextlib.contextmanager
def other_random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Seed the random generators with ``seed`` in a context, and restore their states afterwards."""
    states = random_state(device)
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(states, device)
