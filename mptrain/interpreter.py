"""Starts Python interpreters that find modules where this process does, and never in the current folder.

``python -c`` and ``python -m`` put the current folder before the standard library, so a `random.py` that lies there by chance, or was put
there, would run in every helper process. ``-P`` exists from Python 3.11 on; ``-I`` also drops ``PYTHONPATH``, which users need for modules
of their own; and Python 3.13 imports `linecache` before the first word of ``-c``, so a prefix to the code comes too late. A script
is given by its path instead: `mptrain/interpreter_entry.py` sets ``sys.path`` to that of this process before it imports anything.

The current folder is not searched last either: what a library looks for and this machine lacks (`msvcrt`, an optional package) would be
found there. ``PYTHONPATH`` can name it. Imports only modules that every interpreter has loaded when it starts, so not even `__future__`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The entry script of every helper process.
_ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "interpreter_entry.py")  # noqa: PTH100, PTH118, PTH120


def forget_current_folder() -> None:
    """Keep this process from searching the current folder, which ``python -m`` has put first.

    A checkout from which mptrain itself is run stays where it is: its modules must not be mixed with those of an installation.
    """
    chosen = not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated)  # the first folder, by Python itself
    if chosen and sys.path[0] in ("", _current_folder()) and sys.path[0] != os.path.dirname(os.path.dirname(_ENTRY)):  # noqa: PTH120
        del sys.path[0]


def command(*words: str) -> list[str]:
    """Return the command that runs Python with these words, ``-c CODE`` or ``-m MODULE`` and what follows, as a helper.

    Args:
        words: Options of the interpreter may stand before ``-c`` or ``-m``. Without either, the command awaits them.
    """
    place = next((number for number, word in enumerate(words) if word in ("-c", "-m")), len(words))
    return [sys.executable, *words[:place], _ENTRY, repr(_search_path()), *words[place:]]


def guard_multiprocessing() -> None:
    """Let `multiprocessing` start its fork server, its resource tracker and its fresh processes by `command`.

    It has one function that starts all of them, and no public way to say how. A helper calls this too, for what it starts itself.
    """
    from importlib import import_module

    util: Any = import_module("multiprocessing.util")
    original = util.spawnv_passfds
    if getattr(original, "guarded", False):
        return

    def spawnv_passfds(path: str, words: list[str], descriptors: list[int]) -> int:
        safe = [path, *command(*map(os.fsdecode, words[1:]))[1:]]
        started: int = original(path, [os.fsencode(word) for word in safe], descriptors)
        return started

    spawnv_passfds.guarded = True  # type: ignore[attr-defined]
    util.spawnv_passfds = spawnv_passfds


def _search_path() -> list[str]:
    """Return ``sys.path`` of this process without the nameless current folder of ``python -c``."""
    return [folder for folder in sys.path if isinstance(folder, str) and folder]


def _current_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return ""
