"""Gives a model the dtypes that a policy asks for.

Parameters and buffers are cast once; modules that stay in FP32 cast what flows through them. The model itself does not
know: it was drawn in FP32 and is blind to precision.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from mptrain.numerics.rounding import limited
from mptrain.precision.keep_fp32 import cast_floating, float32_subclass, kept_modules, refuse_sharing
from mptrain.precision.policy import Dtype, Policy
from mptrain.torch_private import BatchNorm

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# torch's batch norm takes half-precision input with FP32 weights and statistics and returns half precision: no cast
# is needed, and activations stay half (they dominate the memory of a step).
_MIXED_KERNELS = BatchNorm


def count_out_of_range(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the finite values whose magnitude a floating-point dtype cannot hold; waits for the device."""
    return int(((value.abs() > torch.finfo(dtype).max) & value.isfinite()).sum())


def describe_clamped(counts: dict[str, int], dtype: torch.dtype) -> str:
    """One sentence about values that were clamped to the range of a dtype; counts of them by the tensor's name."""
    named = ", ".join(f"{name} ({count:,})" for name, count in list(counts.items())[:3])
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    number, form = sum(counts.values()), str(dtype).removeprefix("torch.")
    return (
        f"{number:,} value{'s' if number != 1 else ''} in weights and buffers {'are' if number != 1 else 'is'} beyond "
        f"{torch.finfo(dtype).max:.6g}, the largest of {form}, and clamped to it: {named}{more}"
    )


def clamp_to_range(model: nn.Module, policy: Policy) -> dict[str, int]:
    """Clamp in place what the parameters' dtype of a policy would make infinite, before `cast_model`.

    So master weights, which are copies from before the cast, begin with the values that the network computes with.
    Infinities, as masks hold them, stay.

    Args:
        model: Built in FP32.
        policy: The mode; modules that it keeps in FP32 are left alone.

    Returns:
        The number of values clamped, by the tensor's qualified name.

    Raises:
        ConfigError: ``keep_fp32`` matches nothing.
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
    """Cast a model in place as a policy asks.

    Args:
        model: Built in FP32, on its device.
        policy: The mode.

    Returns:
        The modules kept in FP32, by qualified name.

    Raises:
        ConfigError: ``keep_fp32`` matches nothing, or keeps a parameter that other modules read in half precision.
    """
    kept = kept_modules(model, policy.keep_fp32)
    inside = {id(part) for module in kept.values() for part in module.modules()}
    within = {id(part) for module in kept.values() for part in module.modules() if part is not module}
    if policy.parameters != "float32":
        refuse_sharing(model, kept, inside)
    for module in model.modules():
        if id(module) not in inside:  # there and back again would round what is to stay FP32
            module._apply(lambda tensor: cast_floating(tensor, DTYPES[policy.parameters]), recurse=False)
    for module in kept.values():
        module.float()
        if not (isinstance(module, _MIXED_KERNELS) and not policy.autocast):
            module.__class__ = float32_subclass(type(module))  # type: ignore[arg-type]
            cast("Any", module).answers_in = DTYPES["float32" if id(module) in within else policy.parameters]
    return kept


def autocast(policy: Policy, device: torch.device) -> AbstractContextManager[Any]:
    """The region in which a forward pass and its loss run: autocast where the policy asks for it, else nothing.

    It can be entered again and again, though not within itself. A weight that is used several times is cast once in a region,
    also in a captured step, since regions begin and end within it: otherwise a graph would add up the gradients of its
    uses in FP32, and an eager step in half precision.
    """
    if policy.autocast:
        return torch.autocast(device.type, dtype=DTYPES[policy.compute])
    return contextlib.nullcontext()


def input_dtype(policy: Policy) -> torch.dtype:
    """The dtype that a model's floating-point inputs are cast to: that of its parameters."""
    return DTYPES[policy.parameters]


def set_matmul_precision(policy: Policy) -> None:
    """Say how CUDA's matrix products may take liberties, for the whole process.

    ``fp32`` means FP32: torch's own default lets cuDNN convolutions use TF32. And sums of half-precision products stay
    in FP32 (Micikevicius et al. 2018, section 3.3): torch's own default lets cuBLAS add up partial sums in half.

    torch has an older and a newer interface to TF32, which it compares when the older is read, as its compiler does:
    where they disagree, reading raises. So both are set, and the newer, which has the last word, second.
    """
    # torch evaluates Transformer layers by one operator that no autocast and no widening reaches into.
    torch.backends.mha.set_fastpath_enabled(not policy.half)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    products = "tf32" if policy.tf32 else "ieee"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call the older interface deprecated
        torch.backends.cuda.matmul.allow_tf32 = policy.tf32
        torch.backends.cudnn.allow_tf32 = policy.tf32
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = products  # type: ignore[attr-defined]
