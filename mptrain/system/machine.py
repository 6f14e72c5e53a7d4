"""This machine and what is installed: cores, memory and parent of the process, and optional libraries.

Memory is read on Linux and on systems without ``/proc``, such as macOS, by the standard library alone. psutil would be
a dependency only for the current memory of a process on macOS, which is shown but not used otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mptrain.system.errors import EnvironmentRefused

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
#: Name of the loopback network interface.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_has_frozen = False  # by dropping_nothing


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1, according to its CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return getattr(os, "process_cpu_count", os.cpu_count)() or 1  # process_cpu_count: Python 3.13


def resident_memory() -> int:
    """Return the resident memory (RSS) of this process in bytes; without ``/proc``, its peak."""
    try:
        pages = int((_PROC / "self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return _largest_ever()
    return pages * resource.getpagesize()


def resident_peak() -> int:
    """Return the peak resident memory of this process in bytes since `forget_peak`, or since its start.

    The latter applies if `forget_peak` has no effect on this system.
    """
    try:
        status = (_PROC / "self/status").read_text(encoding="utf-8")
    except OSError:
        return _largest_ever()
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else _largest_ever()


def forget_peak() -> None:
    """Reset the peak of `resident_peak`; without effect without ``/proc``, on an old kernel or in a sandbox."""
    with contextlib.suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")


@contextlib.contextmanager
def dropping_nothing() -> Iterator[None]:
    """Disable Python's garbage collector in a context that creates many objects and drops none; then freeze them.

    Used for imports, where it saves 0.2 s of torch's 1.7 s, and for reading long records. Later collections do not scan
    frozen objects (`gc.freeze`) either. So if it froze objects before, garbage in cycles, such as that of an earlier
    run in the process, is collected on entry.
    """
    global _has_frozen
    if _has_frozen:  # gc.get_freeze_count() would count all of them, which takes 50 ms in a large process
        gc.collect()
    was_looking = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        _has_frozen = True
    finally:
        if was_looking:
            gc.enable()


def _largest_ever() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) returns bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie counts as ended, except on systems without ``/proc``."""
    if _PROC.is_dir():
        try:
            return (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process of another user
    return True


def ends_with_parent(number: signal.Signals) -> None:
    """Arrange that this process receives a signal when its parent process exits.

    The kernel sends it on Linux, a polling thread elsewhere.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "prctl"):
        library.prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_end_after, args=(os.getppid(), number), daemon=True).start()


def _end_after(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), number)


def path_of_descriptor(descriptor: int) -> Path | None:
    """Return the current path of a directory that is open, also after it was moved; None if the system cannot tell."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    with contextlib.suppress(OSError):
        return Path(os.readlink(_PROC / f"self/fd/{descriptor}"))  # noqa: PTH115
    return None


def load_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional library, and return it; raise EnvironmentRefused if that is impossible.

    ``extra`` is the extra of mptrain that installs it, as in ``pip install 'mptrain[detection]'``; empty for one that
    is installed by its own name. ``purpose`` is the feature that needs it, as the beginning of a sentence:
    ``task=detect``.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"the package {package}, which is not installed"
        if error.name is None or error.name.partition(".")[0] != package:
            what = f"{package}, which needs {error.name}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra, package)) from error
    except (ImportError, OSError) as error:  # e.g. an incompatible C library
        what = f"{package}, which cannot be imported: {error}"
        raise EnvironmentRefused(f"{purpose} needs {what}", _command(extra, package)) from error


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Raise EnvironmentRefused if an optional top-level package is not installed, without importing it.

    ``extra`` and ``purpose`` are as for `load_extra`.
    """
    if importlib.util.find_spec(module) is None:
        raise EnvironmentRefused(f"{purpose} needs the package {module}, which is not installed", _command(extra))


def _command(extra: str, package: str = "") -> str:
    return f"pip install 'mptrain[{extra}]'" if extra else f"pip install {package}"
