"""What is put into a forked process before it runs: counters at the places where faults strike, and the faults themselves.

Nothing of the package is replaced: functions are wrapped, and files, clock and signals are made to misbehave around it.
"""

from __future__ import annotations

import datetime as clock
import errno
import os
import sys
import time
from functools import wraps

_FILE_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"})


class Hooks:
    """Calls ``strike`` once, at call number ``call`` of a place.

    Args:
        trace: Is told of every step and every call.
        place: Of `trace.PLACES`; None strikes nowhere.
        call: From 1.
        strike: The fault.
        operation: Strikes so many changes of files after that call instead.
    """

    def __init__(self, trace, place=None, call=0, strike=None, operation=0):
        self._trace, self._place, self._call, self._strike, self._operation = trace, place, call, strike, operation
        self._owner = os.getpid()
        self._after = None

    def install(self):
        from mptrain.cli import train
        from mptrain.engine import loop, validation
        from mptrain.run import attempt, resume
        from mptrain.runlog.checkpoints import CheckpointStore
        from mptrain.runlog.directory import RunDirectory

        for holder, name in (
            (resume, "build"), (resume, "create_run"), (resume, "existing_run"), (attempt, "truncate_records"),
            (attempt, "describe"), (attempt, "RecordWriter"), (attempt, "Loop"), (loop, "rehearse_run"), (train, "displays"),
        ):  # fmt: skip
            self._wrap(holder, name, "start")
        for holder, name in (
            (attempt, "write_summary"), (attempt, "_close"), (RunDirectory, "write_state"), (train, "print_closing"),
        ):  # fmt: skip
            self._wrap(holder, name, "end")
        self._wrap(CheckpointStore, "save", "saving")
        self._wrap_steps(loop.Loop)
        self._wrap_evaluation(validation)
        self._watch_files()

    def reach(self, place):
        """A place was passed."""
        if os.getpid() != self._owner:  # a worker that loads data, or another rank
            return
        count = self._trace.pass_by(place)
        if place == "operation" and self._after is not None:
            self._after -= 1
            if self._after <= 0:
                self._after = None
                self._now()
        if place == self._place and count == self._call:
            if self._operation:
                self._after = self._operation
            else:
                self._now()

    def _now(self):
        self._trace.strike()
        self._strike()

    def _wrap(self, holder, name, place):
        inner = getattr(holder, name)

        @wraps(inner, updated=())
        def outer(*arguments, **named):
            self.reach(place)
            return inner(*arguments, **named)

        setattr(holder, name, outer)

    def _wrap_steps(self, loop):
        inner = loop.attempt

        def outer(one, batch):
            self.reach("step")
            inner(one, batch)
            if os.getpid() == self._owner:
                self._trace.note_step(one.progress.step)

        loop.attempt = outer

    def _wrap_evaluation(self, module):
        inner = module.evaluate

        def outer(*arguments, stop, **named):
            def stop_here():
                self.reach("evaluation")
                return stop()

            return inner(*arguments, stop=stop_here, **named)

        module.evaluate = outer

    def _watch_files(self):
        here = os.path.realpath(os.getcwd()) + os.sep  # noqa: PTH109

        def note(event, arguments):
            if event in _FILE_EVENTS and _is_change(event, arguments) and _is_below(arguments[0], here):
                self.reach("operation")

        sys.addaudithook(note)
        for name in ("write", "fsync"):
            self._wrap_call(name)

    def _wrap_call(self, name):
        inner = getattr(os, name)

        def outer(*arguments):
            self.reach("operation")
            return inner(*arguments)

        setattr(os, name, outer)


def _is_change(event, arguments):
    return event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_below(place, here):
    if isinstance(place, int):
        return True
    return os.path.realpath(os.fsdecode(place)).startswith(here)


def fill_the_disk():
    """From now on whatever writes finds the disk full: half of what is left of the first call is taken, then nothing."""
    from mptrain.runlog.checkpoint_data import HashedFile

    inner, left = os.write, [1]

    def write(descriptor, data):
        if descriptor in (1, 2):
            return inner(descriptor, data)
        if left[0] and len(data) > 1:
            left[0] -= 1
            return inner(descriptor, memoryview(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_piece(self, piece):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.write, HashedFile._write = write, write_piece


def shift_clock(hours):
    """From now on the clock of the day is wrong; those that measure time are not, as the system promises."""
    from mptrain.engine import telemetry
    from mptrain.runlog import run_paths, run_state

    shift, now = clock.timedelta(hours=hours), time.time

    class Shifted(clock.datetime):
        @classmethod
        def now(cls, tz=None):
            return clock.datetime.now(tz) + shift

    time.time = lambda: now() + shift.total_seconds()
    for module in (telemetry, run_paths, run_state):
        module.datetime = Shifted
