"""Modules that ``precision.keep_fp32`` keeps in FP32: matches its patterns against a model, and casts what flows through such a module."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from mptrain.errors import ConfigError, Problem, did_you_mean
from mptrain.precision.policy import NORMS
from mptrain.torch_private import tree_map


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


def refuse_sharing(model: nn.Module, kept: dict[str, nn.Module], inside: set[int]) -> None:
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
def float32_subclass(cls: type[nn.Module]) -> type[nn.Module]:
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
            wide_args = tree_map(lambda x: cast_floating(x, torch.float32), args)
            wide_kwargs = tree_map(lambda x: cast_floating(x, torch.float32), kwargs)
            output = cls.forward(self, *wide_args, **wide_kwargs)
        return tree_map(lambda x: cast_floating(x, given), output)

    def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        cls._apply(self, fn, *args, **kwargs)
        self.answers_in = fn(torch.empty(0, dtype=self.answers_in)).dtype
        return cast("nn.Module", self)

    own = {"forward": forward, "_apply": _apply, "computes_in_float32": True, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in another dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
