"""Trackers as a user may write them: one that works, and others that fail in every way there is."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

from mptrain.system.fields import PositiveFloat, PositiveInt

Way = Literal["never", "raises", "blocks", "dies", "exits"]


@dataclass(frozen=True)
class Own:
    """Writes every record into RUN/own.jsonl; fails in a way, at a place: opening, the n-th record, closing."""

    way: Way = "never"
    place: Literal["open", "take", "close"] = "take"
    record: PositiveInt = 3
    close_seconds: PositiveFloat = 5.0

    def require(self):
        pass

    def open(self, run):
        if self.place == "open":
            fail(self.way)
        return Tracker(self, run)


@dataclass(frozen=True)
class Short:
    """Has only what a tracker must have: nothing says how long the end of a run may wait for it."""

    way: Way = "never"
    place: Literal["open", "take", "close"] = "take"
    record: PositiveInt = 3

    def require(self):
        pass

    def open(self, run):
        return Tracker(self, run)


class Tracker:
    def __init__(self, options, run):
        self.options, self.run, self.taken = options, run, 0
        self.file = open(run.folder / "own.jsonl", "a")  # noqa: SIM115, PTH123
        print("I say", repr(sys.stdin.read()), "to standard input", flush=True)

    def take(self, record):
        self.taken += 1
        if self.options.place == "take" and self.taken == self.options.record:
            fail(self.options.way)
        self.file.write(json.dumps({"record": type(record).__name__, **asdict(record)}) + "\n")
        self.file.flush()

    def close(self):
        if self.options.place == "close":
            fail(self.options.way)
        self.file.write('{"record": "closed"}\n')
        self.file.close()


def fail(way):
    if way == "raises":
        raise ConnectionError("the server is on fire.")
    if way == "blocks":
        time.sleep(600)
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exits":
        os._exit(0)


def not_a_logger(text: str = "x") -> str:
    return text
