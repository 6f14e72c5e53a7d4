"""Capabilities of devices, and the calls that differ between them; the rest of mptrain asks here.

torch.accelerator is asked for what all accelerators have, the device's own module of torch (`torch.get_device_module`) for what
they have under the same names, and `Capabilities` say what a device lacks. Only a CPU has been trained on; CUDA was
written against, and what is said of ROCm (which torch calls ``cuda``), XPU and MPS was read in torch's sources.
"""

from __future__ import annotations

import contextlib
import functools
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: What accelerators are called by those who make or sell them.
NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a device.

    Attributes:
        host: Its memory is the host's, which waits for nothing when it reads a value there.
        fp64: Tensors of FP64.
        fp16: Products of FP16, fast enough to be worth it, or on a CPU replaced by others (`mptrain.precision.upcast`).
        bf16: The same for BF16.
        tf32: Products of FP32 in TF32.
        graphs: What was launched can be recorded, and launched again as a whole.
        pinned: Copies between it and page-locked memory that the host does not wait for.
        streams: Streams beside each other, and events in them.
        fused: torch's fused optimizers, which skip an update on the device.
        triton: Kernels of Triton that were written for it.
    """

    host: bool = False
    fp64: bool = True
    fp16: bool = True
    bf16: bool = True
    tf32: bool = False
    graphs: bool = False
    pinned: bool = False
    streams: bool = False
    fused: bool = True
    triton: bool = False


@functools.cache
def capabilities(device: torch.device) -> Capabilities:
    """Return the capabilities of a device; they are asked for once in a process."""
    return _ask(device)


def _ask(device: torch.device) -> Capabilities:
    if device.type == "cuda":
        if is_rocm():
            return Capabilities(graphs=True, pinned=True, streams=True)
        level = compute_capability(device)
        volta, ampere = level >= (7, 0), level >= (8, 0)
        return Capabilities(
            fp16=volta, bf16=ampere, tf32=ampere, graphs=True, pinned=True, streams=True, triton=volta
        )  # tensor cores take FP16 from Volta on, BF16 and TF32 from Ampere on
    if device.type == "xpu":
        properties: Any = torch.get_device_module(device).get_device_properties(device)
        return Capabilities(
            fp64=properties.has_fp64, fp16=properties.has_fp16, pinned=True, streams=True, fused=False
        )  # some of Intel have no FP64
    if device.type == "mps":
        return Capabilities(fp64=False, bf16=torch.backends.mps.is_macos_or_newer(14, 0), fused=False)
    return Capabilities(host=device.type == "cpu")


def widest(device: torch.device) -> torch.dtype:
    """Return the widest float that a device computes in: float64, or float32."""
    return torch.float64 if capabilities(device).fp64 else torch.float32


def in_widest(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest float of its device."""
    return tensor.to(widest(tensor.device))


def beside_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor where FP64 can be computed: on its own device, or in host memory, which is waited for."""
    return tensor if capabilities(tensor.device).fp64 else tensor.cpu()


def count_of(kind: str) -> int:
    """Count the devices of a kind (``cuda``, ``xpu`` or ``mps``) that torch sees; it knows one kind of accelerator at a time."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found is not None and found.type == kind else 0


def other_accelerator() -> str | None:
    """Return the kind of an accelerator other than CUDA that is here; None where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type != "cuda" else None


def use(device: torch.device) -> None:
    """Make a device the current one: page-locked memory, streams and compiled kernels belong to that."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current(kind: str) -> torch.device:
    """Return the device of a kind that is the current one."""
    return torch.device(kind, torch.accelerator.current_device_index())


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a region in which a device is the current one."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream that a device is given work on; it has `Capabilities.streams`."""
    return torch.get_device_module(device).current_stream(device)


def new_stream(device: torch.device) -> Any:
    """Make another stream of a device that has `Capabilities.streams`."""
    return torch.get_device_module(device).Stream(device)


def on_stream(device: torch.device, stream: Any) -> AbstractContextManager[Any]:
    """Return a region in which a device is given work on a stream of its own."""
    region: AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return region


def event_now(device: torch.device, *, sleeping: bool = False) -> Any:
    """Record an event behind everything that a device's current stream has been given; it has `Capabilities.streams`.

    Args:
        device: The device.
        sleeping: Who waits for it sleeps, on CUDA, whose own events let one choose.
    """
    make = torch.get_device_module(device).Event
    event = make(blocking=sleeping) if device.type == "cuda" else make()
    event.record(current_stream(device))  # which need not be that of the current device
    return event


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched there now goes into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of an accelerator that tensors take now."""
    module = torch.get_device_module(device)
    used: int = module.current_allocated_memory() if device.type == "mps" else module.memory_allocated(device)
    return used


def memory_peak(device: torch.device) -> int:
    """Return the most bytes of an accelerator that tensors have taken; on MPS, which does not count that, those they take now."""
    if device.type == "mps":
        return memory_in_use(device)
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak


def forget_peak(device: torch.device) -> None:
    """Begin `memory_peak` anew."""
    if device.type != "mps":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's generator."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def name_of(device: torch.device) -> str:
    """Return the name that an accelerator goes by in shops."""
    if device.type == "mps":
        return "Apple GPU"
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


def properties_of(device: torch.device) -> Any:
    """Return the properties of a CUDA or XPU device as torch tells them."""
    return torch.get_device_module(device).get_device_properties(device)


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that an accelerator has, or on MPS those that Metal advises to use."""
    module = torch.get_device_module(device)
    size: int = module.recommended_max_memory() if device.type == "mps" else properties_of(device).total_memory
    return size


def is_rocm() -> bool:
    """Return whether what torch calls ``cuda`` is an AMD GPU."""
    return torch.version.hip is not None


def untried(device: torch.device) -> str:
    """Return a warning about a device that nobody has trained on; empty for others."""
    if device.type == "cuda":
        return "ROCm/HIP is untried: nobody has trained on an AMD GPU with mptrain" if is_rocm() else ""
    if device.type not in NAMES:
        return ""
    lacks = "" if capabilities(device).fp64 else "; without FP64, norms and scalers compute in FP32"
    return f"device={device.type} is untried: nobody has trained on {NAMES[device.type]} with mptrain{lacks}"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA device."""
    return torch.cuda.get_device_capability(device)


def built_for() -> tuple[str, ...]:
    """Return the architectures that this torch has CUDA kernels for: ``sm_80`` and the like."""
    return tuple(torch.cuda.get_arch_list())


def has_kernels(level: tuple[int, int], built: tuple[str, ...]) -> bool:
    """Return whether an NVIDIA device can run the kernels of a build of torch.

    Machine code (``sm_80``) runs on devices of its major version that are as late or later, with an ``a`` behind it on that very one.
    PTX (``compute_80``) is compiled by the driver for all that are as late or later.

    Args:
        level: Compute capability.
        built: What the build has kernels for (`built_for`); entries that are not understood count nothing.
    """
    for entry in built:
        if found := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry):
            kind, own, bound = found[1], (int(found[2]), int(found[3])), found[4]
            same_major = own[0] == level[0] and own <= level
            if own == level or (bound != "a" and (same_major or (kind == "compute" and not bound and own <= level))):
                return True
    return False
