"""Measurement of the time, throughput and energy of training steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from mptrain.system.device import properties_of

if TYPE_CHECKING:
    from mptrain.engine.parts import Progress

#: Warm-up steps of each attempt. They are left out of steady figures: kernels are chosen and caches filled in them.
WARM_UP = 10


class Clock:
    """Clock of a run's steps, which adds up time, loss terms and energy in its progress and reports recent throughput.

    As of the last `read`, ``rate`` is in loss terms per second, without evaluation and saving, and ``wait_share`` is
    the fraction of time spent waiting for data, 0 to 1.
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
        """Count one training step, ``waited`` of its seconds for data.

        Returns whether it ends the warm-up, so that the caller should wait for the device before the next one.
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
        """Count training time of no step, such as waiting for the device.

        ``steady`` counts it as time after the warm-up; None decides by the number of steps so far.
        """
        progress = self.progress
        progress.seconds += seconds
        progress.epoch_seconds += seconds
        if steady if steady is not None else self._steps > WARM_UP:
            progress.steady_seconds += seconds
        self._seconds += seconds

    def begin(self) -> None:
        """Start counting the device's energy, because training steps begin."""
        self._training = True
        self._energy = self._meter.read()

    def end(self) -> None:
        """Stop counting the device's energy, because training steps have ended and the device has finished them."""
        self.save()
        self._training = False

    def save(self) -> None:
        """Add the energy since the last reading to the run's total, NaN once the device fails to report a part."""
        if not self._training:
            return
        before, self._energy = self._energy, self._meter.read()
        used = math.nan if before is None or self._energy is None else self._energy - before
        self.progress.joules = (self.progress.joules or 0.0) + used

    @property
    def elapsed(self) -> float:
        """Wall time since the last `read`, in seconds."""
        return time.perf_counter() - self._read_at

    def read(self) -> None:
        """Update `rate` and `wait_share` from the steps counted since the last call."""
        self._read_at = time.perf_counter()
        if (
            self._terms and self._seconds > 0
        ):  # time without steps, such as waiting for the device, counts with the next
            self.rate, self.wait_share = self._terms / self._seconds, min(1.0, self._waited / self._seconds)
            self._terms, self._waited, self._seconds = 0, 0.0, 0.0


class EnergyMeter(Protocol):
    """Interface of a meter of the energy that a device uses."""

    def read(self) -> float | None:
        """Return the energy in joules since a fixed moment, never decreasing; None if the device reports none."""


class NoMeter:
    """Energy meter of a device that reports no energy."""

    def read(self) -> None:
        """Return None."""


class NvmlMeter:
    """Energy meter of a CUDA device, read through NVML as millijoules since the driver was loaded."""

    def __init__(self, millijoules: Callable[[], int]) -> None:
        self._millijoules = millijoules

    def read(self) -> float | None:
        """Return the joules since the driver was loaded; None if NVML does not report them."""
        try:
            return self._millijoules() / 1000
        except Exception:  # NVML has its own error classes; a missing reading must not stop the run
            return None


def energy_meter(device: torch.device) -> EnergyMeter:
    """Return the energy meter of a device: of a CUDA device NVML's, if pynvml is installed; else a `NoMeter`."""
    return _nvml_meter(device) if device.type == "cuda" else NoMeter()


def _nvml_meter(device: torch.device) -> EnergyMeter:
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = properties_of(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        meter = NvmlMeter(lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    except Exception:  # no package, no driver, or a device without an energy counter
        return NoMeter()
    return meter if meter.read() is not None else NoMeter()
