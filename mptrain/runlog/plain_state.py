"""Checks that a state consists of plain values, so that ``torch.load(weights_only=True)`` will take it back.

The check runs at save time, where the mistake is made, and not when a run is to be resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAVES = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def check_plain(value: Any, where: str = "state") -> list[Tensor]:
    """All tensors in a state of plain values, in their order.

    Types are compared exactly: a ``numpy.float64`` is a float to isinstance and is refused by a safe load.

    Args:
        value: dict (also OrderedDict), list, tuple, str, int, float, bool, None, Tensor, Parameter.
        where: The path of the value, for the message.

    Returns:
        The tensors; one that is there twice is listed twice.

    Raises:
        TypeError: Anything else is in it, or a key is neither str nor int; the message says where.
    """
    kind = type(value)
    if kind in _LEAVES:
        return []
    if kind in _TENSORS:
        return [value]
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _KEYS:
                raise TypeError(f"{where} has a key of type {_name(type(key))}; only str and int can be saved")
        return [tensor for key, item in value.items() for tensor in check_plain(item, f"{where}[{key!r}]")]
    if kind is list or kind is tuple:
        return [tensor for index, item in enumerate(value) for tensor in check_plain(item, f"{where}[{index}]")]
    raise TypeError(f"{where} is a {_name(kind)}; only plain containers, numbers, text, None and tensors can be saved")


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
