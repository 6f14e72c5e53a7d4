"""The `Sink` protocol for consumers of records, and a sink that combines several.

A sink receives frozen records and displays or stores them. It must not change training and never receives a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mptrain.records import Record


class Sink(Protocol):
    """Consumer of the records of a run, in the order of the events."""

    def take(self, record: Record) -> None:
        """Accept one record; ignore kinds that the sink does not use."""

    def close(self) -> None:
        """Store or display all pending records. The sink accepts none afterwards; a second call does nothing."""


class NoRecords:
    """A sink that discards all records."""

    def take(self, record: Record) -> None:
        """Discard the record."""

    def flush(self) -> dict[str, int]:
        """Do nothing and return an empty dict."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Fanout:
    """A sink that passes every record to several sinks.

    Args:
        sinks: The sinks, in the order in which they receive each record.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = tuple(sinks)

    def take(self, record: Record) -> None:
        """Pass the record to every sink."""
        for sink in self.sinks:
            sink.take(record)

    def close(self) -> None:
        """Close every sink, even if one of them fails.

        Raises:
            Exception: The first failure, raised after all sinks are closed.
        """
        failures: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
