"""The other end of `mptrain.logger.background`: the process in which a tracker lives.

It ends with the run: when it is told, or when the pipe closes because training was killed.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import traceback
from typing import TYPE_CHECKING, BinaryIO

from mptrain.masking import MaskedText

if TYPE_CHECKING:
    from mptrain.logger.base import Logger
    from mptrain.records import Record

#: A batch system sends these to every process of a job; training decides when it is the end.
_NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    """Open the tracker that the pipe names, hand it every record, close it; exit code 1 if it raises."""
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, MaskedText(opened, encoding="utf-8", errors="backslashreplace", line_buffering=True))
    stream = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what reads the standard input must not read records
    try:
        _follow(stream)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # exit hooks of trackers wait for networks


def _follow(stream: BinaryIO) -> None:
    logger: Logger
    logger, run = pickle.load(stream)
    tracker = logger.open(run)
    while (records := _next(stream)) is not None:
        for record in records:
            tracker.take(record)
    signal.alarm(math.ceil(logger.close_seconds) + 60)  # for when nobody is left to end this process
    tracker.close()


def _next(stream: BinaryIO) -> list[Record] | None:
    try:
        records: list[Record] | None = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):  # training was killed, perhaps in the middle of a write
        return None
    return records
