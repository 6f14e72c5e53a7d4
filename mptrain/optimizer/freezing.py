"""Frozen parameters, which no optimizer updates, and BatchNorm with frozen statistics."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from mptrain.optimizer.parameter_groups import matches, require_matches
from mptrain.system.torch_private import BatchNorm


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of a model whose names match a pattern such as ``layer1.*``, in place.

    They require no gradient. A BatchNorm whose running mean matches stays in evaluation mode: it normalises with its
    running statistics and does not change them, so that the frozen part of a network remains the function that it was.
    Its copies do the same. Raises ConfigError if a pattern matches neither a parameter nor a buffer.
    """
    if not patterns:
        return
    names = [name for name, _ in model.named_parameters()]
    require_matches("model.freeze", patterns, [*names, *(name for name, _ in model.named_buffers())])
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm) and matches(f"{path}.running_mean".lstrip("."), patterns):
            module.__class__ = _evaluating_subclass(type(module))  # type: ignore[arg-type]
            module.train(False)


@functools.cache
def _evaluating_subclass(cls: type[nn.Module]) -> Any:
    def train(self: Any, mode: bool = True) -> Any:
        return cls.train(self, False)

    return type(cls.__name__, (cls,), {"train": train, "__module__": cls.__module__})
