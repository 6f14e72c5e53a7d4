"""States of plain values: what is saved is checked, so that it can be read back; what is read can be anybody's.

The check runs at save time, where the mistake is made, and not when a run is to be resumed.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mptrain.errors import out_of_memory
from mptrain.files import open_to_read

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


class NotPlain(Exception):
    """A file holds something else than tensors and plain values, or is damaged; the message is short and says why."""


def load_plain(path: Path) -> Any:
    """What ``torch.save`` has written, on the CPU, if it is tensors and plain values: nothing in the file is called.

    Raises:
        OSError: The file cannot be read.
        NotPlain: It holds anything else, or is damaged.
    """
    with open_to_read(path):  # what is raised below is about what is in it
        pass
    try:
        if _is_tar(path):  # which torch would unpack into a folder before it refuses it
            raise NotPlain("it is a tar archive, as early versions of torch wrote them, or nothing but zeros")
        with brief_refusals(), warnings.catch_warnings():  # of protocols that torch may not read: it says so, or does
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except NotPlain:
        raise
    except Exception as error:  # torch documents no set of errors for a file that it cannot read
        if refused := out_of_memory(error, f"reading {path}"):  # which says nothing about the file
            raise refused from error
        raise NotPlain(why_refused(error)) from error


def why_refused(error: BaseException) -> str:
    """What torch says about a file that it cannot read, in one line."""
    said = error.__context__ if isinstance(error.__context__, _Brief) else error  # torch wraps it in advice
    lines = str(said)[:_LONGEST].splitlines()
    return lines[0] if lines else type(said).__name__


def _is_tar(path: Path) -> bool:
    with open_to_read(path) as file:
        try:
            tarfile.open(fileobj=file, mode="r:").close()  # as torch does; other modes would unpack what is compressed
        except tarfile.TarError:
            return False
    return True


#: Characters of a sentence about a file.
_LONGEST = 200


class _Brief(pickle.UnpicklingError):
    def __init__(self, message: str = "") -> None:
        super().__init__(str(message)[:_LONGEST])


@contextlib.contextmanager
def brief_refusals() -> Iterator[None]:
    """Cut what torch's unpickler says about a file.

    `torch.load` looks into that sentence by patterns whose time grows with the square of the longest word. The words are
    the file's: one of 80,000 characters took it two minutes to refuse.
    """
    # Both names are private: where torch has others, its sentences stay as long as they are.
    module = sys.modules.get("torch._weights_only_unpickler")
    before = getattr(module, "UnpicklingError", None)
    if module is None or before is None:
        yield
        return
    module.UnpicklingError = _Brief  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.UnpicklingError = before  # type: ignore[attr-defined]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
