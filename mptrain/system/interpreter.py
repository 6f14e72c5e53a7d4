"""Start of Python helper processes with this process's ``sys.path`` and without the current directory.

``python -c`` and ``python -m`` put the current directory before the standard library, so a `random.py` there would run
in every helper process. ``-P`` requires Python 3.11. ``-I`` also drops ``PYTHONPATH``, which users need for their own
modules. A prefix to the code of ``-c`` is too late, because Python 3.13 imports `linecache` before it. Helper processes
therefore run the script `mptrain/system/interpreter_entry.py`, which sets ``sys.path`` before it imports anything.

The current directory is not searched last either: a library could find a missing module (`msvcrt`, an optional package)
there. Users can add it to ``PYTHONPATH``. This module imports only modules that every interpreter loads at startup, so
not even `__future__`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120

#: The folder that holds the package mptrain.
_ROOT = os.path.dirname(os.path.dirname(_HERE))  # noqa: PTH120

#: The entry script of every helper process.
_ENTRY = os.path.join(_HERE, "interpreter_entry.py")  # noqa: PTH118


def forget_current_folder() -> None:
    """Remove the current directory from this process's module search path; ``python -m`` puts it first in ``sys.path``.

    The directory stays if mptrain itself is run from a checkout there, because its modules must not be mixed with those
    of an installation. From Python 3.11 on, processes that libraries start (``torch.compile``) do not search it either.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    chosen = not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated)  # Python has added the first entry
    if chosen and sys.path[0] in ("", _current_folder()) and sys.path[0] != _ROOT:
        del sys.path[0]


def command(*words: str) -> list[str]:
    """Return the command line, for `subprocess`, of a Python helper process with this process's ``sys.path``.

    The words are arguments of Python: ``-c CODE`` or ``-m MODULE`` with arguments, which interpreter options may
    precede. Without either, append them to the returned command.
    """
    position = next((number for number, word in enumerate(words) if word in ("-c", "-m")), len(words))
    return [sys.executable, *words[:position], _ENTRY, repr(_search_path()), *words[position:]]


def guard_multiprocessing() -> None:
    """Patch `multiprocessing` so that its processes do not search the current directory for modules.

    This covers its fork server, its resource tracker and spawned processes. All of them are started by one
    private function; there is no public hook. Helper processes call this function too, for processes that
    they start themselves.
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
    """Return ``sys.path`` of this process without the empty entry of ``python -c``, the current directory."""
    return [folder for folder in sys.path if isinstance(folder, str) and folder]


def _current_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # the directory was removed
        return ""
