"""Support of precision modes by devices, checked before training, and by the dimensions of weights.

NVIDIA tensor cores support FP16 from compute capability 7.0 (Volta), BF16 and TF32 from 8.0 (Ampere). torch's
`is_bf16_supported` includes emulation and is true on a T4, so it is not used. The rules for compute capabilities do not
apply to AMD GPUs, which torch calls ``cuda`` too but whose version numbers mean something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mptrain.precision.upcast import uses_upcast
from mptrain.system.device import (
    NAMES,
    Capabilities,
    built_for,
    capabilities,
    compute_capability,
    count_of,
    current,
    has_kernels,
    has_tensor_cores,
    is_rocm,
    other_accelerator,
)
from mptrain.system.errors import EnvironmentRefused
from mptrain.system.torch_private import has_native_half
from mptrain.system.words import listed, percent

if TYPE_CHECKING:
    from torch import nn

    from mptrain.precision.policy import Policy


@dataclass(frozen=True)
class Support:
    """Result of the check whether a device supports a precision mode, with phrases for the user.

    If not ``ok``, training needs ``precision.force``, which helps if ``forcible``. ``reason`` is a feature that the
    device has or lacks, ``advice`` an alternative or warning, possibly empty.
    """

    ok: bool
    reason: str
    advice: str = ""
    forcible: bool = True


def resolve_device(name: str) -> torch.device:
    """Return the torch device for the option ``device``; an accelerator always has an index, 0 if none is given.

    ``auto`` selects a CUDA device or the CPU. XPU and MPS must be requested explicitly, because they are untested, and
    on MPS norms and scalers round differently without FP64. Raises EnvironmentRefused if the requested accelerator is
    missing or has fewer devices.
    """
    if name == "auto":
        return current("cuda") if count_of("cuda") else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    kind, count = NAMES[device.type], count_of(device.type)
    if count == 0:
        raise EnvironmentRefused(f"device={name}: torch sees no {kind} device", _instead_of(device.type))
    if (device.index or 0) >= count:
        there = f"are {count} {kind} devices" if count > 1 else f"is one {kind} device"
        raise EnvironmentRefused(
            f"device={name}: there {there}",
            f"use {device.type}:0 to {device.type}:{count - 1}" if count > 1 else f"use {device.type}",
        )
    return torch.device(device.type, device.index or 0)


def _instead_of(kind: str) -> str:
    here = other_accelerator()
    if kind == "cuda" and here is not None:
        return f"this machine has {here}, which is untested: use device={here} or device=cpu"
    needs = {
        "cuda": "use device=cpu or run: mptrain doctor",
        "xpu": "use device=cpu, or run mptrain doctor; XPU needs an Intel GPU, its driver and torch's build for it",
        "mps": "use device=cpu, or run mptrain doctor; MPS needs macOS on Apple silicon and torch's build for it",
    }
    return needs[kind]


def supports(policy: Policy, device: torch.device) -> Support:
    """Return whether a device supports a precision policy, with the reason and an alternative for the user.

    NVIDIA GPUs are judged by compute capability, CPUs by their half-precision arithmetic, and untested accelerators by
    the capabilities found for them (`mptrain.system.device.capabilities`).
    """
    if device.type == "cuda" and not is_rocm():
        tensor_cores = policy.compute != "float16" or has_tensor_cores(device)
        return cuda_support(policy, compute_capability(device), built_for(), tensor_cores=tensor_cores)
    if device.type != "cpu":
        return _untried_support(policy, "ROCm" if device.type == "cuda" else NAMES[device.type], capabilities(device))
    if policy.tf32:
        return Support(False, "a CPU has no TF32", "use precision=fp32")
    if not policy.half:
        return Support(True, "FP32 is native")
    if uses_upcast(policy, device):
        why = (
            "precision.cpu_kernels=upcast"
            if has_native_half(policy.compute)
            else f"this CPU has no {policy.compute} arithmetic"
        )
        return Support(
            True,
            f"{why}; products compute in FP32 and round once to {policy.compute}",
            "same numerics as tensor cores, but not faster than FP32",
        )
    if not has_native_half(policy.compute):
        return Support(
            True,
            f"this CPU has no {policy.compute} arithmetic, and precision.cpu_kernels=native",
            "expect steps 10 to 80 times slower than FP32, or set precision.cpu_kernels=auto",
        )
    if policy.compute == "float16" and policy.cpu_kernels == "auto":
        return Support(
            True, "float16 is native; gradients of convolutions, and LSTM layers, compute in FP32 and round once"
        )
    return Support(True, f"{policy.compute} is native")


#: Devices by the compute capability from which they have tensor cores for FP16, and for BF16 and TF32.
VOLTA, AMPERE = "V100, T4, RTX 20xx and later", "A100, A10, RTX 30xx, L4, H100 and later"


def cuda_support(
    policy: Policy, capability: tuple[int, int], built: tuple[str, ...] = (), *, tensor_cores: bool = True
) -> Support:
    """Return an NVIDIA device's support of a policy; an empty ``built`` leaves the kernels of torch unchecked.

    Without ``tensor_cores``, or before Volta, FP16 saves memory alone.
    """
    sm = f"compute capability {capability[0]}.{capability[1]}"
    if built and not has_kernels(capability, built):
        return Support(
            False,
            f"this torch build has no kernels for {sm}, only for {', '.join(built)}",
            "install a torch build for this device (https://pytorch.org/get-started/locally), or use device=cpu",
            forcible=False,
        )
    if policy.compute == "bfloat16" and capability < (8, 0):
        instead = "precision=amp_dynamic" if capability >= (7, 0) else "precision=fp32"
        return Support(False, f"{sm} has no BF16 arithmetic (requires 8.0 or later: {AMPERE})", f"use {instead}")
    if policy.tf32 and capability < (8, 0):
        return Support(
            False,
            f"{sm} has no TF32 (requires 8.0 or later: {AMPERE})",
            "use precision=fp32 or precision=amp_dynamic",
        )
    if policy.compute == "float16" and (capability < (7, 0) or not tensor_cores):
        without = "this device" if capability >= (7, 0) else sm
        return Support(
            True,
            f"{without} has no FP16 tensor cores ({VOLTA} have them, GTX 16xx does not)",
            "FP16 saves memory here, and no time",
        )
    if not policy.half:
        return Support(True, f"{sm} runs {'TF32' if policy.tf32 else 'FP32'} natively")
    return Support(True, f"{sm} has {policy.compute} tensor cores")


def _untried_support(policy: Policy, name: str, has: Capabilities) -> Support:
    if policy.tf32 and not has.tf32:
        return Support(False, f"{name} has no TF32 switch in torch", "use precision=fp32")
    if not policy.half:
        return Support(True, f"{name} has FP32; untested")
    if not (has.fp16 if policy.compute == "float16" else has.bf16):
        return Support(False, f"{name} has no {policy.compute} on this machine", "use precision=fp32")
    return Support(True, f"{name} has {policy.compute}; untested")


def require_support(policy: Policy, device: torch.device) -> Support:
    """Return the support of a precision policy by a device; another policy is never substituted.

    Raises EnvironmentRefused if the device does not support it, and ``precision.force`` is not set or cannot help.
    """
    support = supports(policy, device)
    if not support.ok and not support.forcible:
        raise EnvironmentRefused(f"device={device}: {support.reason}", support.advice)
    if not support.ok and not policy.force:
        raise EnvironmentRefused(
            f"precision={policy.name} on {device}: {support.reason}",
            f"{support.advice}, or set precision.force=true to run anyway",
        )
    return support


#: Tensor cores take FP16 operands whose dimensions are multiples of 8 (NVIDIA, "Mixed Precision Training" user guide).
ALIGNMENT = 8

#: Smallest share of weights that is spoken of.
_SPOKEN_OF = 0.1


def unaligned_share(model: nn.Module) -> float:
    """Return the share of a model's matrix and kernel elements in tensors misaligned for tensor cores."""
    whole = sum(weight.numel() for weight in model.parameters() if weight.ndim >= 2)
    return sum(weight.numel() for _, weight in _unaligned(model)) / max(1, whole)


def unaligned_in_words(model: nn.Module) -> str:
    """Return a sentence on a model's misaligned weights with the largest ones; empty if they are few."""
    if (share := unaligned_share(model)) <= _SPOKEN_OF:
        return ""
    sizes = [f"{name} ({'x'.join(map(str, weight.shape))})" for name, weight in _unaligned(model)]
    return (
        f"{percent(share)} of the weights have a dimension that is no multiple of {ALIGNMENT}, for which tensor cores "
        f"are slow or unused: {listed(sizes)}"
    )


def _unaligned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the weights whose first or second dimension (outputs, inputs) is no multiple, the largest first."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.ndim >= 2]
    odd = [(name, weight) for name, weight in named if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT]
    return sorted(odd, key=lambda each: -each[1].numel())
