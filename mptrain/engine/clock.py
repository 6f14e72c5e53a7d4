"""Counts the time of training steps, what they got done, and what they cost in energy."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from mptrain.device import properties_of

if TYPE_CHECKING:
    from mptrain.engine.parts import Progress

#: Steps of an attempt that do not count as steady: kernels are chosen and caches filled in them.
WARM_UP = 10


class Clock:
    """Adds up a run's time in a `Progress`, and knows its recent throughput.

    Args:
        progress: Changed in place.
        device: Where it trains; its energy is read.

    Attributes:
        progress: The same.
        rate: Loss terms a second at the last `read`; evaluating and saving do not count.
        wait_share: Share of the time spent waiting for data at the last `read`, 0 to 1.
    """

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self.progress = progress
        self.rate = 0.0
        self.wait_share = 0.0
        self._steps = 0
        self._meter = energy_meter(device)
        self._energy: float | None = None
        self._training = False
        self._read_at = time.perf_counter()
        self._terms, self._waited, self._seconds = 0, 0.0, 0.0

    def lap(self, terms: int, waited: float, seconds: float) -> bool:
        """Count a step of ``terms`` loss terms that took ``seconds``, of which it waited for data for ``waited``.

        Returns:
            Whether the warm-up ends here, and the device should be waited for before the next step.
        """
        progress, steady = self.progress, self._steps >= WARM_UP
        self._steps += 1
        self.add(seconds, steady=steady)
        progress.terms += terms
        progress.epoch_terms += terms
        progress.waited += waited
        progress.steady_terms += terms if steady else 0
        progress.steady_steps += steady
        self._terms += terms
        self._waited += waited
        return self._steps == WARM_UP

    def add(self, seconds: float, *, steady: bool | None = None) -> None:
        """Count time of training that belongs to no step: the device finished what it had to do."""
        progress = self.progress
        progress.seconds += seconds
        progress.epoch_seconds += seconds
        if steady if steady is not None else self._steps > WARM_UP:
            progress.steady_seconds += seconds
        self._seconds += seconds

    def begin(self) -> None:
        """Training steps begin: the device's energy counts from here."""
        self._training = True
        self._energy = self._meter.read()

    def end(self) -> None:
        """Training steps end for now, and the device is done with them."""
        self.save()
        self._training = False

    def save(self) -> None:
        """Bring the energy in the progress up to date; NaN from where a device did not say for a part of the run."""
        if not self._training:
            return
        before, self._energy = self._energy, self._meter.read()
        used = math.nan if before is None or self._energy is None else self._energy - before
        self.progress.joules = (self.progress.joules or 0.0) + used

    @property
    def elapsed(self) -> float:
        """Wall time since the last `read`, seconds."""
        return time.perf_counter() - self._read_at

    def read(self) -> None:
        """Turn what was counted since the last call into `rate` and `wait_share`."""
        if self._seconds > 0:
            self.rate, self.wait_share = self._terms / self._seconds, min(1.0, self._waited / self._seconds)
        self._read_at, self._terms, self._waited, self._seconds = time.perf_counter(), 0, 0.0, 0.0


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
