"""How much energy the device has used, where it says so: the whole device, whoever used it.

NVIDIA devices from Volta on count it, read through NVML (the package nvidia-ml-py). CPUs count it in RAPL's registers,
which Linux shows below ``/sys/class/powercap``, on most systems to root only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from mptrain.device import properties_of

_RAPL = Path("/sys/class/powercap")


class EnergyMeter(Protocol):
    """Counts the energy that a device uses."""

    def read(self) -> float | None:
        """Joules since some moment in the past, never falling; None where the device does not say."""


class NoMeter:
    """A device that does not say."""

    def read(self) -> None:
        """Always None."""


class RaplMeter:
    """All packages of a CPU, through Linux's powercap files.

    Args:
        packages: Folders with ``energy_uj``, which counts microjoules and wraps at ``max_energy_range_uj``. A wrap between
            two reads is made good; more than one (after an hour or so) cannot be seen.
    """

    def __init__(self, packages: list[Path]) -> None:
        self._packages = [(package / "energy_uj", _number(package / "max_energy_range_uj")) for package in packages]
        self._last = [_number(counter) for counter, _ in self._packages]
        self._microjoules = 0

    def read(self) -> float | None:
        """Joules since this meter was made."""
        try:
            now = [_number(counter) for counter, _ in self._packages]
        except (OSError, ValueError):
            return None
        for (_, most), before, after in zip(self._packages, self._last, now, strict=True):
            self._microjoules += after - before if after >= before else after - before + most
        self._last = now
        return self._microjoules / 1e6


class NvmlMeter:
    """A CUDA device, through NVML.

    Args:
        millijoules: Reads the device's counter, in millijoules since the driver was loaded.
    """

    def __init__(self, millijoules: Callable[[], int]) -> None:
        self._millijoules = millijoules

    def read(self) -> float | None:
        """Joules since the driver was loaded."""
        try:
            return self._millijoules() / 1000
        except Exception:  # NVML's errors are its own; energy is never worth a run
            return None


def energy_meter(device: torch.device, rapl: Path = _RAPL) -> EnergyMeter:
    """The meter of a device.

    Args:
        device: The training device.
        rapl: Where the CPU's counters are.
    """
    if device.type == "cuda":
        return _nvml_meter(device)
    if device.type != "cpu":
        return NoMeter()
    packages = sorted(rapl.glob("intel-rapl:?")) + sorted(rapl.glob("intel-rapl:??"))  # sub-zones have two colons
    with contextlib.suppress(OSError, ValueError):
        if packages:
            return RaplMeter(packages)
    return NoMeter()


def _nvml_meter(device: torch.device) -> EnergyMeter:
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = properties_of(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        meter = NvmlMeter(lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    except Exception:  # the package is missing, or the driver, or the device does not count
        return NoMeter()
    return meter if meter.read() is not None else NoMeter()


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
