"""Detection of stalled runs, with the stacks of all their threads written to a file.

A lost network drive, a lock, or a device or process that does not answer raises no exception. A background thread
checks periodically for progress. It works as long as the hanging call has released Python's global interpreter lock,
which waiting for files, devices and other processes does.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType

from mptrain.runlog.atomic_files import storage_errors
from mptrain.system.errors import StorageError
from mptrain.system.files import open_in_place

#: Number of checks within the time after which a run counts as stalled.
LOOKS = 10


class Watchdog:
    """Context manager with a thread that writes all thread stacks to a file after ``seconds`` without a heartbeat."""

    def __init__(self, path: Path, seconds: float | None) -> None:
        self.stalls = 0
        self._path = path
        self._seconds = seconds
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def heartbeat(self) -> None:
        """Tell the watchdog that the run makes progress."""
        self._beats += 1

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._seconds is not None
        pause = self._seconds / LOOKS
        seen, still = -1, 0
        looked = time.monotonic()
        while not self._ended.wait(pause):
            late = time.monotonic() - looked > 2 * pause  # the whole process was suspended, which is no stall
            looked = time.monotonic()
            still = 0 if late or self._beats != seen else still + 1
            seen = self._beats
            if still == LOOKS:
                self.stalls += 1
                self._tell()

    def _tell(self) -> None:
        told = f"no progress for {self._seconds:g} s"
        try:
            with storage_errors(self._path):
                descriptor = open_in_place(self._path, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                print(f"{datetime.now().astimezone().isoformat(timespec='seconds')}: {told}", file=file, flush=True)
                faulthandler.dump_traceback(file)
            where = f"the stacks of all threads are in {self._path}"
        except (OSError, StorageError) as error:
            where = str(error)
        print(f"warning: {told}; {where}", file=sys.stderr, flush=True)
