"""Resources that training steps take: time, throughput and energy, and memory, measured and counted by use."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from mptrain.numerics.tensors import part
from mptrain.optimizer.torch_rule import TorchRule
from mptrain.system import device as devices
from mptrain.system import machine
from mptrain.system.device import properties_of
from mptrain.system.torch_private import leaves, saved_for_backward, storage_key, tree_leaves

if TYPE_CHECKING:
    from mptrain.engine.parts import Parts
    from mptrain.engine.progress import Progress
    from mptrain.optimizer.weights import Weights


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


#: Options of glibc's mallopt(3), and their values for training on a CPU.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _MAPPED_FROM = 2**31 - 1, 2**30


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed CPU tensors instead of returning it to the system at every step.

    Otherwise each large tensor gets fresh memory, which the kernel must clear: a step of a word LSTM took 1.6 times as
    long when measured, a step of a small convolutional network 1.15 times. The cost is up to a third more resident
    memory. Does nothing if the user has set glibc's own variables, or with another C library.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process uses on a device now: allocated on an accelerator, resident set on a CPU."""
    return machine.resident_memory() if device.type == "cpu" else devices.memory_in_use(device)


def memory_now(device: torch.device) -> int:
    """Return the bytes to display during a run: the peak on an accelerator, the current resident set on a CPU."""
    return memory_in_use(device) if device.type == "cpu" else devices.memory_peak(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak` returns, so that earlier use, such as importing torch, does not count."""
    if device.type == "cpu":
        machine.forget_peak()
    else:
        devices.forget_peak(device)


def memory_peak(device: torch.device) -> int:
    """Return the most bytes, allocated on an accelerator or resident on a CPU, that were in use since `forget_peak`."""
    return machine.resident_peak() if device.type == "cpu" else devices.memory_peak(device)


def saved_bytes(loss: torch.Tensor, model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass of a loss, without what the model itself holds."""
    own = _storages((*model.parameters(), *model.buffers(), *leaves(loss)))
    return sum(size for key, size in _storages(saved_for_backward(loss)).items() if key not in own)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' memory on this rank, each memory once."""
    dense = (part(tensor).untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage_key(storage): storage.nbytes() for storage in dense}


def memory_by_use(parts: Parts, activations: int) -> dict[str, int]:
    """Return the bytes of a training step on this rank by use, of which ``activations`` are saved for a backward pass.

    ``weights`` are parameters and buffers, ``master_weights`` their permanent FP32 copies, ``fp32_copies`` those that
    hold a weight only while it is updated, ``compensation`` what rounding took from BF16 weights, and ``average`` that
    of the weights.
    Half-precision ``gradients`` have FP32 sums beside them. ``optimizer_state`` is left out where an optimizer makes it
    in its first update, before that. Temporary results are not counted, nor what libraries allocate.
    """
    bytes_by_use = {"weights": sum(_storages((*parts.model.parameters(), *parts.model.buffers())).values())}
    for learner in parts.learners:
        average = [part(tensor).nbytes for tensor in learner.average.values().values()] if learner.average else []
        for use, size in {**_of_weights(learner.weights), **({"average": sum(average)} if average else {})}.items():
            bytes_by_use[use] = bytes_by_use.get(use, 0) + size
    return {**bytes_by_use, "activations": activations}


def _of_weights(weights: Weights) -> dict[str, int]:
    masters = weights.masters
    copies = sum(
        work.nbytes for work, half in zip(masters.work, masters.rounded_into(), strict=True) if half is not None
    )
    kept = masters.compensation_bytes
    gradients = copies + sum(own.nbytes for own in masters.parts)
    of_copies = "fp32_copies" if copies and not masters.keep else "master_weights"
    bytes_by_use = {of_copies: copies, **({"compensation": kept} if kept else {}), "gradients": gradients}
    if not isinstance(weights.rule, TorchRule) or weights.updater.step.item():
        state = tree_leaves(weights.updater.state_dict()["state"])
        bytes_by_use["optimizer_state"] = sum(part(leaf).nbytes for leaf in state if isinstance(leaf, torch.Tensor))
    return bytes_by_use
