"""Checks that a state consists of plain values, so that ``torch.load(weights_only=True)`` will take it back.

The check runs at save time, where the mistake is made, and not when a run is to be resumed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

_LEAVES = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str, int})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def check_plain(value: Any, where: str = "state") -> int:
    """The bytes of all tensors in a state of plain values.

    Types are compared exactly: a ``numpy.float64`` is a float to isinstance and is refused by a safe load.

    Args:
        value: dict (also OrderedDict), list, tuple, str, int, float, bool, None, Tensor, Parameter.
        where: The path of the value, for the message.

    Returns:
        Bytes of the elements of all tensors; a lower bound of the file's size.

    Raises:
        TypeError: Anything else is in it, or a key is neither str nor int; the message says where.
    """
    kind = type(value)
    if kind in _LEAVES:
        return 0
    if kind in _TENSORS:
        return int(value.nbytes)
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _KEYS:
                raise TypeError(f"{where} has a key of type {_name(type(key))}; only str and int can be saved")
        return sum(check_plain(item, f"{where}[{key!r}]") for key, item in value.items())
    if kind is list or kind is tuple:
        return sum(check_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    raise TypeError(f"{where} is a {_name(kind)}; only plain containers, numbers, text, None and tensors can be saved")


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
