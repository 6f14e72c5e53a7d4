"""Gives a model the dtypes that a policy asks for.

Parameters and buffers are cast once; modules that stay in FP32 cast what flows through them. The model itself does not
know: it was drawn in FP32 and is blind to precision.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from mptrain.errors import ConfigError, Problem, did_you_mean
from mptrain.numerics.rounding import limited
from mptrain.precision.policy import NORMS, Dtype, Policy
from mptrain.torch_private import BatchNorm, tree_map

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# torch's batch norm takes half-precision input with FP32 weights and statistics and returns half precision: no cast
# is needed, and activations stay half (they dominate the memory of a step).
_MIXED_KERNELS = BatchNorm


def kept_modules(model: nn.Module, keep_fp32: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that a ``keep_fp32`` list names, by their qualified names.

    An entry is ``norms``, the class name of a module or of one of its bases, a qualified module name, or a pattern of
    one. A class of torch.nn may match nothing (a default has to suit every model); anything else that matches nothing
    is a mistake.

    Raises:
        ConfigError: An entry matches no module; all such entries are reported together.
    """
    names = dict(model.named_modules())
    kept: dict[str, nn.Module] = {}
    problems = []
    for entry in keep_fp32:
        classes = set(NORMS) if entry == "norms" else {entry}
        found = {
            name: module
            for name, module in names.items()
            if classes & {base.__name__ for base in type(module).__mro__} or (name and fnmatch.fnmatchcase(name, entry))
        }
        if not found and entry != "norms" and not hasattr(nn, entry):
            known = {type(module).__name__ for module in names.values()} | set(names) | {"norms"}
            close = did_you_mean(entry, known)
            hint = f"did you mean {close}?" if close else "give a module's class name, its qualified name or a pattern"
            problems.append(Problem(f"precision.keep_fp32: {entry!r} matches no module of the model", hint))
        kept.update(found)
    if problems:
        raise ConfigError(problems)
    return kept


def count_beyond(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the finite values whose magnitude a floating-point dtype cannot hold; waits for the device."""
    return int(((value.abs() > torch.finfo(dtype).max) & value.isfinite()).sum())


def about_clamped(counts: dict[str, int], dtype: torch.dtype) -> str:
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
            if tensor is not None and tensor.is_floating_point() and (count := count_beyond(tensor, dtype)):
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
        _refuse_sharing(model, kept, inside)
    for module in model.modules():
        if id(module) not in inside:  # there and back again would round what is to stay FP32
            module._apply(lambda tensor: _cast(tensor, DTYPES[policy.parameters]), recurse=False)
    for module in kept.values():
        module.float()
        if not (isinstance(module, _MIXED_KERNELS) and not policy.autocast):
            module.__class__ = _in_float32(type(module))  # type: ignore[arg-type]
            cast("Any", module).answers_in = DTYPES["float32" if id(module) in within else policy.parameters]
    return kept


def _refuse_sharing(model: nn.Module, kept: dict[str, nn.Module], inside: set[int]) -> None:
    """Refuse to keep a parameter in FP32 that another module shares and reads in half precision."""
    places = {id(p): f"{name}.{own}" for name, module in kept.items() for own, p in module.named_parameters()}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and id(parameter) in places:
                raise ConfigError(
                    f"precision.keep_fp32 keeps {places[id(parameter)]}, which is {name}.{own} as well",
                    f"name both modules or neither: precision.keep_fp32 may list {name}",
                )


@functools.cache
def _in_float32(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward computes in FP32 and answers in the dtype it was given.

    Given nothing but whole numbers, such as the tokens of an embedding, it answers in the dtype that it would have if
    it had not been kept, ``answers_in``; casting the whole model casts that as well.

    A subclass, and not a wrapped method, so that copying the module keeps working.
    """
    if getattr(cls, "computes_in_float32", False):
        return cls

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        given = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), self.answers_in)
        device = next((tensor.device.type for tensor in tensors), "cpu")
        with torch.autocast(device, enabled=False):
            wide_args = tree_map(lambda x: _cast(x, torch.float32), args)
            wide_kwargs = tree_map(lambda x: _cast(x, torch.float32), kwargs)
            output = cls.forward(self, *wide_args, **wide_kwargs)
        return tree_map(lambda x: _cast(x, given), output)

    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        cls._apply(self, fn, *args, **kwargs)
        self.answers_in = fn(torch.empty(0, dtype=self.answers_in)).dtype
        return cast("nn.Module", self)

    own = {"forward": forward, "_apply": _apply, "computes_in_float32": True, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


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


def set_products(policy: Policy) -> None:
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
