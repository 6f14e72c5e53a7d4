"""What a process tells of itself while it trains, in memory that outlives it: which step it has done, and when."""

from __future__ import annotations

import mmap
import time

LONGEST_RUN = 1000  # steps
PLACES = ("start", "step", "evaluation", "saving", "operation", "end")

_FIRST, _LAST, _STRUCK, _COUNTS = 0, 1, 2, 3
_TIMES = _COUNTS + len(PLACES)


class Trace:
    """Numbers shared by a process and those that it forks."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 8 * (_TIMES + LONGEST_RUN + 1))
        self._slots = memoryview(self._memory).cast("d")

    def note_step(self, step):
        """A step was attempted by the first rank, and is to be on record."""
        if not self._slots[_FIRST]:
            self._slots[_FIRST] = step
        self._slots[_LAST] = max(step, self._slots[_LAST])
        self._slots[_TIMES + step] = time.monotonic()

    def strike(self):
        """The fault happens now."""
        self._slots[_STRUCK] = time.monotonic()

    def pass_by(self, place):
        """Count a call of this place; returns how many there were."""
        index = _COUNTS + PLACES.index(place)
        self._slots[index] += 1
        return int(self._slots[index])

    @property
    def first(self):
        """The first step of this attempt; 0 if it did none."""
        return int(self._slots[_FIRST])

    @property
    def last(self):
        return int(self._slots[_LAST])

    @property
    def struck(self):
        """When the fault happened; 0 if it did not."""
        return self._slots[_STRUCK]

    @property
    def counts(self):
        return {place: int(self._slots[_COUNTS + index]) for index, place in enumerate(PLACES)}

    def finished(self, step):
        return self._slots[_TIMES + step]
