"""Trackers as a user may write them: one that works, and others that fail in every way there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
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


@dataclass(frozen=True)
class Loud(Own):
    """Prints without end, in a way: with Python, past Python's streams, in a process of its own, beside the records."""

    way: Literal["print", "write", "child", "thread", "orphan"] = "print"

    def open(self, run):
        return LoudTracker(Own(), run, self.way)


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


class LoudTracker(Tracker):
    def __init__(self, options, run, way):
        super().__init__(options, run)
        self.beside = threading.Thread(target=lambda: [os.write(1, b"z" * 9999) for _ in range(2000)], daemon=True)
        shout = {
            "print": lambda: print("x" * 9999),
            "write": lambda: os.write(2, b"y" * 99_999),
            "child": lambda: subprocess.run(["sh", "-c", "yes | head -c 20000000"], check=False),
            "thread": self.beside.start,
            "orphan": lambda: subprocess.Popen(["sh", "-c", "trap '' HUP; timeout 20 yes"], start_new_session=True),
        }[way]
        for _ in range({"print": 2000, "write": 300}.get(way, 1)):
            shout()

    def close(self):
        if self.beside.ident is not None:  # else the records may all be taken before it has printed beyond the bound
            self.beside.join()
        super().close()
