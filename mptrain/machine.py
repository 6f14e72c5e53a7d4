"""Cores, memory and relations of this process, on Linux and on systems without ``/proc``, such as macOS.

Only the standard library is used: psutil would be one more dependency for the present memory of a process on macOS, which
is shown beside a run and decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
#: The network interface that a machine reaches itself by.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1: fewer than there are where an affinity was set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return getattr(os, "process_cpu_count", os.cpu_count)() or 1  # the first is Python 3.13's


def resident_memory() -> int:
    """Return the bytes of this process in memory now; without ``/proc`` the most that they have been."""
    try:
        pages = int((_PROC / "self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return _largest_ever()
    return pages * resource.getpagesize()


def resident_peak() -> int:
    """Return the most bytes of this process in memory since `forget_peak`, or since it began where that does nothing."""
    try:
        status = (_PROC / "self/status").read_text(encoding="utf-8")
    except OSError:
        return _largest_ever()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else _largest_ever()


def forget_peak() -> None:
    """Begin `resident_peak` anew; nothing happens without ``/proc``, on an old kernel, or in a sandbox."""
    with contextlib.suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5", encoding="ascii")


@contextlib.contextmanager
def dropping_nothing() -> Iterator[None]:
    """Look for no garbage while many objects are made and none is dropped, nor among them ever after.

    So it is while modules are imported, 0.2 s of torch's 1.7, and while long records are read into memory. What is not looked
    at again costs nothing either when a command later makes many objects of its own.
    """
    was_looking = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_looking:
            gc.enable()


def _largest_ever() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_running(pid: int) -> bool:
    """Return whether a process runs; without ``/proc`` one that has ended and was not waited for counts as running."""
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
        pass  # it is somebody else's
    return True


def ends_with_parent(number: signal.Signals) -> None:
    """Have this process sent a signal when its parent ends: by the kernel on Linux, elsewhere by a thread that looks every second."""
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
    """Return where the folder of an open descriptor is now; None where the system does not say."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    with contextlib.suppress(OSError):
        return Path(os.readlink(_PROC / f"self/fd/{descriptor}"))  # noqa: PTH115
    return None
