"""Modules that the option ``precision.keep_fp32`` keeps in FP32: their selection, and casts of inputs and outputs."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from mptrain.precision.policy import NORMS
from mptrain.system.errors import ConfigError, Problem, did_you_mean
from mptrain.system.torch_private import tree_map


def kept_modules(model: nn.Module, keep_fp32: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules of a model that match a ``precision.keep_fp32`` list, by qualified name.

    An entry is ``norms`` (every normalisation layer of torch), the class name of a module or of one of its base
    classes, a qualified module name, or a pattern of qualified names such as ``layer4.*``. ``norms`` and names of
    torch.nn classes may match nothing, because a default must suit every model. A container without a forward pass,
    such as `nn.ModuleList`, stands for the modules in it. Raises ConfigError with all other entries that match no
    module, or one of TorchScript.
    """
    names = dict(model.named_modules())
    kept: dict[str, nn.Module] = {}
    problems = []
    for entry in keep_fp32:
        classes = set(NORMS) if entry == "norms" else {entry}
        matching = {
            name: module
            for name, module in names.items()
            if classes & {base.__name__ for base in type(module).__mro__} or (name and fnmatch.fnmatchcase(name, entry))
        }
        if not matching and entry != "norms" and not hasattr(nn, entry):
            known = {type(module).__name__ for module in names.values()} | set(names) | {"norms"}
            close = did_you_mean(entry, known)
            hint = f"did you mean {close}?" if close else "use a module's class name, its qualified name or a pattern"
            problems.append(Problem(f"precision.keep_fp32: {entry!r} matches no module of the model", hint))
        if scripted := [name for name, module in matching.items() if isinstance(module, torch.jit.ScriptModule)]:
            what = f"precision.keep_fp32: {entry!r} keeps {scripted[0] or 'the model'}, which is TorchScript"
            hint = "its forward pass cannot be changed; keep a module around it, or build the model without torch.jit"
            problems.append(Problem(what, hint))
            continue
        for name, module in matching.items():
            kept.update(_called(name, module))
    if problems:
        raise ConfigError(problems)
    return kept


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    inside = (_called(f"{name}.{own}" if name else own, child) for own, child in module.named_children())
    return {name: child for children in inside for name, child in children.items()}


def refuse_sharing(model: nn.Module, kept: dict[str, nn.Module], inside: set[int]) -> None:
    """Raise ConfigError if a kept parameter is shared with a module that reads it in half precision.

    ``inside`` has the Python ids (`id`) of the kept modules and all their submodules.
    """
    kept_names = {id(p): f"{name}.{own}" for name, module in kept.items() for own, p in module.named_parameters()}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and id(parameter) in kept_names:
                raise ConfigError(
                    f"precision.keep_fp32 keeps {kept_names[id(parameter)]}, which is shared with {name}.{own}",
                    f"list both modules or neither: add {name} to precision.keep_fp32",
                )


@functools.cache
def float32_subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module class whose forward computes in FP32 and returns the dtype of its input.

    Forward casts floating-point arguments to float32, runs without autocast, and casts outputs to the dtype of the
    first floating-point argument. With integer input only, such as the tokens of an embedding, the output has the dtype
    of the module's attribute ``answers_in``, which the caller sets: the dtype that the module would have if it were not
    kept in FP32. Casting the whole model casts ``answers_in`` too. Unlike a wrapped method it can be copied.
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
    """Cast a floating-point tensor to another dtype; return any other value unchanged."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
