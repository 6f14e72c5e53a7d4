"""Application of a precision policy to a model and its training step.

Parameters and buffers are cast once, before training; modules that the policy keeps in FP32 cast their inputs and
outputs in every call. The model is built in FP32 and must not depend on the precision.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from mptrain.numerics.tensors import limited
from mptrain.precision.keep_fp32 import cast_floating, float32_subclass, kept_modules, refuse_sharing
from mptrain.precision.policy import Dtype, Policy
from mptrain.system.torch_private import BatchNorm
from mptrain.system.words import listed

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# torch's batch norm takes half-precision input with FP32 weights and statistics and returns half precision. So no cast
# is needed, and activations, which dominate the memory of a step, stay in half precision.
_MIXED_KERNELS = BatchNorm


def count_out_of_range(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the finite values of a tensor beyond the largest number of a float dtype; waits for the device."""
    return int(((value.abs() > torch.finfo(dtype).max) & value.isfinite()).sum())


def describe_clamped(counts: dict[str, int], dtype: torch.dtype) -> str:
    """Return a sentence that warns of clamped weights and buffers, given their numbers of clamped values by name."""
    named = listed([f"{name} ({count:,})" for name, count in counts.items()])
    number, form = sum(counts.values()), str(dtype).removeprefix("torch.")
    return (
        f"{number:,} value{'s' if number != 1 else ''} in weights and buffers {'are' if number != 1 else 'is'} beyond "
        f"{torch.finfo(dtype).max:.6g}, the largest of {form}, and clamped to it: {named}"
    )


def clamp_to_range(model: nn.Module, policy: Policy) -> dict[str, int]:
    """Clamp, in place, finite weights and buffers of an FP32 model that would overflow in the policy's parameter dtype.

    Call it before `cast_model`. Master weights are copied before the cast, so clamping makes them start from the values
    that the network computes with. Infinities, as in masks, are kept, and so are modules in FP32. Returns the numbers
    of clamped values by qualified name. Raises ConfigError if ``keep_fp32`` matches nothing.
    """
    dtype, counts = DTYPES[policy.parameters], {}
    if dtype == torch.float32:
        return {}
    inside = {id(part) for module in kept_modules(model, policy.keep_fp32).values() for part in module.modules()}
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers} if id(module) not in inside else {}
        for name, tensor in own.items():
            if tensor is not None and tensor.is_floating_point() and (count := count_out_of_range(tensor, dtype)):
                counts[f"{path}.{name}" if path else name] = count
                with torch.no_grad():
                    tensor.copy_(limited(tensor, dtype))
    return counts


def cast_model(model: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """Cast the parameters and buffers of an FP32 model in place, and return the modules kept in FP32 by qualified name.

    These are not rounded. They get a subclass whose forward computes in FP32
    (`mptrain.precision.apply.float32_subclass`), except batch norm without autocast, whose kernels in torch take
    half-precision input with FP32 weights. Raises ConfigError if ``keep_fp32`` matches nothing, or keeps a parameter
    that other modules read in half precision.
    """
    kept = kept_modules(model, policy.keep_fp32)
    inside = {id(part) for module in kept.values() for part in module.modules()}
    within = {id(part) for module in kept.values() for part in module.modules() if part is not module}
    if policy.parameters != "float32":
        refuse_sharing(model, kept, inside)
    for module in model.modules():
        if id(module) not in inside:  # a cast to half precision and back would round modules kept in FP32
            module._apply(lambda tensor: cast_floating(tensor, DTYPES[policy.parameters]), recurse=False)
    for module in kept.values():
        module.float()
        if not (isinstance(module, _MIXED_KERNELS) and not policy.autocast):
            module.__class__ = float32_subclass(type(module))  # type: ignore[arg-type]
            cast("Any", module).answers_in = DTYPES["float32" if id(module) in within else policy.parameters]
    return kept


def autocast(policy: Policy, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager for the forward pass and the loss: `torch.autocast` or a null context, by the policy.

    The context can be entered repeatedly, but not nested. Within one entry, a weight that is used several times is cast
    once. A step captured in a CUDA graph enters and exits the context inside the graph, so it casts once too. Otherwise
    a graph would sum the gradients of the uses in FP32, and an eager step in half precision.
    """
    if policy.autocast:
        return torch.autocast(device.type, dtype=DTYPES[policy.compute])
    return contextlib.nullcontext()


def input_dtype(policy: Policy) -> torch.dtype:
    """Return the dtype to which floating-point model inputs are cast: that of the parameters under the policy."""
    return DTYPES[policy.parameters]


def set_matmul_precision(policy: Policy) -> None:
    """Set the precision of CUDA matrix products and convolutions for the whole process, as a policy specifies.

    FP32 products use TF32 only if ``policy.tf32`` is set; torch by default allows TF32 in cuDNN convolutions. Sums of
    half-precision products stay in FP32 (Micikevicius et al. 2018, section 3.3), whereas torch by default lets cuBLAS
    add partial sums in half precision. For half precision, torch's fused operator for Transformer layers is switched
    off, because it bypasses autocast and `mptrain.precision.upcast.Upcast`.

    torch has an older and a newer interface to TF32. Reading the older one, as torch's compiler does, raises an error
    if they disagree. So both are set, and the newer one last, because it takes precedence.
    """
    # torch evaluates Transformer layers with one fused operator, which bypasses autocast and `Upcast`.
    torch.backends.mha.set_fastpath_enabled(not policy.half)
    # Where no fused kernel fits, as on a CPU with a mask that is trained, attention would multiply in FP32.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(policy.half)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    products = "tf32" if policy.tf32 else "ieee"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some torch versions deprecate the older interface
        torch.backends.cuda.matmul.allow_tf32 = policy.tf32
        torch.backends.cudnn.allow_tf32 = policy.tf32
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = products  # type: ignore[attr-defined]
