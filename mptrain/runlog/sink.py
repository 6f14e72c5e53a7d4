"""The Sink protocol, which takes records, and its composition.

A sink takes frozen records and shows or stores them. It must never change training, and never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mptrain.records import Record


class Sink(Protocol):
    """Takes the records of a run in the order in which they happened."""

    def take(self, record: Record) -> None:
        """Accept one record; a kind of no interest is ignored."""

    def close(self) -> None:
        """Store or show what is still held back; nothing is taken afterwards. Closing twice does no harm."""


class NoRecords:
    """A sink that keeps nothing."""

    def take(self, record: Record) -> None:
        """Forget it."""

    def flush(self) -> dict[str, int]:
        """There is nothing to flush."""
        return {}

    def close(self) -> None:
        """Nothing is held back."""


class Fanout:
    """A sink that hands every record to several sinks, in the order given.

    Args:
        sinks: The sinks; the first one is given each record first.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def take(self, record: Record) -> None:
        """Give the record to every sink."""
        for sink in self.sinks:
            sink.take(record)

    def close(self) -> None:
        """Close every sink, even if one of them fails.

        Raises:
            Exception: The first failure, after all sinks were closed.
        """
        failures: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
